"""The cache object of hosts that write one chunk between two hooks, and read it as a whole.

The calling contract is that of `BlockKVCache` in flashdreams 0.1.0: `before_update(i)`, then any
number of `update(k, v)`, `cached_k()`, `cached_v()`, then `after_update(i)`. The same i writes the
chunk again, i + 1 appends one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steadykv.cache import LayerCache
from steadykv.errors import PositionError, ShapeError
from steadykv.hosts.before_rope import KeyTurns

__all__ = ["BlockCache", "untraced", "untraced_methods"]


class BlockCache:
    """One layer's cache: the first `sink_size` tokens and the newest `window_size` ones.

    chunk_size, window_size, sink_size: tokens; the window is counted without the sink. wrote:
    called at every `update`, for who shows the pass's queries to the layer. turns: of the host's
    rotary embedding, where keys are to be stored before it.
    A chunk is committed by `after_update`, behind the host's clean pass. A host that then begins
    the same chunk again closes it after every pass: from there on a chunk is committed when the
    next one begins.
    """

    seq_dim = 1

    def __init__(
        self,
        layer: LayerCache,
        chunk_size: int,
        window_size: int,
        sink_size: int,
        wrote: Callable[[BlockCache], None] | None = None,
        turns: KeyTurns | None = None,
    ) -> None:
        self.layer, self.turns = layer, turns
        self.chunk_size, self.window_size, self.sink_size = chunk_size, window_size, sink_size
        self._wrote = wrote
        self._closes_every_pass = False
        self._closed = -1  # number of the newest chunk behind `after_update`
        self._current: int | None = None

    @property
    def size(self) -> int:
        """Tokens that attention sees, those of a chunk that has begun included."""
        newest = self._closed if self._current is None else self._current
        return min((newest + 1) * self.chunk_size, self.sink_size + self.window_size)

    @property
    def write_end(self) -> int:
        """Where the chunk that has begun ends among those tokens."""
        self._begun("write_end")
        return self.size

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.geometry.dtype

    @property
    def device(self) -> torch.device:
        return self.layer.geometry.device

    def is_steady_state(self) -> bool:
        """Whether the window is full before the chunk that has begun."""
        chunk = self._begun("is_steady_state") * self.chunk_size
        held = (self._closed + 1) * self.chunk_size
        return held >= self.sink_size + self.window_size and chunk >= self.sink_size

    def before_update(self, chunk_idx: int) -> None:
        """Begin a chunk: the newest one again, or the one behind it; else PositionError."""
        if self._current is not None or chunk_idx not in (self._closed, self._closed + 1):
            wanted = f"{self._closed} or {self._closed + 1}"
            if self._current is not None:
                wanted = f"after_update({self._current}) first"
            raise PositionError(
                f"layer {self.layer.layer}: before_update({chunk_idx}): expected {wanted}"
            )
        if chunk_idx > self._closed:
            self.layer.commit()
        elif chunk_idx >= 0:
            self._closes_every_pass = True
        self._current = chunk_idx

    def update(self, k: Tensor, v: Tensor) -> None:
        """Write the chunk that has begun: k, v [B, S, H, D] S = chunk_size; else ShapeError."""
        chunk = self._begun("update")
        if k.shape[1] != self.chunk_size:
            raise ShapeError(
                f"layer {self.layer.layer}: a chunk of {k.shape[1]} tokens: expected "
                f"{self.chunk_size}; the host's chunks all have one length"
            )
        start = chunk * self.chunk_size
        if self.layer.progress.end > start:  # committed before it was known to come again
            self.layer.truncate(start)
        if self.turns is not None:
            k = self.turns.stored(self.layer, k, start)
        self.layer.write(k, v, start)
        if self._wrote is not None:
            self._wrote(self)

    def after_update(self, chunk_idx: int) -> None:
        """End the chunk; else PositionError."""
        if self._begun("after_update") != chunk_idx:
            raise PositionError(
                f"layer {self.layer.layer}: after_update({chunk_idx}): expected {self._current}"
            )
        self._closed, self._current = chunk_idx, None
        if not self._closes_every_pass:
            self.layer.commit()

    def cached_k(self) -> Tensor:
        """Keys that attention sees: [B, size, H, D], sink first, fresh memory."""
        return self._read("key")

    def cached_v(self) -> Tensor:
        """Values that attention sees: [B, size, H, D], sink first, fresh memory."""
        return self._read("value")

    def reset(self) -> None:
        """Forget everything."""
        self._closed, self._current = -1, None
        self.layer.reset()

    def _read(self, name: str) -> Tensor:
        self._begun(f"cached_{name[0]}")
        ranges = self.layer.spans()
        found = self.layer.read_tensor(name, ranges)
        if name == "key" and self.turns is not None:
            self.turns.turn(found, ranges)
        return found

    def _begun(self, call: str) -> int:
        if self._current is None:
            raise PositionError(
                f"layer {self.layer.layer}: {call} outside of a chunk: expected before_update first"
            )
        return self._current


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for hosts that are compiled: positions and segments are no graph's business."""
    return torch.compiler.disable(function)


def untraced_methods(kind: type[BlockCache]) -> type[BlockCache]:
    """The class for hosts that are compiled."""
    names = ("update", "cached_k", "cached_v")
    methods = {name: untraced(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), methods)
