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
    KERNEL_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    Codec,
    Encoded,
    HeadInputs,
    Shape,
    SpanKey,
    WarmStart,
)
from .calibration import Calibration, grid_for
from .payload import Payload
from .query_moment import QueryMoment

__all__ = ["encode", "heads_per_pass", "in_kernels"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WARM = (Payload, WarmStart, Tensor)


def encode(
    x: Tensor,
    config: CodecConfig,
    *,
    stats: QueryMoment | None = None,
    warm: Payload | WarmStart | Tensor | None = None,
    span_key: SpanKey | None = None,
    initial_centroids: Tensor | None = None,
    calibration: Calibration | None = None,
) -> Payload:
    """Packs one K or V span.

    x: FP16, BF16 or FP32 [B, H, S, D], any strides; NaN and Inf count as 0 (flag `nonfinite` counts
        them on the device). It is not changed and not kept.
    stats: queries seen so far, for codecs that use them; None or no queries is a cold start.
    warm: payload of the span before, or its `WarmStart`, or its centroids [B, H, T, C, D]; starts
        k-means where `config.warm_start` is set and the geometry is the same, and is ignored
        otherwise. `warm_start="ids"` needs more than the centroids; its ids have to be below C,
        which is checked on a CPU alone, as elsewhere it would wait for the device.
    span_key: layer, tensor and span, which seed a cold start.
    initial_centroids: BF16, FP16 or FP32 [B, H, T, min(C, S), D], overrides `warm` and the cold
        start. These and those of `warm` have to be finite: only the device could tell.
    calibration: for configs with levels="calibrated", and only for them; has an entry for the layer
        and tensor of `span_key`.

    Batch rows are independent, and so are heads unless the method pools them by definition
    (kvquant): encoding two rows together gives the bytes of encoding each alone.
    Allocates the payload and a workspace of about three FP32 copies of as many heads as fit in
    `base.WORKSPACE_BYTES` (one head at least; a method that pools heads takes whole batch rows).
    Raises ShapeError; ConfigError for another kind of `config`; CalibrationError for a calibration
    that is missing, not asked for or made for something else.
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
    key = span_key or SpanKey()
    grid = grid_for(calibration, config, key.layer, key.tensor, heads, shape[3])
    if not x.numel():
        return _empty(codec, shape, x.device)
    moment, count, centroids, ids = None, None, None, None
    if start is not None:
        centroids, ids = (None if t is None else t.to(x.device).flatten(0, 1) for t in start)
    if config.needs_queries and stats is not None and stats.has_queries:
        moment, count = stats.moment.flatten(0, 1), stats.count.flatten(0, 1)
    if grid is not None:
        grid = grid.to(x.device)
    inputs = HeadInputs(key, moment, count, centroids, ids, heads, grid)
    with ops.full_precision(x.device):
        groups = _head_groups(codec, shape, x.device)
        passes = [_encode_heads(codec, x, at, inputs) for at in groups]
        tensors = {
            **_by_head(_join([p.tensors for p in passes]), batch, heads),
            **_join([p.row_tensors for p in passes]),
        }
        tensors = codec.finish(tensors, shape)
        flags = _by_head(_join([p.flags for p in passes]), batch, heads)
    ordered = {name: tensors[name] for name in codec.stored_layout(shape, tensors)}
    flags = {k: t if t.dtype == FLAGS[k] else t.to(FLAGS[k]) for k, t in flags.items()}
    return Payload(config, shape, ordered, flags)


def _encode_heads(codec: Codec, x: Tensor, heads: slice, inputs: HeadInputs) -> Encoded:
    """Encodes some of the N = B·H heads from a clean copy."""
    wide = not in_kernels(codec, x.device)
    rows, nonfinite = ops.head_rows(x, heads.start, heads.stop, wide=wide)
    if len(rows) < x.shape[0] * x.shape[1]:
        inputs = _of(inputs, heads)
    encoded = codec.encode(rows, inputs)
    encoded.flags["nonfinite"] = nonfinite
    return encoded


def _of(inputs: HeadInputs, heads: slice) -> HeadInputs:
    whole = (inputs.moment, inputs.count, inputs.initial_centroids, inputs.initial_ids)
    moment, count, start, ids = (None if t is None else t[heads] for t in whole)
    return replace(inputs, moment=moment, count=count, initial_centroids=start, initial_ids=ids)


def heads_per_pass(codec: Codec, shape: Shape, device: torch.device) -> int:
    """How many of the B·H heads one pass takes: what fits in the workspace, or else one unit."""
    _, heads, tokens, width = shape
    unit = heads if codec.pools_heads else 1
    budget = WORKSPACE_BYTES if device.type == "cpu" else GPU_WORKSPACE_BYTES
    if in_kernels(codec, device):
        budget = KERNEL_WORKSPACE_BYTES
    return unit * max(1, budget // max(1, 4 * unit * tokens * width))


def in_kernels(codec: Codec, device: torch.device) -> bool:
    """Whether kernels do all of the encoding."""
    return codec.has_kernels and ops.backend_of("kmeans", device) == "triton"


def _head_groups(codec: Codec, shape: Shape, device: torch.device) -> Iterator[slice]:
    total, step = shape[0] * shape[1], heads_per_pass(codec, shape, device)
    for first in range(0, total, step):
        yield slice(first, min(first + step, total))


def _join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenates the passes."""
    joined = (
        parts[0] if len(parts) == 1 else {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    )
    return {k: t.contiguous() for k, t in joined.items()}


def _by_head(tensors: dict[str, Tensor], batch: int, heads: int) -> dict[str, Tensor]:
    """Splits N of contiguous tensors into [B, H]."""
    return {k: t.view(batch, heads, *t.shape[1:]) for k, t in tensors.items()}


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
    if x.layout != torch.strided or x.is_meta:
        kind = "a meta tensor" if x.is_meta else f"in layout {x.layout}"
        raise ShapeError(f"x is {kind}: expected a dense tensor that holds numbers")
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
    if not (warm is None or isinstance(warm, _WARM)):
        raise ShapeError(f"warm is a {type(warm).__name__}: expected a Payload or its centroids")
    if not (initial is None or isinstance(initial, Tensor)):
        raise ShapeError(f"initial_centroids is a {type(initial).__name__}: expected a Tensor")
    kind = codec.config.warm_start
    if initial is None and (warm is None or not kind):
        return None
    layout = codec.layout(shape, compensated=False)
    if "centroids" not in layout:
        return None
    wanted = layout["centroids"].shape
    if initial is not None:
        if tuple(initial.shape) != wanted:
            raise ShapeError(f"initial_centroids are {tuple(initial.shape)}: expected {wanted}")
        _check_centroids("initial_centroids", initial)
        return WarmStart(initial)
    assert warm is not None
    if isinstance(warm, Payload):
        if warm.shape != shape or warm.centroids is None:
            return None
        warm = WarmStart(warm.centroids, warm.tensors.get("ids"))
    elif isinstance(warm, Tensor):
        warm = WarmStart(warm)
    if tuple(warm.centroids.shape) != wanted:
        return None
    _check_centroids("warm centroids", warm.centroids)
    if kind != "ids":
        return WarmStart(warm.centroids)
    if warm.ids is None:
        raise ShapeError(
            "warm has no ids: expected a Payload or a WarmStart with ids, because warm_start is "
            "'ids'; set warm_start=True to start from centroids"
        )
    if tuple(warm.ids.shape) != layout["ids"].shape:
        return None
    _check_ids(warm.ids, wanted[3])
    return warm


def _check_centroids(name: str, centroids: Tensor) -> None:
    if centroids.dtype not in _DTYPES:
        raise ShapeError(
            f"{name} are {centroids.dtype}: expected bfloat16, float16 or float32; FP8 ones have a "
            "scale beside them, which Payload.centroids multiplies"
        )


def _check_ids(ids: Tensor, clusters: int) -> None:
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ShapeError(f"warm ids are {ids.dtype}: expected integers, one a token and stage")
    if ids.device.type != "cpu" or not ids.numel():
        return
    low, high = int(ids.long().min()), int(ids.long().max())
    if low < 0 or high >= clusters:
        raise ShapeError(
            f"warm ids are {low} to {high}: expected 0 to {clusters - 1}, of the {clusters} "
            "centroids beside them"
        )
