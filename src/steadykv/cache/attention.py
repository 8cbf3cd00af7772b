"""Attends to the segments of one layer without a dense window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steadykv import ops
from steadykv.cache.checks import Geometry, check_finite
from steadykv.cache.policy import TokenRange
from steadykv.cache.segments import TensorStore, nbytes_of
from steadykv.cache.workspace import decode_workspace_nbytes
from steadykv.errors import ConfigError, PositionError, ShapeError
from steadykv.ops.attention import BUDGETS
from steadykv.ops.precision import full_precision
from steadykv.reference.blocks import Heads

if TYPE_CHECKING:
    from steadykv.cache.layer import LayerCache

__all__ = ["attend"]


def attend(
    layer: LayerCache, q: Tensor, scale: float | None, bias: Tensor | None, memory: str
) -> Tensor:
    """See `LayerCache.attend`."""
    geometry = layer.geometry
    geometry.check("q", q, layer.batch, queries=True)
    loader = Loader(layer.keys, layer.values, layer.spans())
    if layer.batch is None or not loader.tokens:
        raise PositionError(
            f"layer {layer.layer}: attend before the first write: expected tokens to attend to; "
            "write the chunk first"
        )
    budget = _budget_of(memory)
    wide_bias = _bias_of(bias, geometry, layer.batch, loader.tokens)
    if layer.debug:
        check_finite(layer.layer, q=q)
    queries = layer.keys.heads_first(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    can_split = loader.can_split
    with full_precision(geometry.device):
        ops.attend(
            queries,
            loader,
            loader.tokens,
            geometry.heads,
            layer.keys.heads_first(out),
            geometry.dtype,
            scale=geometry.head_dim**-0.5 if scale is None else scale,
            bias=wide_bias,
            budget=budget,
            can_split=can_split,
        )
    shape = (queries.shape[0], queries.shape[1], queries.shape[2], queries.shape[3])
    needed = ops.attend_nbytes(
        shape,
        loader.tokens,
        geometry.heads,
        geometry.dtype,
        geometry.device,
        budget=budget,
        can_split=can_split,
    )
    decoding = decode_workspace_nbytes((*layer.keys.segments, *layer.values.segments))
    layer.meter.transient(nbytes_of(out) + needed + decoding)
    return out


class Loader:
    """Loads keys and values of the tokens in `ranges`, numbered in that order (`ops.attend`)."""

    def __init__(
        self, keys: TensorStore, values: TensorStore, ranges: Sequence[TokenRange]
    ) -> None:
        self.stores = (keys, values)
        self.ranges = ranges
        self.tokens = sum(end - start for start, end in ranges)

    @property
    def can_split(self) -> bool:
        """Whether all payloads can be decoded by heads."""
        segments = (segment for store in self.stores for segment in store.segments)
        return all(s.payload is None or s.payload.can_split for s in segments)

    def __call__(
        self, part: Heads, start: int, end: int, k_room: Tensor, v_room: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `steadykv.ops.attend`. What lies in one dense segment is not copied."""
        ranges = _clip(self.ranges, start, end)
        k, v = (
            _load(store, part, ranges, room)
            for store, room in zip(self.stores, (k_room, v_room), strict=True)
        )
        return k, v


def _bias_of(bias: Tensor | None, geometry: Geometry, batch: int, tokens: int) -> Tensor | None:
    """The bias of `LayerCache.attend` as FP32 [B, H, T]. Raises ShapeError."""
    if bias is None:
        return None
    shapes = ((tokens,), (batch, geometry.heads, tokens))
    if not isinstance(bias, Tensor) or tuple(bias.shape) not in shapes:
        got = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ShapeError(
            f"bias is {got}: expected {shapes[0]} or {shapes[1]}, one number for each token of "
            "spans(), in that order"
        )
    if not bias.is_floating_point() or bias.device != geometry.device:
        raise ShapeError(
            f"bias is {bias.dtype} on {bias.device}: expected floats on {geometry.device}"
        )
    return bias.float().expand(shapes[1])


def _budget_of(memory: str) -> int:
    """Bytes of transients in a mode. Raises ConfigError."""
    if memory not in BUDGETS:
        raise ConfigError(f"memory is {memory!r}: expected {' or '.join(map(repr, BUDGETS))}")
    return BUDGETS[memory]


def _clip(ranges: Sequence[TokenRange], start: int, end: int) -> list[TokenRange]:
    """The ranges of the tokens numbered start..end."""
    clipped, before = [], 0
    for first, last in ranges:
        low, high = max(start - before, 0), min(end - before, last - first)
        if low < high:
            clipped.append((first + low, first + high))
        before += last - first
    return clipped


def _load(store: TensorStore, part: Heads, ranges: Sequence[TokenRange], room: Tensor) -> Tensor:
    cursor = 0
    for segment, low, high in store.overlaps(ranges):
        first, last = low - segment.start, high - segment.start
        target = room[:, :, cursor : cursor + high - low]
        if segment.payload is not None:
            segment.payload.part(part).decode(out=target, start=first, end=last)
        else:
            dense = part.of(store.heads_first(segment.tensor))[:, :, first:last]
            if target.shape == room.shape:
                return dense
            target.copy_(dense)
        cursor += high - low
    return room
