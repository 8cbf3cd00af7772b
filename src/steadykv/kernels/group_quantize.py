"""Kernels: the residual of clustered tokens onto a grid, without the residual in memory.

`symmetric` (E4M3 scales) and `affine_zero` of 2 and 4 bits, with groups that are powers of two; the
other forms are computed by the reference from the residual.

Two bits count the thresholds below a number with arithmetic that saturates, as that runs at twice
the rate of comparisons; what a group needs is computed once, by one thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.group_quantize import group_dequantize
from ..reference.group_quantize import group_quantize as _group_quantize
from ..reference.pack import pack
from .kmeans import subtract_centroids
from .launch import blocks, interpreted, on_device, power_of_two
from .numbers import e4m3_byte, e4m3_rounded, nearest
from .residual import LANES, as_pairs, residual_pairs, word_places

__all__ = ["group_dequantize", "group_quantize", "quantize_clustered"]

TILE = 2048  # numbers of one warp
WARPS = 1  # of one program
FP16_MAX = tl.constexpr(65504.0)
# A power of two that makes every difference of a residual and a threshold 1 or more: thresholds are
# 2^-25 or more, and numbers next to them 2^-49 away.
MAGNIFIED = tl.constexpr(2.0**50)


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
    """See `steadykv.ops.group_quantize`.

    Grid `affine_zero` allocates FP32 [N, S, 2·G] besides, G rounded up to a power of two.
    """
    heads, tokens, width = x.shape
    padded = power_of_two(width)
    size = min(group_size, padded)
    has_kernel = size & (size - 1) == 0 and size >= 8 and include_zero and not scale_search
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
    groups = blocks(width, size)
    # Whole words of codes; trits, 3 bits, and rows that end within a word are packed afterwards.
    in_words = bits in (2, 4) and packing == "bits" and width % 8 == 0
    codes = torch.empty(
        heads, tokens, width * bits // 8 if in_words else width, dtype=torch.uint8, device=x.device
    )
    scales = torch.empty(heads, tokens, groups, dtype=torch.uint8, device=x.device)
    counts = torch.zeros(2, heads, dtype=torch.int64, device=x.device)
    block = WARPS * max(4, TILE // padded)
    place = (blocks(tokens, block), heads)
    inputs = (as_pairs(x), as_pairs(centroids.contiguous()), ids.contiguous())
    shape = (centroids.shape[1], width, size, groups, padded // size, min(LANES, size // 8), block)
    coding = (2**bits, bits if in_words else 8, interpreted())
    words = codes.view(torch.int16) if in_words else codes
    if grid == "symmetric":
        with on_device(x):
            _symmetric[place](
                *inputs, words, scales, counts, tokens, *shape, *coding, num_warps=WARPS
            )
        if not in_words:
            codes = pack(codes, bits, packing)
        return {"codes": codes, "scale": scales.view(torch.float8_e4m3fn)}, counts[0]
    # Zero points of a tile fill bytes.
    has_zero_bytes = groups & (groups - 1) == 0 and bits in (2, 4)
    nbytes = blocks(tokens * groups * bits, 8) if has_zero_bytes else tokens * groups
    zeros = torch.empty(heads, nbytes, dtype=torch.uint8, device=x.device)
    base = torch.empty(heads, dtype=torch.float16, device=x.device)
    ends = torch.empty(2, heads, tokens, padded // size, dtype=torch.float32, device=x.device)
    with on_device(x):
        _ranges[place](*inputs, ends, counts, tokens, *shape, num_warps=WARPS)
        _affine[place](
            *inputs, ends, counts, words, scales, base, zeros, tokens, nbytes, *shape, *coding,
            bits if has_zero_bytes else 8, num_warps=WARPS,
        )  # fmt: skip
    if not in_words:
        codes = pack(codes, bits, packing)
    if not has_zero_bytes:
        zeros = pack(zeros, bits)
    tensors = {"codes": codes, "scale_codes": scales, "scale_base": base, "zeros": zeros}
    return tensors, counts[0]


@triton.jit
def _residual(
    p_x,
    p_mu,
    p_ids,
    tokens,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    ALL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Of this program's tokens, the last one again in place of those that do not exist.

    Then the head, the first of them, and the row that it has among those of all heads.
    """
    UNIT: tl.constexpr = 2 if p_x.dtype.element_ty == tl.int32 else 1
    MU_UNIT: tl.constexpr = 2 if p_mu.dtype.element_ty == tl.int32 else 1
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TOKENS
    row = head * tokens + first
    o_token = tl.minimum(tl.arange(0, TOKENS), tokens - 1 - first)
    even, odd = residual_pairs(
        p_x + row * (WIDTH // UNIT),
        p_mu + head * (CLUSTERS * WIDTH // MU_UNIT),
        p_ids + row,
        o_token,
        word_places(SIZE // 8, ALL, LANES),
        WIDTH,
        ALL * SIZE != WIDTH,
    )
    return even, odd, head, first, row


@triton.jit
def _over_group(value):
    """The largest of each group, [GROUPS, TOKENS]."""
    return tl.max(tl.max(tl.max(value, 4), 3), 0)


@triton.jit(do_not_specialize=["tokens"])
def _symmetric(
    p_x,
    p_mu,
    p_ids,
    p_codes,
    p_scales,
    p_counts,
    tokens,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    LEVELS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    even, odd, head, first, row = _residual(
        p_x, p_mu, p_ids, tokens, CLUSTERS, WIDTH, SIZE, ALL, LANES, TOKENS
    )
    TOP: tl.constexpr = LEVELS // 2 - 1
    peak = _over_group(tl.maximum(tl.abs(even), tl.abs(odd)))
    wanted = peak if TOP == 1 else tl.div_rn(peak, tl.full([1, 1], TOP * 1.0, tl.float32))
    step = e4m3_rounded(tl.minimum(tl.maximum(wanted, 0.001953125), 448.0))
    o_token, o_group = tl.arange(0, TOKENS), tl.arange(0, ALL)
    m_token = o_token < tokens - first
    mask = (o_group < GROUPS)[:, None] & m_token[None, :]
    at = o_group[:, None] + (o_token * GROUPS)[None, :]
    tl.store(p_scales + row * GROUPS + at, e4m3_byte(step), mask=mask)
    lost = tl.sum(((wanted > 448.0) & mask).to(tl.int32))
    if lost > 0:
        tl.atomic_add(p_counts + head, lost.to(tl.int64), sem="relaxed")
    if TOP == 1:  # one half is even's: 0
        half = (step * 0.5)[None, :, :, None, None]
        even = _above(even, half, INTERPRET) - _below(even, half, INTERPRET)
        odd = _above(odd, half, INTERPRET) - _below(odd, half, INTERPRET)
    else:
        inverse = tl.div_rn(tl.full([1, 1], 1.0, tl.float32), step)[None, :, :, None, None]
        step = step[None, :, :, None, None]
        even = tl.minimum(tl.maximum(_rounded(even, step, inverse), -TOP), TOP)
        odd = tl.minimum(tl.maximum(_rounded(odd, step, inverse), -TOP), TOP)
    _store_codes(
        p_codes, row, even, odd, TOP, m_token, WIDTH, SIZE, ALL, LANES, TOKENS, CODE_BITS
    )


@triton.jit(do_not_specialize=["tokens"])
def _ranges(
    p_x,
    p_mu,
    p_ids,
    p_ends,
    p_counts,
    tokens,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The ends of every group, with 0 inside, and the bits of the widest range of the head."""
    even, odd, head, first, row = _residual(
        p_x, p_mu, p_ids, tokens, CLUSTERS, WIDTH, SIZE, ALL, LANES, TOKENS
    )
    high = tl.maximum(_over_group(tl.maximum(even, odd)), 0.0)
    low = -tl.maximum(_over_group(-tl.minimum(even, odd)), 0.0)
    o_token, o_group = tl.arange(0, TOKENS), tl.arange(0, ALL)
    at = o_group[:, None] + (o_token * ALL)[None, :]
    mask = (o_token < tokens - first)[None, :] & (o_group >= 0)[:, None]
    p_low = p_ends + row * ALL
    tl.store(p_low + at, low, mask=mask)
    tl.store(p_low + tl.num_programs(1).to(tl.int64) * tokens * ALL + at, high, mask=mask)
    widest = tl.max(high - low).to(tl.int32, bitcast=True)  # ordered as the numbers, which are >= 0
    tl.atomic_max(p_counts + tl.num_programs(1) + head, widest.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["tokens", "zero_nbytes"])
def _affine(
    p_x,
    p_mu,
    p_ids,
    p_ends,
    p_counts,
    p_codes,
    p_scales,
    p_base,
    p_zeros,
    tokens,
    zero_nbytes,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    LEVELS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    INTERPRET: tl.constexpr,
    ZERO_BITS: tl.constexpr,
):
    even, odd, head, first, row = _residual(
        p_x, p_mu, p_ids, tokens, CLUSTERS, WIDTH, SIZE, ALL, LANES, TOKENS
    )
    top = tl.load(p_counts + tl.num_programs(1) + head).to(tl.int32).to(tl.float32, bitcast=True)
    # The FP16 base of a head is 1/255 of its widest step.
    wanted = tl.div_rn(tl.div_rn(top, top * 0 + (LEVELS - 1.0)), top * 0 + 255.0)
    base = tl.minimum(wanted, FP16_MAX).to(tl.float16)
    if first == 0:
        tl.store(p_base + head, base)
        tl.store(p_counts + head, (wanted > FP16_MAX).to(tl.int64))
    # One group after the other: a thread has another one than where numbers are.
    o_flat = tl.arange(0, TOKENS * ALL)
    o_token, o_group = o_flat // ALL, o_flat % ALL
    m_flat = o_token < tokens - first
    p_low = p_ends + row * ALL
    p_high = p_low + tl.num_programs(1).to(tl.int64) * tokens * ALL
    low = tl.load(p_low + o_flat, mask=m_flat, other=0.0)
    high = tl.load(p_high + o_flat, mask=m_flat, other=0.0)
    unit = base.to(tl.float32) + low * 0.0
    wanted = tl.div_rn(high - low, low * 0.0 + (LEVELS - 1.0))
    count = tl.minimum(tl.maximum(_clipped(tl.div_rn(wanted, _divisor(unit))), 1.0), 255.0)
    step = _divisor(unit * count)
    zero = tl.minimum(tl.maximum(_clipped(tl.div_rn(-low, step)), 0.0), LEVELS - 1.0)
    m_group = m_flat & (o_group < GROUPS)
    tl.store(p_scales + row * GROUPS + o_token * GROUPS + o_group, count.to(tl.uint8), mask=m_group)
    p_zeros += head * zero_nbytes
    if ZERO_BITS == 8:
        at = (first + o_token) * GROUPS + o_group
        tl.store(p_zeros + at, zero.to(tl.uint8), mask=m_group)
    else:
        PER_BYTE: tl.constexpr = 8 // ZERO_BITS
        COUNT: tl.constexpr = TOKENS * ALL // PER_BYTE
        shift = (tl.arange(0, PER_BYTE) * ZERO_BITS)[None, :]
        code = tl.reshape(tl.where(m_group, zero, 0.0).to(tl.int32), [COUNT, PER_BYTE])
        at = first * ALL // PER_BYTE + tl.arange(0, COUNT)
        packed = tl.sum(code << shift, 1).to(tl.uint8)
        tl.store(p_zeros + at, packed, mask=at < zero_nbytes)
    if LEVELS == 4:
        first_limit = _limit_of_group(_threshold(1.0 - zero, step), TOKENS, ALL)
        even_code, odd_code = _above(even, first_limit, INTERPRET), _above(odd, first_limit, INTERPRET)
        for level in tl.static_range(2, LEVELS):
            limit = _limit_of_group(_threshold(level - zero, step), TOKENS, ALL)
            even_code += _above(even, limit, INTERPRET)
            odd_code += _above(odd, limit, INTERPRET)
    else:
        inverse = _limit_of_group(tl.div_rn(low * 0.0 + 1.0, step), TOKENS, ALL)
        step = _limit_of_group(step, TOKENS, ALL)
        zero = _limit_of_group(zero, TOKENS, ALL)
        even_code = _rounded(even, step, inverse) + zero
        odd_code = _rounded(odd, step, inverse) + zero
        even_code = tl.minimum(tl.maximum(even_code, 0.0), LEVELS - 1.0)
        odd_code = tl.minimum(tl.maximum(odd_code, 0.0), LEVELS - 1.0)
    m_token = tl.arange(0, TOKENS) < tokens - first
    _store_codes(
        p_codes, row, even_code, odd_code, 0, m_token, WIDTH, SIZE, ALL, LANES, TOKENS, CODE_BITS
    )


@triton.jit
def _limit_of_group(value, TOKENS: tl.constexpr, ALL: tl.constexpr):
    """[TOKENS·ALL] as a tile of residuals has it."""
    return tl.trans(tl.reshape(value, [TOKENS, ALL]))[None, :, :, None, None]


@triton.jit
def _above(value, limit, INTERPRET: tl.constexpr):
    """1.0 where value > limit, otherwise 0.0; |limit| >= 2^-25."""
    if INTERPRET:
        result = (value > limit).to(tl.float32)
    else:
        result = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0f58800000, $2;",
            "=f,f,f",
            [value, limit * -MAGNIFIED],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def _below(value, limit, INTERPRET: tl.constexpr):
    """1.0 where value < -limit, otherwise 0.0; limit >= 2^-25."""
    if INTERPRET:
        result = (value < -limit).to(tl.float32)
    else:
        result = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0fD8800000, $2;",
            "=f,f,f",
            [value, limit * -MAGNIFIED],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def _store_codes(
    p_codes,
    row,
    even,
    odd,
    FIRST: tl.constexpr,
    m_token,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    ALL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Codes - FIRST of the even and odd channels, FP32: a byte each, or packed into int16."""
    words = word_places(SIZE // 8, ALL, LANES)
    o_token, mask = tl.arange(0, TOKENS)[None, None, :, None], m_token[None, None, :, None]
    if ALL * SIZE != WIDTH:
        mask = mask & (8 * words < WIDTH)
    if BITS == 8:
        code = tl.join(even, odd) + FIRST
        pair = 4 * words[:, :, :, :, None] + tl.arange(0, 4)[None, None, None, None, :]
        channel = 2 * pair[:, :, :, :, :, None] + tl.arange(0, 2)[None, None, None, None, None, :]
        at = (o_token * WIDTH)[:, :, :, :, None, None] + channel
        mask = mask[:, :, :, :, None, None] & (channel < WIDTH)
        tl.store(p_codes + row * WIDTH + at, code.to(tl.uint8), mask=mask)
    else:
        ROW: tl.constexpr = WIDTH * BITS // 16
        at = o_token * ROW + words * (BITS // 2)
        if BITS == 2:
            unit = _packed(even, odd, FIRST, BITS)
        else:  # two units of 16 bits in a word
            shape: tl.constexpr = [LANES, ALL, TOKENS, SIZE // 8 // LANES, 2, 2]
            unit = _packed(tl.reshape(even, shape), tl.reshape(odd, shape), FIRST, BITS)
            at = at[:, :, :, :, None] + tl.arange(0, 2)[None, None, None, None, :]
            mask = mask[:, :, :, :, None]
        tl.store(p_codes + row * ROW + at, unit, mask=mask)


@triton.jit
def _packed(even, odd, FIRST: tl.constexpr, BITS: tl.constexpr):
    """int16 of the codes along the last axis, pairs of an even and an odd one."""
    o_pair = tl.arange(0, 8 // BITS)
    place = ((127 + 2 * BITS * o_pair) << 23).to(tl.float32, bitcast=True)  # 4^(BITS·pair)
    place = tl.reshape(place, [1] * (len(even.shape) - 1) + [8 // BITS])
    axis: tl.constexpr = len(even.shape) - 1
    unit = tl.sum(even * place, axis) + (1 << BITS) * tl.sum(odd * place, axis)
    # Added to 2^23, an integer is the low bits of the sum.
    unit += 8388608.0 + FIRST * (65535 // ((1 << BITS) - 1))
    return unit.to(tl.int32, bitcast=True).to(tl.int16)


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
