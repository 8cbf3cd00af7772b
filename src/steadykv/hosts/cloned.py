"""Hosts that clone their cache, edit the clone, and write the cache itself after all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steadykv.errors import HostError
from steadykv.hosts.before_rope import KeyTurns
from steadykv.hosts.copies import Asked
from steadykv.hosts.slices import SlicedLayer, SlicedTensor

__all__ = ["DeferredLayer"]


class DeferredLayer(SlicedLayer):
    """Written after the host attended; the sink is fetched by a slice of its own."""

    observed = True

    def __init__(self, *args: Any, asked: Asked, turns: KeyTurns | None = None) -> None:
        super().__init__(*args, substitutes=False, turns=turns)
        self.k, self.v = ClonedTensor(self, "key"), ClonedTensor(self, "value")
        self.asked = asked


class ClonedTensor(SlicedTensor):
    def clone(self) -> Any:
        return Overlay(self._side, self._name)


class Overlay(SlicedTensor):
    """A clone: its one write stays here, everything before that is read from the layer."""

    _start: int | None = None
    _own: Tensor

    @torch.compiler.disable
    def __setitem__(self, key: Any, value: Tensor) -> None:
        start, _ = self._tokens(key, writes=True)
        side, layer = self._side, self._side.layer
        if self._start is not None or start not in {layer.progress.end, layer.progress.newest}:
            raise HostError(
                f"layer {layer.layer}: edit of a cloned cache at token {start}: expected one edit, "
                f"of the newest chunk ({layer.progress.newest}); the window was moved or zeroed"
            )
        if start == layer.progress.newest:
            layer.commit()  # a new chunk: the one before is clean, and queries count for this one
        if self._name == "key" and side.turns is not None:
            side.turns.learn(layer, value, start)
        self._start, self._own = start, value

    @torch.compiler.disable
    def __getitem__(self, key: Any) -> Tensor:
        start, end = self._tokens(key)
        side = self._side
        if isinstance(side, DeferredLayer):
            side.asked.layer, side.asked.turns = side.layer, side.turns
        if self._start is None or end <= self._start:
            return side.fetch(self._name, [(start, end)])
        geometry = side.layer.geometry
        out = geometry.empty(side.batch, end - start)
        border = max(start, self._start)
        if border > start:
            side.fetch(self._name, [(start, border)], out)
        out[:, border - start :] = self._own[:, border - self._start : end - self._start]
        return out
