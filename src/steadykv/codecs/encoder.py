"""The way in: checks, cleans and packs one span, in passes of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .. import ops
from ..config import CodecConfig
from ..errors import ConfigError, ShapeError
from .base import (
    FLAGS,
    GPU_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    Codec,
    Encoded,
    HeadInputs,
    Shape,
    SpanKey,
    WarmStart,
)
from .payload import Payload
from .query_moment import QueryMoment

__all__ = ["encode"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def encode(
    x: Tensor,
    config: CodecConfig,
    *,
    stats: QueryMoment | None = None,
    warm: Payload | WarmStart | Tensor | None = None,
    span_key: SpanKey | None = None,
    initial_centroids: Tensor | None = None,
) -> Payload:
    """Packs one K or V span.

    x: FP16, BF16 or FP32 [B, H, S, D], any strides; NaN and Inf count as 0 (flag `nonfinite` counts
        them on the device). It is not changed and not kept.
    stats: queries seen so far, for codecs that use them; None or no queries is a cold start.
    warm: payload of the span before, or its `WarmStart`, or its centroids [B, H, T, C, D]; starts
        k-means where `config.warm_start` is set and the geometry is the same, and is ignored
        otherwise. `warm_start="ids"` needs more than the centroids.
    span_key: layer, tensor and span, which seed a cold start.
    initial_centroids: [B, H, T, min(C, S), D], overrides `warm` and the cold start.

    Batch rows and heads are independent: encoding two rows together gives the bytes of encoding
    each alone.
    Allocates the payload and a workspace of about three FP32 copies of as many heads as fit in
    `base.WORKSPACE_BYTES` (one head at least). Raises ShapeError; ConfigError for another kind of
    `config`.
    """
    from . import codec_for

    if not isinstance(config, CodecConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}: expected a CodecConfig; a CacheConfig has two, "
            "as in preset('qvg').keys"
        )
    shape = _checked_shape(x)
    batch, heads = shape[:2]
    codec = codec_for(config)
    if stats is not None:
        _check_moment(stats, x)
    start = _start_centroids(codec, shape, warm, initial_centroids)
    if not x.numel():
        return _empty(codec, shape, x.device)
    inputs = HeadInputs(span_key or SpanKey())
    if start is not None:
        given = (None if t is None else t.to(x.device).flatten(0, 1) for t in start)
        inputs = HeadInputs(inputs.span_key, None, None, *given)
    if config.needs_queries and stats is not None and stats.has_queries:
        inputs = replace(inputs, moment=stats.moment.flatten(0, 1), count=stats.count.flatten(0, 1))
    with ops.full_precision(x.device):
        passes = [_encode_heads(codec, x, heads, inputs) for heads in _head_groups(shape, x.device)]
        tensors = codec.finish(_join([p.tensors for p in passes], batch, heads), shape)
        flags = _join([p.flags for p in passes], batch, heads)
    ordered = {name: tensors[name] for name in codec.stored_layout(shape, tensors)}
    return Payload(config, shape, ordered, {k: t.to(FLAGS[k]) for k, t in flags.items()})


def _encode_heads(codec: Codec, x: Tensor, heads: slice, inputs: HeadInputs) -> Encoded:
    """Encodes some of the N = B·H heads from a clean FP32 copy."""
    rows, nonfinite = ops.replace_nonfinite(_head_rows(x, heads))
    whole = (inputs.moment, inputs.count, inputs.initial_centroids, inputs.initial_ids)
    given = (None if t is None else t[heads] for t in whole)
    encoded = codec.encode(rows, HeadInputs(inputs.span_key, *given))
    encoded.flags["nonfinite"] = nonfinite
    return encoded


def _head_rows(x: Tensor, heads: slice) -> Tensor:
    """Heads first..last of [B, H, S, D] in any strides, as a new contiguous FP32 [n, S, D]."""
    shape = (heads.stop - heads.start, *x.shape[2:])
    rows = torch.empty(shape, dtype=torch.float32, device=x.device)
    first = heads.start
    while first < heads.stop:  # whole batch rows, cut at the ends
        row, head = divmod(first, x.shape[1])
        count = min(x.shape[1] - head, heads.stop - first)
        at = first - heads.start
        rows[at : at + count] = x[row, head : head + count]
        first += count
    return rows


def _head_groups(shape: Shape, device: torch.device) -> Iterator[slice]:
    batch, heads, tokens, width = shape
    budget = WORKSPACE_BYTES if device.type == "cpu" else GPU_WORKSPACE_BYTES
    step = max(1, budget // (4 * tokens * width))
    for first in range(0, batch * heads, step):
        yield slice(first, min(first + step, batch * heads))


def _join(parts: list[dict[str, Tensor]], batch: int, heads: int) -> dict[str, Tensor]:
    """Concatenates the passes and splits N into [B, H]."""
    joined = (
        parts[0] if len(parts) == 1 else {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    )
    return {k: t.contiguous().unflatten(0, (batch, heads)) for k, t in joined.items()}


def _empty(codec: Codec, shape: Shape, device: torch.device) -> Payload:
    layout = codec.layout(shape, compensated=False)
    tensors = {k: torch.empty(s.shape, dtype=s.dtype, device=device) for k, s in layout.items()}
    flags = {n: torch.zeros(shape[:2], dtype=FLAGS[n], device=device) for n in codec.flags}
    return Payload(codec.config, shape, tensors, flags)


def _checked_shape(x: Tensor) -> Shape:
    if not isinstance(x, Tensor):
        raise ShapeError(f"x is a {type(x).__name__}: expected a torch.Tensor [B, H, S, D]")
    if x.dim() != 4 or not x.shape[3] or x.dtype not in _DTYPES:
        raise ShapeError(
            f"x is {tuple(x.shape)} {x.dtype}: "
            "expected [B, H, S, D] in bfloat16, float16 or float32, D at least 1"
        )
    batch, heads, tokens, width = x.shape
    return batch, heads, tokens, width


def _check_moment(stats: QueryMoment, x: Tensor) -> None:
    if not isinstance(stats, QueryMoment):
        raise ShapeError(
            f"stats is a {type(stats).__name__}: expected a QueryMoment; QueryMoment.empty(…) and "
            "update(queries) make one"
        )
    batch, heads, _, width = x.shape
    expected = (batch, heads, width, width)
    if tuple(stats.moment.shape) != expected or stats.moment.device != x.device:
        raise ShapeError(
            f"query moment is {tuple(stats.moment.shape)} on {stats.moment.device}: "
            f"expected {expected} on {x.device}"
        )


def _start_centroids(
    codec: Codec,
    shape: Shape,
    warm: Payload | WarmStart | Tensor | None,
    initial: Tensor | None,
) -> WarmStart | None:
    """Centroids [B, H, T, C_eff, D], and ids, to start from; None for a cold start."""
    if not isinstance(warm, Payload | WarmStart | Tensor | None):
        raise ShapeError(f"warm is a {type(warm).__name__}: expected a Payload or its centroids")
    if not isinstance(initial, Tensor | None):
        raise ShapeError(f"initial_centroids is a {type(initial).__name__}: expected a Tensor")
    layout = codec.layout(shape, compensated=False)
    if "centroids" not in layout:
        return None
    wanted, kind = layout["centroids"].shape, codec.config.warm_start
    if initial is not None:
        if tuple(initial.shape) != wanted:
            raise ShapeError(f"initial_centroids are {tuple(initial.shape)}: expected {wanted}")
        return WarmStart(initial)
    if not kind or warm is None:
        return None
    if isinstance(warm, Payload):
        if warm.shape != shape or warm.centroids is None:
            return None
        warm = WarmStart(warm.centroids, warm.tensors.get("ids"))
    elif isinstance(warm, Tensor):
        warm = WarmStart(warm)
    if tuple(warm.centroids.shape) != wanted:
        return None
    if kind != "ids":
        return WarmStart(warm.centroids)
    if warm.ids is None:
        raise ShapeError(
            "warm has no ids: expected a Payload or a WarmStart with ids, because warm_start is "
            "'ids'; set warm_start=True to start from centroids"
        )
    return warm if tuple(warm.ids.shape) == layout["ids"].shape else None
