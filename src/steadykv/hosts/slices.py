"""Family A: hosts that write and read their cache as slices of one long tensor.

Such a host moves its window inside the tensor when a chunk would not fit. Ours looks endless, so
that it never does: local and global positions stay equal, and every slice names absolute tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steadykv.cache import LayerCache
from steadykv.cache.policy import TokenRange
from steadykv.errors import HostError, PositionError
from steadykv.hosts.before_rope import KeyTurns
from steadykv.hosts.packed_window import PackedWindow
from steadykv.hosts.queries import Readers

__all__ = ["CAPACITY", "SlicedLayer", "SlicedTensor"]

CAPACITY = 2**40
"""Tokens that the tensor claims to hold: more than any video has."""


class SlicedLayer:
    """Keys and values of one layer as two `SlicedTensor`s; a chunk is stored when both came.

    batch: B of the tensors. substitutes: a slice [a, b) means what the host's own buffer, a window
    long and rolled behind the sink, holds in its last b - a tokens when b is written: for a whole
    window the sink and the newest tokens. Without, the tokens [a, b) themselves, for hosts that
    fetch their sink by a slice of its own.
    turns: of the host's rotary embedding, where keys are to be stored before it. packed: give out
    `PackedWindow`s, for a host whose attention is watched by `observe_attention`.
    A write at token 0 behind other tokens starts over, as a new prompt does.
    observed: of a host that writes after it attended, see `LayerCache.write`.
    """

    observed = False

    def __init__(
        self,
        layer: LayerCache,
        batch: int,
        readers: Readers,
        *,
        substitutes: bool = True,
        turns: KeyTurns | None = None,
        packed: bool = False,
    ) -> None:
        self.layer, self.batch, self.readers = layer, batch, readers
        self.substitutes, self.turns, self.packed = substitutes, turns, packed
        self.k, self.v = SlicedTensor(self, "key"), SlicedTensor(self, "value")
        self._half: tuple[str, int, Tensor] | None = None

    def write(self, name: str, start: int, tensor: Tensor) -> None:
        """One tensor of a chunk; the other one has to follow before anything else."""
        if self._half is None or self._half[:2] == (name, start):  # again, after a failure between
            self._half = name, start, tensor
            return
        first, first_start, first_tensor = self._half
        if first == name or start != first_start:
            raise PositionError(
                f"layer {self.layer.layer}: {name} of token {start} written after {first} of token "
                f"{first_start}: expected both tensors of a chunk, one after the other"
            )
        self._half = None
        k, v = (first_tensor, tensor) if first == "key" else (tensor, first_tensor)
        if start == 0 and self._has_older():
            self.layer.reset()
        if self.turns is not None:
            # A host that writes after it attended showed its keys before (`DeferredLayer`).
            store = self.turns.back if self.observed else partial(self.turns.stored, self.layer)
            k = store(k, start)
        self.layer.write(k, v, start, observed=self.observed)

    def read(self, name: str, start: int, end: int) -> Tensor | PackedWindow:
        """Tokens that the slice [start, end) of the host's buffer would hold, in fresh memory."""
        if self._half is not None:
            raise PositionError(
                f"layer {self.layer.layer}: read of tokens {start} to {end} between the two writes "
                "of a chunk: expected its other tensor first"
            )
        ranges = self.ranges(start, end)
        if self.packed:
            return PackedWindow(self.layer, name, ranges)
        found = self.fetch(name, ranges)
        if name == "key":
            self.readers.gave(found, self.layer, self.turns)
        return found

    def fetch(self, name: str, ranges: Sequence[TokenRange], out: Tensor | None = None) -> Tensor:
        """Exactly these tokens, in fresh memory or in `out`, keys as the host stores them."""
        found = self.layer.read_tensor(name, ranges, out)
        if name == "key" and self.turns is not None:
            self.turns.turn(found, ranges)
        return found

    def ranges(self, start: int, end: int) -> list[TokenRange]:
        """The absolute tokens that a slice stands for."""
        sink, window = self.layer.policy.sink_tokens, self.layer.policy.window_tokens
        if window is None or end <= window or not self.substitutes:
            return [(start, end)]
        first = max(0, window - (end - start))  # where the slice begins in the host's own buffer
        newest = (end - window + max(first, sink), end)
        return [(first, sink), newest] if first < sink else [newest]

    def reset(self) -> None:
        """Forget everything."""
        self._half = None
        self.layer.reset()

    def _has_older(self) -> bool:
        chunk = self.layer.progress.open
        return self.layer.progress.end > 0 or (chunk is not None and chunk[0] > 0)


