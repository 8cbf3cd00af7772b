"""Shadow caches on the BF16 trajectory: fed with all that the model writes, asked by nobody.

The model gets a `ShadowProbe` for its cache and is answered by a BF16 one, so the trajectory is the
BF16 one. What a probe measures is its layers' business: the token shift (`token_shift.py`), or the
error of attention outputs (`benchmarks/attention_output.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

from steadykv.cache import KVCache, LayerCache, Ledger
from steadykv.cache.policy import TokenRange
from steadykv.capture import rotate_pairs
from steadykv.errors import PositionError

DENOISING, CLEAN = 0, 1
"""Kinds of pass. The clean one is the last before its chunk is committed."""

Rotation = Callable[[int, int], torch.Tensor]
"""Rotary embedding of the tokens start..end: FP32 cosines and sines [2, S, D/2]."""


class ShadowLayer(ABC):
    """What the model sees of one layer: write, observe_queries, read, as of a `LayerCache`.

    reference: the BF16 layer that answers reads. shadows: name -> layer fed with the same tensors.
    query_stride: every so many query tokens are measured. token_dim: 1 for the layout BSHD, 2 for
    BHSD. rotation: what a host that stores keys before their rotary embedding does to them, and to
    its queries, before it attends; measurements come after it.
    """

    def __init__(
        self,
        index: int,
        reference: LayerCache,
        shadows: Mapping[str, LayerCache],
        query_stride: int,
        token_dim: int,
        rotation: Rotation | None = None,
    ) -> None:
        self.index = index
        self.reference = reference
        self.shadows = dict(shadows)
        self.query_stride = query_stride
        self.counts: torch.Tensor | None = None
        """FP64 [shadow, kind of pass, measure, B, Hq]: sums over queries and passes."""
        self.queries = {name: [0, 0] for name in self.shadows}
        """Measured queries per head, by kind of pass: host integers, known from shapes."""
        self.rollouts = 0
        """Rows of the batch, known from the first write on."""
        self._token_dim = token_dim
        self._rotation = rotation
        self._pending: dict[str, tuple[torch.Tensor, int]] = {}
        """Of the pass that goes on: sums [measure, B, Hq] and queries, until its kind is known."""
        self._start: int | None = None
        self._step = 0
        self._is_measured = False

    def restart(self) -> None:
        """Start a new rollout; what was measured so far is kept."""
        self.close_pass(DENOISING)
        self._start, self._step, self._is_measured = None, 0, False

    # --- what the model calls ---------------------------------------------------------------

    def write(self, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        """Write to the reference and to every shadow; errors as of `LayerCache.write`."""
        self.reference.write(k, v, start)
        self.rollouts = k.shape[0]
        for name, layer in self.shadows.items():
            layer.write(k, v, start)
            self._written(name, layer)
        is_same_chunk = start == self._start
        self.close_pass(DENOISING if is_same_chunk else CLEAN)
        if is_same_chunk:
            self._step += 1
            return
        self._start, self._step = start, 0
        self._is_measured = self._is_due(start)

    def observe_queries(self, q: torch.Tensor) -> None:
        """Feed every shadow's statistics and measure, where the chunk is due."""
        if self._start is None:
            raise PositionError(
                f"layer {self.index} has no open chunk; expected write() before observe_queries()"
            )
        for layer in self.shadows.values():
            layer.observe_queries(q)
        if self._is_measured:
            queries = self._heads_first(q)[:, :, :: self.query_stride]
            if self._rotation is not None:
                stride = self.query_stride
                rope = self._rotation(self._start, self._start + stride * queries.shape[2])
                queries = rotate_pairs(queries, rope[:, ::stride])
            self._measure(queries, self._start)

    def read(
        self, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's keys and values: the model goes on as if nothing were quantized."""
        return self.reference.read(out=out)

    def spans(self) -> list[TokenRange]:
        """Token ranges that `read` returns, in its order."""
        return self.reference.spans()

    # --- measuring --------------------------------------------------------------------------

    @abstractmethod
    def _is_due(self, start: int) -> bool:
        """Whether the chunk that was just opened is measured."""

    @abstractmethod
    def _measure(self, queries: torch.Tensor, start: int) -> None:
        """Measure queries [B, Hq, Q, D], rotated, of the chunk at ``start`` into `_pending`."""

    def _written(self, name: str, layer: LayerCache) -> None:  # noqa: B027 - most follow nothing
        """A shadow was written to."""

    def close_chunk(self) -> None:
        """The open chunk is being committed: its last pass was the clean one."""
        self.close_pass(CLEAN)
        self._start = None

    def close_pass(self, kind: int) -> None:
        """Count the pass that just ended, now that its kind is known."""
        for place, name in enumerate(self.shadows):
            if name not in self._pending:
                continue
            counts, queries = self._pending[name]
            if self.counts is None:
                self.counts = counts.new_zeros((len(self.shadows), 2, *counts.shape))
            self.counts[place, kind] += counts
            self.queries[name][kind] += queries
        self._pending = {}

    def _heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """What came in or was read, as [B, H, S, D]."""
        return x if self._token_dim == 2 else x.transpose(1, 2)

    def _rotated(self, x: torch.Tensor, ranges: Iterable[TokenRange]) -> torch.Tensor:
        """x [B, H, N, D] of the tokens of `ranges` as the host's attention sees it."""
        if self._rotation is None:
            return x
        return rotate_pairs(x, torch.cat([self._rotation(*tokens) for tokens in ranges], dim=1))


Layer = TypeVar("Layer", bound=ShadowLayer)


class ShadowProbe(Generic[Layer]):
    """A cache for the model to use; subclasses make its layers and say what they found.

    reference: the cache that answers. shadows: name -> cache that is fed with the same tensors.
    layers: one a layer of those caches.
    """

    def __init__(
        self, reference: KVCache, shadows: Mapping[str, KVCache], layers: Sequence[Layer]
    ) -> None:
        self.reference = reference
        self.shadows = dict(shadows)
        self._layers = list(layers)

    def __getitem__(self, index: int) -> Layer:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)

    def commit(self) -> None:
        """Commit the open chunk in the reference and in every shadow."""
        for layer in self._layers:
            layer.close_chunk()
        for cache in (self.reference, *self.shadows.values()):
            cache.commit()

    def reset(self) -> None:
        """Forget cached tokens and start a new rollout; what was measured so far is kept."""
        for layer in self._layers:
            layer.restart()
        for cache in (self.reference, *self.shadows.values()):
            cache.reset()

    def ledger(self) -> Ledger:
        """The reference's ledger."""
        return self.reference.ledger()

    @property
    def nonfinite_count(self) -> torch.Tensor:
        """NaN and Inf that any of the caches replaced, int64 [] on the device."""
        caches = (self.reference, *self.shadows.values())
        return torch.stack([cache.nonfinite_count for cache in caches]).amax()
