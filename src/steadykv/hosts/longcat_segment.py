"""LongCat-Video's dictionary of keys and values, packed: one segment, which the next one replaces.

Its blocks' outputs are packed one after the other, and the dictionary unpacks a layer at an access.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from steadykv.cache import KVCache
from steadykv.errors import HostError
from steadykv.hosts.adapter import Session

__all__ = ["TITLE", "SegmentStore"]

TITLE = "LongCat-Video"


class Handed:
    """Stands for a tensor that was packed when its block had made it, until the host stores it.

    The host makes it contiguous, or moves it to the CPU: what is packed stays on its device.
    """

    def contiguous(self) -> Handed:
        return self

    def cpu(self) -> Handed:
        return self


class PackedSegment(dict[int, Any]):
    """{layer: (k, v)}: fresh dense tensors of that layer alone, at each access."""

    def __init__(self, store: SegmentStore, layers: list[int]) -> None:
        super().__init__(dict.fromkeys(layers))
        self._store, self._number = store, store.number

    @torch.compiler.disable
    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer not in self:
            raise KeyError(layer)
        if self._number != self._store.number or self._store.cache is None:
            raise HostError(
                f"{TITLE}: layer {layer} of segment {self._number} is read while segment "
                f"{self._store.number} is held: expected the newest one; no older one is kept"
            )
        return self._store.cache[layer].read()

    @torch.compiler.disable
    def get(self, layer: int, default: Any = None) -> Any:
        return self[layer] if layer in self else default  # noqa: SIM401  # this is `get`

    def values(self) -> Iterator[Any]:  # type: ignore[override]  # a view would hold every layer
        return (self[layer] for layer in self)

    def items(self) -> Iterator[tuple[int, Any]]:  # type: ignore[override]
        return ((layer, self[layer]) for layer in self)


class SegmentStore:
    """The one cache of a pipeline. A segment is one span; the next one takes its place.

    number: of the newest segment. cache: None before the first one.
    """

    def __init__(self, session: Session, blocks: int) -> None:
        self.session, self.blocks = session, blocks
        config = session.config
        self.packs = not (config.keys.is_dense and config.values.is_dense)
        self.cache: KVCache | None = None
        self.number = 0
        self._kind: tuple[Any, ...] = ()
        self._frames = 0  # condition latents while a pass over them runs, else 0
        self._takes_early = self._saw_queries = False

    def encode(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The host's clean pass. What the segment before left is not read any more."""
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        self.start()
        self._frames = given["cond_latents"].shape[2]
        # A dense cache is left to the host until it stores it, so that its offloading is honoured.
        self._takes_early = self.packs or not given.get("offload_kv_cache")
        try:
            return original(*args, **kwargs)
        finally:
            self._frames = 0

    def start(self) -> None:
        """Empty the cache for another segment: its only statistics are those of its own pass."""
        self.number += 1
        self._saw_queries = False
        for layer in self.cache or ():
            layer.reset()

    def observe(self, layer: int, q: Tensor) -> None:
        """Queries [B, H, S, D] of the clean pass, before RoPE as the stored keys are.

        Those of the noisy passes are not observed: the one span of the segment was packed before
        they began, and the next segment does not use them.
        """
        if self._frames:
            self.cache_for(q)[layer].observe_queries(q)
            self._saw_queries = True

    def take(self, layer: int, output: Any) -> Any:
        """Pack what a block hands out in the clean pass, so that no two layers are dense."""
        if not (self._frames and self._takes_early and isinstance(output, tuple)):
            return None
        hidden, (k, v) = output
        self.write(layer, k, v)
        return hidden, (Handed(), Handed())

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store and pack K and V [B, H, S, D]. The queries of their pass came before them."""
        cache = self.cache_for(k)
        cache[layer].write(k, v, 0, observed=True)
        cache[layer].commit()

    def update(self, original: Callable[..., Any], kv_cache_dict: dict[int, Any] | None) -> Any:
        """What the host stores: an unpacking dictionary instead of the dense one, which is emptied.

        Entries that are dense still are packed here: a dictionary that was made elsewhere.
        """
        if not kv_cache_dict or isinstance(kv_cache_dict, PackedSegment):
            return original(kv_cache_dict)
        layers = list(kv_cache_dict)
        if not self._frames:
            self.start()  # stored without a clean pass of this pipeline
        for layer in layers:
            k, v = kv_cache_dict.pop(layer)
            if not isinstance(k, Handed):
                self.write(layer, k, v)
        if not self._saw_queries:
            self.session.without_queries("its clean pass did not call q_norm")
        return original(PackedSegment(self, layers))

    def cache_for(self, x: Tensor) -> KVCache:
        """The cache for tensors like x [B, H, S, D]; a new one for another resolution."""
        frame_tokens = x.shape[2] // max(1, self._frames)
        kind = (x.shape[1], x.shape[3], frame_tokens, x.dtype, x.device)
        if self.cache is None or kind != self._kind:
            self._kind = kind
            self.cache = self.session.build(
                "main",
                layers=self.blocks,
                heads=x.shape[1],
                head_dim=x.shape[3],
                frame_tokens=frame_tokens,
                dtype=x.dtype,
                device=x.device,
                layout="BHSD",
                span_chunks=1,
                recent_keep=0,  # the segment's one span is not kept dense for being the newest
                first_span="own",
            )
        return self.cache
