"""Kernels: the residual of clustered tokens onto a grid, without the residual in memory.

`symmetric` (E4M3 scales) and `affine_zero` of 2 and 4 bits, with groups that are powers of two; the
other forms are computed by the reference from the residual.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.group_quantize import group_dequantize
from ..reference.group_quantize import group_quantize as _group_quantize
from ..reference.pack import pack
from .kmeans import residual_tile, subtract_centroids
from .launch import blocks, on_device, power_of_two
from .numbers import e4m3_encode, e4m3_value, nearest

__all__ = ["group_dequantize", "group_quantize", "quantize_clustered"]

TOKENS, WARPS = 32, 4  # of one program
FP16_MAX = tl.constexpr(65504.0)


def group_quantize(
    x: Tensor, *options: object, **named: object
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.group_quantize`; without clusters there is no kernel."""
    return _group_quantize(x.float(), *options, **named)  # type: ignore[arg-type]


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
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.group_quantize`."""
    heads, tokens, width = x.shape
    padded = power_of_two(width)
    size = min(group_size, padded)
    has_kernel = size & (size - 1) == 0 and width >= 16 and include_zero and not scale_search
    if not has_kernel or grid not in ("symmetric", "affine_zero"):
        residual = subtract_centroids(x, centroids, ids)
        return _group_quantize(
            residual,
            grid,
            bits,
            group_size,
            packing=packing,
            include_zero=include_zero,
            scale_search=scale_search,
        )
    groups = -(-width // size)
    # Whole bytes of codes; a row that ends within one, trits and 3 bits are packed afterwards.
    in_bytes = bits in (2, 4) and packing == "bits" and width % (8 // bits) == 0
    codes = _bytes(x, heads, tokens, width * bits // 8 if in_bytes else width)
    is_symmetric = grid == "symmetric"
    scales = _bytes(x, heads, tokens, groups)
    programs = blocks(tokens, TOKENS)
    in_words = groups & (groups - 1) == 0 and bits in (2, 4)  # zero points of a tile fill bytes
    nbytes = blocks(tokens * groups * bits, 8) if in_words else tokens * groups
    zeros = _bytes(x, heads, 0 if is_symmetric else nbytes)
    base = torch.empty(heads, dtype=torch.float16, device=x.device)
    lost = torch.empty(heads, programs, dtype=torch.int32, device=x.device)
    shared = (centroids.contiguous(), ids.contiguous(), tokens, centroids.shape[1])
    shape = (width, padded, groups, power_of_two(groups), size, 2**bits)
    saturated = None
    with on_device(x):
        if not is_symmetric:
            widest = torch.empty(heads, programs, dtype=torch.float32, device=x.device)
            saturated = torch.empty(heads, dtype=torch.int64, device=x.device)
            _widest[programs, heads](x, *shared, widest, *shape, TOKENS, num_warps=WARPS)
            _base[heads,](widest, base, saturated, programs, 1024)
        _codes[programs, heads](
            x,
            *shared,
            base,
            codes,
            scales,
            zeros,
            lost,
            zeros.shape[1],
            *shape,
            bits if in_bytes else 8,
            bits if in_words else 8,
            is_symmetric,
            TOKENS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    if not in_bytes:
        codes = pack(codes, bits, packing)
    if saturated is None:
        kind = torch.float8_e4m3fn
        return {"codes": codes, "scale": scales.view(kind)}, lost.sum(1, dtype=torch.int64)
    if not in_words:
        zeros = pack(zeros, bits)
    return {"codes": codes, "scale_codes": scales, "scale_base": base, "zeros": zeros}, saturated


def _bytes(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=x.device)


@triton.jit
def _range(residual, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Ends of every group, with 0 inside: FP32 [TOKENS, GROUPS]."""
    grouped = tl.reshape(residual, [TOKENS, GROUPS, SIZE])
    return tl.minimum(tl.min(grouped, 2), 0.0), tl.maximum(tl.max(grouped, 2), 0.0)


@triton.jit
def _divisor(scale):
    """Infinity for a scale of 0, so that the quotient is 0."""
    return tl.where(scale == 0, float("inf"), scale)


@triton.jit
def _clipped(quotient):
    """The nearest integer of what is clipped to a few levels afterwards anyway."""
    return nearest(tl.minimum(tl.maximum(quotient, -1024.0), 1024.0))


@triton.jit
def _rounded(value, step, inverse):
    """The nearest integer to value / step, halves to even, as the rounded quotient gives it.

    The product with the inverse may be off by one next to a half. A step has 19 bits at most, so
    that step·level is exact for the levels that survive clipping, and so is what it leaves.
    """
    level = _clipped(value * inverse)
    rest = value - step * level
    over = tl.abs(rest) - step * 0.5
    is_odd = (level.to(tl.int32) & 1) == 1
    away = tl.where(rest > 0, level + 1.0, level - 1.0)
    return tl.where((over > 0) | ((over == 0) & is_odd), away, level)


@triton.jit
def _threshold(level, step):
    """Above it, value / step rounds to `level` or more, halves to even; exact, as step has 19 bits.

    A half is rounded up to an even level: then the number below it is the threshold.
    """
    border = (level - 0.5) * step
    bits = border.to(tl.int32, bitcast=True)
    below = tl.where(border > 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
    is_even = (level.to(tl.int32) & 1) == 0
    return tl.where(is_even & (tl.abs(border) < float("inf")), below, border)


@triton.jit(do_not_specialize=["tokens"])
def _widest(
    x,
    centroids,
    ids,
    tokens,
    CLUSTERS: tl.constexpr,
    widest,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The widest step that a group of the tile wants."""
    residual, _, _ = residual_tile(x, centroids, ids, tokens, CLUSTERS, WIDTH, PADDED, TOKENS)
    low, high = _range(residual, TOKENS, PADDED // SIZE, SIZE)
    wanted = tl.div_rn(high - low, tl.full([1, 1], LEVELS - 1.0, tl.float32))
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(widest + place, tl.max(wanted))


@triton.jit(do_not_specialize=["programs"])
def _base(widest, base, saturated, programs, BLOCK: tl.constexpr):
    """The FP16 base of a head, 1/255 of its widest step, and whether it saturated."""
    head = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], tl.float32)
    for start in range(0, programs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.load(widest + head * programs + at, mask=at < programs, other=0))
    top = tl.max(peak, 0)
    wanted = tl.div_rn(top, top * 0 + 255.0)
    tl.store(base + head, tl.minimum(wanted, FP16_MAX).to(tl.float16))
    tl.store(saturated + head, (wanted > FP16_MAX).to(tl.int64))


@triton.jit(do_not_specialize=["tokens", "zero_bytes"])
def _codes(
    x,
    centroids,
    ids,
    tokens,
    CLUSTERS: tl.constexpr,
    base,
    codes,
    scales,
    zeros,
    lost,
    zero_bytes,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ALL: tl.constexpr = PADDED // SIZE  # groups, with those that are padding
    residual, _, _ = residual_tile(x, centroids, ids, tokens, CLUSTERS, WIDTH, PADDED, TOKENS)
    low, high = _range(residual, TOKENS, ALL, SIZE)
    token, group = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, ALL)
    inside = (token < tokens)[:, None] & (group < GROUPS)[None, :]
    grouped = tl.reshape(residual, [TOKENS, ALL, SIZE])
    if SYMMETRIC:
        TOP: tl.constexpr = LEVELS // 2 - 1
        wanted = tl.div_rn(tl.maximum(high, -low), tl.full([1, 1], TOP * 1.0, tl.float32))
        stored = e4m3_encode(tl.minimum(tl.maximum(wanted, 0.001953125), 448.0))
        step = e4m3_value(stored)
        tl.store(
            lost + head * tl.num_programs(0) + tile,
            tl.sum(((wanted > 448.0) & inside).to(tl.int32)),
        )
        if TOP == 1:  # one half is even's: 0
            half = (step * 0.5)[:, :, None]
            code = 1 + (grouped > half).to(tl.int32) - (grouped < -half).to(tl.int32)
        else:
            inverse = tl.div_rn(tl.full([1, 1], 1.0, tl.float32), step)
            level = _rounded(grouped, step[:, :, None], inverse[:, :, None])
            code = (tl.minimum(tl.maximum(level, -TOP), TOP) + TOP).to(tl.int32)
    else:
        unit = tl.load(base + head).to(tl.float32)
        wanted = tl.div_rn(high - low, tl.full([1, 1], LEVELS - 1.0, tl.float32))
        count = tl.minimum(tl.maximum(_clipped(tl.div_rn(wanted, _divisor(unit))), 1.0), 255.0)
        stored = count.to(tl.uint8)
        step = _divisor(unit * count)
        zero = tl.minimum(tl.maximum(_clipped(tl.div_rn(-low, step)), 0.0), LEVELS - 1.0)
        if LEVELS == 4:
            code = tl.zeros([TOKENS, ALL, SIZE], tl.int32)
            for level in tl.static_range(1, LEVELS):
                code += (grouped > _threshold(level - zero, step)[:, :, None]).to(tl.int32)
        else:
            inverse = tl.div_rn(tl.full([1, 1], 1.0, tl.float32), step)
            level = _rounded(grouped, step[:, :, None], inverse[:, :, None]) + zero[:, :, None]
            code = tl.minimum(tl.maximum(level, 0.0), LEVELS - 1.0).to(tl.int32)
        _store_zeros(
            zeros + head * zero_bytes, zero, token, tokens, inside, GROUPS, ALL, ZERO_BITS, TOKENS
        )
    place = (head * tokens + token)[:, None] * GROUPS + group[None, :]
    tl.store(scales + place, stored, mask=inside)
    PER_BYTE: tl.constexpr = 8 // CODE_BITS
    column = tl.arange(0, PADDED // PER_BYTE)
    packed = _packed(tl.reshape(code, [TOKENS, PADDED // PER_BYTE, PER_BYTE]), CODE_BITS)
    row: tl.constexpr = WIDTH // PER_BYTE
    at = (head * tokens + token)[:, None] * row + column[None, :]
    tl.store(
        codes + at, packed.to(tl.uint8), mask=(token < tokens)[:, None] & (column < row)[None, :]
    )


@triton.jit
def _packed(code, BITS: tl.constexpr):
    """The byte that the last axis makes, its first entry lowest."""
    shift = tl.arange(0, 8 // BITS) * BITS
    return tl.sum(code << shift[None, None, :], 2)


@triton.jit
def _store_zeros(
    zeros,
    zero,
    token,
    tokens,
    inside,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Zero points of a tile [TOKENS, ALL]: a byte each, or packed where GROUPS is a power of 2."""
    if BITS == 8:
        place = token[:, None] * GROUPS + tl.arange(0, ALL)[None, :]
        tl.store(zeros + place, zero.to(tl.uint8), mask=inside)
    else:
        PER_BYTE: tl.constexpr = 8 // BITS
        COUNT: tl.constexpr = TOKENS * ALL // PER_BYTE
        code = tl.where(inside, zero, 0.0).to(tl.int32)
        packed = _packed(tl.reshape(code, [1, COUNT, PER_BYTE]), BITS)
        at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
        size = (tokens * GROUPS + PER_BYTE - 1) // PER_BYTE
        tl.store(zeros + at[None, :], packed.to(tl.uint8), mask=(at < size)[None, :])
