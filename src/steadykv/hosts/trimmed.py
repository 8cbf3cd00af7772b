"""Hosts that read [:, :e] and trim that afterwards, with negative indices.

Most of those tokens have left our window: nothing is decoded before the host says what it wants.
"""

from __future__ import annotations

from typing import Any

import torch

from steadykv.errors import HostError
from steadykv.hosts.slices import SlicedLayer, SlicedTensor

__all__ = ["TrimmedTensor"]


class TrimmedTensor(SlicedTensor):
    """A slice of it that names tokens which have left waits until the host trims it."""

    @torch.compiler.disable
    def __getitem__(self, key: Any) -> Any:
        start, end = self._tokens(key)
        if is_held(self._side, self._side.ranges(start, end)):
            return self._side.read(self._name, start, end)
        return WaitingSlice(self._side, self._name, start, end)


class WaitingSlice:
    """Tokens [start, end), of which some have left: only a slice of it can become a tensor."""

    def __init__(self, side: SlicedLayer, name: str, start: int, end: int) -> None:
        self._side, self._name, self._start, self._end = side, name, start, end

    @property
    def shape(self) -> torch.Size:
        geometry = self._side.layer.geometry
        return torch.Size(geometry.shape(self._side.batch, self._end - self._start))

    @torch.compiler.disable
    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) != 2 or parts[0] != slice(None) or not isinstance(parts[1], slice):
            raise HostError(f"{self!r} got index {key!r}: expected [:, a:b]")
        first, last, step = parts[1].indices(self.shape[1])
        start, end = self._start + first, self._start + max(first, last)
        if step == 1 and is_held(self._side, [(start, end)]):
            return self._side.fetch(self._name, [(start, end)])
        return WaitingSlice(self._side, self._name, start, end)

    def __getattr__(self, name: str) -> Any:
        raise HostError(f"{self!r} got {name!r}: expected slices of the attended tokens alone")

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), _kw: Any = None) -> Any:
        name = getattr(function, "__name__", function)
        raise HostError(f"{name} of tokens that have left: expected slices of the attended ones")

    def __repr__(self) -> str:
        held = self._side.layer.held()
        return f"tokens {self._start} to {self._end} of layer {self._side.layer.layer}, held {held}"


def is_held(side: SlicedLayer, ranges: list[tuple[int, int]]) -> bool:
    """Whether all these tokens are in memory."""
    held = side.layer.held()
    return all(a >= b or any(low <= a and b <= high for low, high in held) for a, b in ranges)
