"""Attends to the segments of one layer without a dense window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from steadykv import ops
from steadykv.cache.checks import Geometry, check_finite
from steadykv.cache.policy import TokenRange
from steadykv.cache.segments import TensorStore, nbytes_of
from steadykv.cache.workspace import decode_workspace_nbytes
from steadykv.errors import ConfigError, PositionError, ShapeError
from steadykv.ops import Decoder
from steadykv.ops.attention import BUDGETS, Heads, Tokens
from steadykv.ops.precision import full_precision

if TYPE_CHECKING:
    from steadykv.cache.layer import LayerCache

__all__ = ["attend"]


def attend(
    layer: LayerCache, q: Tensor, scale: float | None, bias: Tensor | None, memory: str
) -> Tensor:
    """See `LayerCache.attend`."""
    geometry = layer.geometry
    geometry.check("q", q, layer.batch, queries=True)
    tokens = _tokens(layer)
    if layer.batch is None or not tokens.length:
        raise PositionError(
            f"layer {layer.layer}: attend before the first write: expected tokens to attend to; "
            "write the chunk first"
        )
    budget = _budget_of(memory)
    wide_bias = _bias_of(bias, geometry, layer.batch, tokens.length)
    if layer.debug:
        check_finite(layer.layer, q=q)
    queries = layer.keys.heads_first(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with full_precision(geometry.device):
        ops.attend(
            queries,
            tokens,
            layer.keys.heads_first(out),
            scale=geometry.head_dim**-0.5 if scale is None else scale,
            bias=wide_bias,
            budget=budget,
        )
    shape = (queries.shape[0], queries.shape[1], queries.shape[2], queries.shape[3])
    needed = ops.attend_nbytes(shape, tokens, geometry.device, budget=budget)
    decoding = decode_workspace_nbytes((*layer.keys.segments, *layer.values.segments))
    layer.meter.transient(nbytes_of(out) + needed + decoding)
    return out


def _tokens(layer: LayerCache) -> Tokens:
    """The layer's tokens in the order of `spans()`, numbered from 0."""
    ranges = layer.spans()
    keys, values = (_found(store, ranges) for store in (layer.keys, layer.values))

    def load(
        part: Heads, start: int, end: int, k_room: Tensor, v_room: Tensor
    ) -> tuple[Tensor, Tensor]:
        return _load(keys, part, start, end, k_room), _load(values, part, start, end, v_room)

    return Tokens(
        load,
        sum(end - start for start, end in ranges),
        layer.geometry.heads,
        layer.geometry.dtype,
        all(found.can_split for found in (*keys, *values)),
        len(keys) + len(values),
    )


class _Found(NamedTuple):
    """Tokens of one segment: numbered start..end in the layer, and from `first` on in the segment.

    data: [B, H, S, D] of a dense segment, or what decodes a packed one. can_split: whether parts of
    it can be loaded by themselves.
    """

    data: Tensor | Decoder
    start: int
    end: int
    first: int
    can_split: bool


def _found(store: TensorStore, ranges: Sequence[TokenRange]) -> list[_Found]:
    """Looked up once, as every pass of a chunk loads from the same segments."""
    if torch.compiler.is_compiling():
        return _lookup(store, ranges)
    key = (*ranges, ops.backend_of("decode", store.segments[0].device) if store.segments else "")
    found = store.prepared.get(key)
    if found is None:
        found = store.prepared[key] = _lookup(store, ranges)
    return found


def _lookup(store: TensorStore, ranges: Sequence[TokenRange]) -> list[_Found]:
    found, cursor = [], 0
    for segment, low, high in store.overlaps(ranges):
        payload, end = segment.payload, cursor + high - low
        data = store.heads_first(segment.tensor) if payload is None else payload.decoder()
        can_split = payload is None or payload.can_split
        found.append(_Found(data, cursor, end, low - segment.start, can_split))
        cursor = end
    return found


def _load(found: list[_Found], part: Heads, start: int, end: int, room: Tensor) -> Tensor:
    """The tokens start..end in `room`, or where they lie, if that is one dense segment."""
    for data, low, high, first, _ in found:
        begin, stop = max(low, start), min(high, end)
        if begin >= stop:
            continue
        is_whole = begin == start and stop == end
        target = room if is_whole else room.narrow(2, begin - start, stop - begin)
        first += begin - low
        if isinstance(data, Tensor):
            dense = part.of(data).narrow(2, first, stop - begin)
            if is_whole:
                return dense
            target.copy_(dense)
        else:
            data(part, target, first, first + stop - begin)
    return room


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