class SlicedTensor:
    """One of the two: looks like a tensor [B, 2**40, H, D] that only token slices are taken of."""

    def __init__(self, side: SlicedLayer, name: str) -> None:
        self._side, self._name = side, name

    @property
    def shape(self) -> torch.Size:
        geometry = self._side.layer.geometry
        return torch.Size(geometry.shape(self._side.batch, CAPACITY))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 4

    ndim = property(dim)

    @property
    def dtype(self) -> torch.dtype:
        return self._side.layer.geometry.dtype

    @property
    def device(self) -> torch.device:
        return self._side.layer.geometry.device

    def __len__(self) -> int:
        return self._side.batch

    @torch.compiler.disable
    def __getitem__(self, key: Any) -> Tensor | PackedWindow:
        start, end = self._tokens(key)
        return self._side.read(self._name, start, end)

    @torch.compiler.disable
    def __setitem__(self, key: Any, value: Tensor) -> None:
        start, end = self._tokens(key, writes=True)
        tokens = value.shape[self._side.layer.geometry.token_dim]
        if tokens != end - start:
            raise PositionError(
                f"layer {self._side.layer.layer}: {tokens} tokens written to {start} to {end}: "
                f"expected {end - start}"
            )
        self._side.write(self._name, start, value.to(self.dtype))  # as assigning to a tensor does

    def detach(self) -> SlicedTensor:
        return self

    def contiguous(self) -> SlicedTensor:
        return self

    def zero_(self) -> SlicedTensor:
        """What hosts empty a cache with."""
        self._side.reset()
        return self

    def clone(self) -> Tensor:
        raise HostError(
            f"layer {self._side.layer.layer}: the host copies its whole cache: expected slices of "
            "it; no adapter for this host keeps copies"
        )

    def __repr__(self) -> str:
        return f"SlicedTensor({self._name}, {tuple(self.shape)}, {self._side.layer.held()})"

    def _tokens(self, key: Any, writes: bool = False) -> TokenRange:
        """The token slice in an index: [:, a:b], or with whole heads and channels behind it."""
        token_dim = self._side.layer.geometry.token_dim
        parts = key if isinstance(key, tuple) else (key,)
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            parts = (*parts[:at], *[slice(None)] * (5 - len(parts)), *parts[at + 1 :])
        others = [part for i, part in enumerate(parts) if i != token_dim]
        is_plain = all(
            isinstance(p, slice) and self._is_whole(i, p)
            for i, p in enumerate(parts)
            if i != token_dim
        )
        if len(parts) > 4 or not is_plain:
            raise HostError(
                f"layer {self._side.layer.layer}: index {others!r} beside the tokens: expected "
                "whole batches, heads and channels"
            )
        tokens = parts[token_dim] if len(parts) > token_dim else slice(None)
        if not isinstance(tokens, slice) or tokens.step not in (None, 1):
            raise HostError(
                f"layer {self._side.layer.layer}: index {tokens!r} of tokens: expected a slice "
                "without a step"
            )
        newest = CAPACITY if writes else self._side.layer.progress.newest
        start = 0 if tokens.start is None else int(tokens.start)
        end = newest if tokens.stop is None else int(tokens.stop)
        return start, max(start, end)

    def _is_whole(self, dim: int, part: slice) -> bool:
        size = self.shape[dim]
        return part.indices(size) == (0, size, 1)
