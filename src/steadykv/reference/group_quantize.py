"""Definition: the residual grids. Codes use the stored scale; halves round to even."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import FP16_MAX, divided, row_blocks, tree_sum
from .kmeans import subtract_centroids
from .pack import pack, unpack, word_of

__all__ = [
    "affine_zero_grid",
    "affine_zero_tensors",
    "group_dequantize",
    "group_quantize",
    "quantize_clustered",
    "refine_clustered",
]

E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9  # the smallest E4M3 number: a lower floor would round to a scale of zero

SCALE_FACTORS = (0.9, 0.8, 0.7, 0.6)  # what `scale_search` tries beside the range itself


def group_quantize(
    x: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    axis: str = "channels",
    packing: str = "bits",
    clip_ratio: float = 1.0,
    include_zero: bool = True,
    scale_search: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.group_quantize`."""
    if grid in ("symmetric", "symmetric_int8"):
        return _symmetric(x, grid, bits, group_size, packing)
    if grid in ("affine_min", "affine_min_fp8"):
        return _affine_min(x, grid, bits, group_size, -2 if axis == "tokens" else -1, clip_ratio)
    return _affine_zero(x, bits, group_size, include_zero, scale_search)


def quantize_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    packing: str = "bits",
    include_zero: bool = True,
    scale_search: bool = False,
    refinement: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.group_quantize`."""
    residual = subtract_centroids(x, centroids, ids)
    tensors, saturated = group_quantize(
        residual,
        grid,
        bits,
        group_size,
        packing=packing,
        include_zero=include_zero,
        scale_search=scale_search,
    )
    del residual  # as large as x; refining needs blocks of it only
    if refinement:
        given = (x, centroids, ids, tensors, grid, bits, group_size, refinement, packing)
        tensors["refinement"] = refine_clustered(*given)
    return tensors, saturated


def group_dequantize(
    tensors: Mapping[str, Tensor],
    grid: str,
    bits: int,
    group_size: int,
    head_dim: int,
    start: int,
    end: int,
    axis: str = "channels",
    packing: str = "bits",
    refinement: int = 0,
) -> Tensor:
    """See `steadykv.ops.group_quantize`."""
    value = unpack(tensors["codes"][:, start:end], bits, head_dim, torch.float32, packing)
    if refinement:
        value += _fractions(tensors["refinement"][:, start:end], refinement, head_dim)
    if axis == "tokens":
        run = torch.arange(start, end, device=value.device) // group_size
        value *= tensors["scale"].index_select(1, run)
        return value.add_(tensors["minimum"].index_select(1, run))
    scale = _scales_of(tensors, start, end)
    minimum = zero = None
    if grid in ("affine_min", "affine_min_fp8"):
        minimum = tensors["minimum"][:, start:end].float()
    elif grid == "affine_zero":
        zero = _zeros_of(tensors["zeros"], bits, scale.shape[-1], start, end)
    else:
        value -= 2 ** (bits - 1) - 1
    for part, at in _groups(value, group_size, -1):
        if zero is not None:
            part -= zero[..., at, None]
        part *= scale[..., at, None]
        if minimum is not None:
            part += minimum[..., at, None]
    return value


def refine_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    tensors: Mapping[str, Tensor],
    grid: str,
    bits: int,
    group_size: int,
    refinement: int,
    packing: str = "bits",
) -> Tensor:
    """See `steadykv.ops.group_quantize`."""
    width, levels = x.shape[2], 2**refinement
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    for rows in _row_blocks(x):
        left = subtract_centroids(x[:, rows], centroids, ids[:, rows])
        left -= group_dequantize(
            tensors, grid, bits, group_size, width, rows.start, rows.stop, packing=packing
        )
        # A product a number instead of a quotient: next to a border it may take the other part.
        parts = levels / _divisor(_scales_of(tensors, rows.start, rows.stop))
        for (part, at), (code, _) in zip(
            _groups(left, group_size, -1), _groups(codes[:, rows], group_size, -1), strict=True
        ):
            steps = (part * parts[:, :, at, None]).floor_()
            code.copy_(steps.add_(levels // 2).clamp_(0, levels - 1))
    return pack(codes, refinement)


def _fractions(packed: Tensor, refinement: int, width: int) -> Tensor:
    """Shares of a step that refined codes stand for: the middles of 2^refinement equal parts."""
    fraction = unpack(packed, refinement, width, torch.float32)
    return fraction.add_(0.5).mul_(2.0**-refinement).sub_(0.5)


def _scales_of(tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
    """Stored scales of the tokens start..end, FP32 [N, end - start, G]."""
    if "scale_codes" in tensors:
        return _affine_scale(tensors["scale_base"], tensors["scale_codes"][:, start:end])
    return tensors["scale"][:, start:end].float()


def _symmetric(
    x: Tensor, grid: str, bits: int, group_size: int, packing: str
) -> tuple[dict[str, Tensor], Tensor]:
    top = 2 ** (bits - 1) - 1
    # Without |x|, which would be a copy of all tokens; abs_ only takes the sign of zeros.
    peak = _reduce(x, group_size, -1, lambda part: part.amax(-1).maximum(-part.amin(-1))).abs_()
    if grid == "symmetric_int8":
        base, saturated = _int8_base(divided(peak, top))
        metadata, scale = _int8_scales(divided(peak, top), base)
    else:
        metadata, scale, saturated = _e4m3_scales(divided(peak, top))
    divisor = _divisor(scale)
    codes = torch.empty_like(x, dtype=torch.uint8)
    for rows in _row_blocks(x):
        for (part, at), (code, _) in zip(
            _groups(x[:, rows], group_size, -1),
            _groups(codes[:, rows], group_size, -1),
            strict=True,
        ):
            steps = (part / divisor[:, rows, at, None]).round_().clamp_(-top, top)
            code.copy_(steps.add_(top))
    return {"codes": pack(codes, bits, packing), **metadata}, saturated


def _affine_min(
    x: Tensor, grid: str, bits: int, group_size: int, dim: int, clip_ratio: float
) -> tuple[dict[str, Tensor], Tensor]:
    top = 2**bits - 1
    low = _reduce(x, group_size, dim, lambda part: part.amin(dim)) * clip_ratio
    high = _reduce(x, group_size, dim, lambda part: part.amax(dim)) * clip_ratio
    if grid == "affine_min_fp8":
        metadata, scale, lost_scales = _e4m3_scales(divided(high - low, top))
        lost_minima = (low.abs() > E4M3_MAX).sum((-2, -1))
        minimum = low.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    else:
        minimum, lost_minima = _to_float16(low)
        stored, lost_scales = _to_float16(divided(high - low, top))
        metadata, scale = {"scale": stored}, stored.float()
    offset, divisor = minimum.float(), _divisor(scale)
    codes = torch.empty_like(x, dtype=torch.uint8)
    for (part, at), (code, _) in zip(
        _groups(x, group_size, dim), _groups(codes, group_size, dim), strict=True
    ):
        m, s = (
            t.narrow(dim, at.start, at.stop - at.start).unsqueeze(dim) for t in (offset, divisor)
        )
        code.copy_((part - m).div_(s).round_().clamp_(0, top))
    tensors = {"codes": pack(codes, bits), **metadata, "minimum": minimum}
    return tensors, lost_minima + lost_scales


class AffineZero(NamedTuple):
    """Stored scale and zero point of every group, FP32 [N, S, G], and what is stored of them."""

    scale: Tensor
    zero: Tensor
    metadata: dict[str, Tensor]
    saturated: Tensor


def affine_zero_grid(
    x: Tensor, bits: int, group_size: int, include_zero: bool = True, scale_search: bool = False
) -> AffineZero:
    """The `affine_zero` grid of each group of [N, S, D], before anything is rounded to it."""
    top = 2**bits - 1
    low = _reduce(x, group_size, -1, lambda part: part.amin(-1))
    high = _reduce(x, group_size, -1, lambda part: part.amax(-1))
    if include_zero:
        low.clamp_(max=0)
        high.clamp_(min=0)
    wanted = divided(high - low, top)
    base, saturated = _int8_base(wanted)

    def grid_of(wanted: Tensor) -> AffineZero:
        metadata, scale = _int8_scales(wanted, base)
        zero = (-low / _divisor(scale)).round_().clamp_(0, top)
        return AffineZero(scale, zero, metadata, saturated)

    best = grid_of(wanted)
    least = _group_errors(x, best, top, group_size) if scale_search else wanted
    for factor in SCALE_FACTORS if scale_search else ():
        grid = grid_of(wanted * factor)
        error = _group_errors(x, grid, top, group_size)
        is_less = error < least  # ties keep the wider grid
        least = torch.where(is_less, error, least)
        for old, new in zip(
            (best.scale, best.zero, best.metadata["scale_codes"]),
            (grid.scale, grid.zero, grid.metadata["scale_codes"]),
            strict=True,
        ):
            old.copy_(torch.where(is_less, new, old))
    return best


def _group_errors(x: Tensor, grid: AffineZero, top: int, group_size: int) -> Tensor:
    """The squared error of every group on a grid, FP32 [N, S, G]."""
    errors = torch.empty_like(grid.scale)
    divisor = _divisor(grid.scale)
    for rows in _row_blocks(x):
        for part, at in _groups(x[:, rows], group_size, -1):
            s, d, z = (t[:, rows, at, None] for t in (grid.scale, divisor, grid.zero))
            value = (part / d).round_().add_(z).clamp_(0, top).sub_(z).mul_(s)
            errors[:, rows, at] = tree_sum(value.sub_(part).square_())
    return errors


def affine_zero_tensors(codes: Tensor, grid: AffineZero, bits: int) -> dict[str, Tensor]:
    """The payload of uint8 codes [N, S, D] on their grid."""
    zeros = pack(grid.zero.to(torch.uint8).flatten(1), bits)
    return {"codes": pack(codes, bits), **grid.metadata, "zeros": zeros}


def _affine_zero(
    x: Tensor, bits: int, group_size: int, include_zero: bool, scale_search: bool
) -> tuple[dict[str, Tensor], Tensor]:
    top = 2**bits - 1
    grid = affine_zero_grid(x, bits, group_size, include_zero, scale_search)
    divisor = _divisor(grid.scale)
    codes = torch.empty_like(x, dtype=torch.uint8)
    for rows in _row_blocks(x):
        for (part, at), (code, _) in zip(
            _groups(x[:, rows], group_size, -1),
            _groups(codes[:, rows], group_size, -1),
            strict=True,
        ):
            steps = (part / divisor[:, rows, at, None]).round_()
            code.copy_(steps.add_(grid.zero[:, rows, at, None]).clamp_(0, top))
    return affine_zero_tensors(codes, grid, bits), grid.saturated


def _e4m3_scales(wanted: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What is stored of the scales [N, S, G], their FP32 values, and how many saturated."""
    scale = wanted.clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    return {"scale": scale}, scale.float(), (wanted > E4M3_MAX).sum((-2, -1))


def _int8_base(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The FP16 base [N, 1, 1] of the scales [N, S, G], 1/255 of the largest; and what saturated."""
    return _to_float16(divided(wanted.amax((-2, -1), keepdim=True), 255))


def _int8_scales(wanted: Tensor, base: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What is stored of the scales as steps of the base, and their FP32 values."""
    steps = (wanted / _divisor(base.float())).round_().clamp_(1, 255)
    metadata = {"scale_codes": steps.to(torch.uint8), "scale_base": base[:, 0, 0]}
    return metadata, _affine_scale(metadata["scale_base"], metadata["scale_codes"])


def _affine_scale(base: Tensor, scale_codes: Tensor) -> Tensor:
    """s = base·a, exact in FP32 (11 and 8 significant bits)."""
    return base.float()[:, None, None] * scale_codes


def _zeros_of(packed: Tensor, bits: int, groups: int, start: int, end: int) -> Tensor:
    """Zero points of the tokens start..end, FP32 [N, end-start, G], packed across tokens."""
    _, per_word, nbytes = word_of(bits)
    first = start * groups // per_word
    last = -(-end * groups // per_word)
    offset = start * groups - first * per_word
    count = (end - start) * groups
    codes = unpack(
        packed[:, first * nbytes : last * nbytes], bits, offset + count, dtype=torch.float32
    )
    return codes[:, offset:].unflatten(1, (end - start, groups))


def _row_blocks(x: Tensor) -> Iterator[slice]:
    """Runs of tokens of [N, S, D], all heads together, that fit a block."""
    return row_blocks(x.shape[1], 4 * x.shape[0] * x.shape[2], x.device)


def _groups(x: Tensor, size: int, dim: int) -> Iterator[tuple[Tensor, slice]]:
    """Views of x with `dim` split into (group, member): the full groups, then the short one."""
    length = x.shape[dim]
    full = length // size
    if full:
        yield x.narrow(dim, 0, full * size).unflatten(dim, (full, size)), slice(0, full)
    if length % size:
        yield x.narrow(dim, full * size, length % size).unsqueeze(dim - 1), slice(full, full + 1)


def _reduce(x: Tensor, size: int, dim: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    parts = [function(part) for part, _ in _groups(x, size, dim)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _divisor(scale: Tensor) -> Tensor:
    """Infinity for a scale of zero: what is divided by it gets code 0, and nothing becomes NaN."""
    return torch.where(scale == 0, torch.inf, scale)


def _to_float16(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP16 with explicit saturation, and the number of saturated values, int64 [N]."""
    lost = (x.abs() > FP16_MAX).flatten(1).sum(1)
    return x.clamp(-FP16_MAX, FP16_MAX).to(torch.float16), lost
