"""The key/value cache of a whole model: one `LayerCache` per layer, one ledger."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from steadykv.cache.layer import LayerCache
from steadykv.cache.ledger import Ledger, MemoryMeter
from steadykv.cache.status import LayerStatus
from steadykv.codecs import Calibration
from steadykv.config import CacheConfig
from steadykv.errors import ConfigError

__all__ = ["KVCache"]


class KVCache:
    """A sequence of layers of equal geometry, for one guidance branch.

    num_layers, num_heads (KV heads H), head_dim (D), frame_tokens: from the host's configuration.
    config: codecs and policy. layout: "BSHD" or "BHSD". dtype: of the host's K and V, and of the
    dense tokens. device: where they are. debug: raise on NaN and Inf (syncs). calibration: for
    codecs with levels="calibrated" (kvquant), with an entry for every layer. meter: shared by
    caches whose peak is to be measured together.

        cache[i].write(k, v, start); cache[i].observe_queries(q); k, v = cache[i].read()
        cache.commit()                  # after the clean pass; or just write the next chunk

    Raises ConfigError for sizes that are not positive integers, and for an unknown layout or dtype;
    CalibrationError for a calibration that is missing, not asked for or made for something else.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        frame_tokens: int,
        config: CacheConfig,
        layout: str = "BSHD",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        debug: bool = False,
        calibration: Calibration | None = None,
        meter: MemoryMeter | None = None,
    ) -> None:
        if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
            raise ConfigError(f"num_layers is {num_layers!r}: expected a positive integer")
        self.config = config
        self._meter = MemoryMeter() if meter is None else meter
        self._layers = tuple(
            LayerCache(
                num_heads,
                head_dim,
                frame_tokens,
                config,
                layer=index,
                layout=layout,
                dtype=dtype,
                device=device,
                debug=debug,
                calibration=calibration,
                meter=self._meter,
            )
            for index in range(num_layers)
        )

    def __getitem__(self, index: int) -> LayerCache:
        try:
            return self._layers[index]
        except IndexError:
            raise IndexError(f"layer {index}: expected 0 to {len(self) - 1}") from None

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self._layers)

    def __repr__(self) -> str:
        layer = self._layers[0]
        geometry = layer.geometry
        return (
            f"KVCache({self.config.name!r}, layers={len(self)}, heads={geometry.heads}, "
            f"head_dim={geometry.head_dim}, layout={geometry.layout}, dtype={geometry.dtype}, "
            f"device={geometry.device}, nbytes={self.nbytes})"
        )

    def commit(self) -> None:
        """Commit the open chunk of every layer, one layer after the other; idempotent."""
        for layer in self._layers:
            layer.commit()

    def reset(self) -> None:
        """Forget everything, the peak included: as if newly built."""
        for layer in self._layers:
            layer.reset()
        self._meter.restart_peak()

    def status(self) -> tuple[LayerStatus, ...]:
        """`LayerCache.status` of every layer."""
        return tuple(layer.status() for layer in self._layers)

    def ledger(self) -> Ledger:
        """Bytes by layer and part, from the tensors that exist. Reads nothing from the device."""
        return Ledger(tuple(layer.ledger() for layer in self._layers), self._meter.peak)

    @property
    def nbytes(self) -> int:
        """Bytes held now: the ledger's resident_bytes."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def nonfinite_count(self) -> Tensor:
        """NaN and Inf that were replaced by 0, int64 [] on the device; `int()` of it syncs."""
        return torch.stack([layer.nonfinite_count for layer in self._layers]).sum()
