"""Kernels of `group_quantize`: tokens minus their centroids onto a grid, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import above, clipped, divisor, rounded, store_codes, threshold
from .numbers import e4m3_byte, e4m3_rounded, floor_of
from .residual import residual_pairs, word_places

__all__ = ["based_kernel", "ranges_kernel", "symmetric_kernel"]

FP16_MAX = tl.constexpr(65504.0)
FP32_MAX = tl.constexpr(3.4028234663852886e38)


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
    BACKWARDS: tl.constexpr,
):
    """Of this program's tokens, the last one again in place of those that do not exist.

    Then the head, the first of them, and the row that it has among those of all heads. BACKWARDS:
    what the kernel before this one read last, and the cache may have, comes first.
    """
    UNIT: tl.constexpr = 2 if p_x.dtype.element_ty == tl.int32 else 1
    MU_UNIT: tl.constexpr = 2 if p_mu.dtype.element_ty == tl.int32 else 1
    head, tile = tl.program_id(1), tl.program_id(0)
    if BACKWARDS:
        head, tile = tl.num_programs(1) - 1 - head, tl.num_programs(0) - 1 - tile
    head, first = head.to(tl.int64), tile * TOKENS
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
def symmetric_kernel(
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
        p_x, p_mu, p_ids, tokens, CLUSTERS, WIDTH, SIZE, ALL, LANES, TOKENS, False
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
        even = above(even, half, INTERPRET) - above(-even, half, INTERPRET)
        odd = above(odd, half, INTERPRET) - above(-odd, half, INTERPRET)
    else:
        inverse = tl.div_rn(tl.full([1, 1], 1.0, tl.float32), step)[None, :, :, None, None]
        step = step[None, :, :, None, None]
        even = tl.minimum(tl.maximum(rounded(even, step, inverse), -TOP), TOP)
        odd = tl.minimum(tl.maximum(rounded(odd, step, inverse), -TOP), TOP)
    store_codes(p_codes, row, even, odd, TOP, m_token, WIDTH, SIZE, ALL, LANES, TOKENS, CODE_BITS)


@triton.jit(do_not_specialize=["tokens"])
def ranges_kernel(
    p_x,
    p_mu,
    p_ids,
    p_ends,
    p_widest,
    tokens,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """The upper and the lower end of every group, with 0 inside, or the largest magnitude alone.

    And the bits of the widest range of the head.
    """
    even, odd, head, first, row = _residual(
        p_x, p_mu, p_ids, tokens, CLUSTERS, WIDTH, SIZE, ALL, LANES, TOKENS, False
    )
    o_token, o_group = tl.arange(0, TOKENS), tl.arange(0, ALL)
    at = o_group[:, None] + (o_token * ALL)[None, :]
    mask = (o_token < tokens - first)[None, :] & (o_group >= 0)[:, None]
    p_high = p_ends + row * ALL
    if HAS_ZEROS:
        high = tl.maximum(_over_group(tl.maximum(even, odd)), 0.0)
        low = -tl.maximum(_over_group(-tl.minimum(even, odd)), 0.0)
        tl.store(p_high + tl.num_programs(1).to(tl.int64) * tokens * ALL + at, low, mask=mask)
        reach = high - low
    else:
        high = _over_group(tl.maximum(tl.abs(even), tl.abs(odd)))
        reach = high
    tl.store(p_high + at, high, mask=mask)
    widest = tl.max(reach).to(tl.int32, bitcast=True)  # ordered as the numbers, which are >= 0
    tl.atomic_max(p_widest + head, widest.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["tokens", "zero_nbytes"])
def based_kernel(
    p_x,
    p_mu,
    p_ids,
    p_ends,
    p_widest,
    p_counts,
    p_codes,
    p_finer,
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
    FINER: tl.constexpr,
    FINER_BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """Grids whose scales are steps of a base: `affine_zero`, or `symmetric_int8` without zeros."""
    even, odd, head, first, row = _residual(
        p_x, p_mu, p_ids, tokens, CLUSTERS, WIDTH, SIZE, ALL, LANES, TOKENS, True
    )
    TOP: tl.constexpr = LEVELS - 1 if HAS_ZEROS else LEVELS // 2 - 1
    top = tl.load(p_widest + head).to(tl.int32).to(tl.float32, bitcast=True)
    # The FP16 base of a head is 1/255 of its widest step.
    top = tl.minimum(top, FP32_MAX)  # or 0 times it would be NaN: a range may leave FP32
    wanted = tl.div_rn(tl.div_rn(top, top * 0 + TOP * 1.0), top * 0 + 255.0)
    base = tl.minimum(wanted, FP16_MAX).to(tl.float16)
    if first == 0:
        tl.store(p_base + head, base)
        tl.store(p_counts + head, (wanted > FP16_MAX).to(tl.int64))
    # One group after the other: a thread has another one than where numbers are.
    o_flat = tl.arange(0, TOKENS * ALL)
    o_token, o_group = o_flat // ALL, o_flat % ALL
    m_flat = o_token < tokens - first
    m_group = m_flat & (o_group < GROUPS)
    p_high = p_ends + row * ALL
    p_low = p_high + tl.num_programs(1).to(tl.int64) * tokens * ALL
    reach = tl.load(p_high + o_flat, mask=m_flat, other=0.0)
    low = reach
    if HAS_ZEROS:
        low = tl.load(p_low + o_flat, mask=m_flat, other=0.0)
        reach = reach - low
    nothing = tl.zeros([TOKENS * ALL], tl.float32)
    unit = base.to(tl.float32) + nothing
    wanted = tl.div_rn(reach, nothing + TOP * 1.0)
    count = tl.minimum(tl.maximum(clipped(tl.div_rn(wanted, divisor(unit))), 1.0), 255.0)
    scale = unit * count
    step = divisor(scale)
    tl.store(p_scales + row * GROUPS + o_token * GROUPS + o_group, count.to(tl.uint8), mask=m_group)
    zero = nothing
    if HAS_ZEROS:
        zero = tl.minimum(tl.maximum(clipped(tl.div_rn(-low, step)), 0.0), LEVELS - 1.0)
        _store_zeros(
            p_zeros + head * zero_nbytes, zero, first, o_token, o_group, m_group, zero_nbytes,
            GROUPS, ALL, TOKENS, ZERO_BITS,
        )  # fmt: skip
    if LEVELS == 4 and not HAS_ZEROS:  # one half is even's: 0
        half = _of_groups(step * 0.5, TOKENS, ALL)
        even_level = above(even, half, INTERPRET) - above(-even, half, INTERPRET)
        odd_level = above(odd, half, INTERPRET) - above(-odd, half, INTERPRET)
    elif LEVELS == 4:
        limit = _of_groups(threshold(1.0 - zero, step), TOKENS, ALL)
        even_level = above(even, limit, INTERPRET)
        odd_level = above(odd, limit, INTERPRET)
        for level in tl.static_range(2, LEVELS):
            limit = _of_groups(threshold(level - zero, step), TOKENS, ALL)
            even_level += above(even, limit, INTERPRET)
            odd_level += above(odd, limit, INTERPRET)
    else:
        inverse = _of_groups(tl.div_rn(nothing + 1.0, step), TOKENS, ALL)
        width = _of_groups(step, TOKENS, ALL)
        offset = _of_groups(zero, TOKENS, ALL)
        LEAST: tl.constexpr = 0.0 if HAS_ZEROS else -TOP * 1.0
        even_level = rounded(even, width, inverse) + offset
        odd_level = rounded(odd, width, inverse) + offset
        even_level = tl.minimum(tl.maximum(even_level, LEAST), TOP * 1.0)
        odd_level = tl.minimum(tl.maximum(odd_level, LEAST), TOP * 1.0)
    m_token = tl.arange(0, TOKENS) < tokens - first
    FIRST: tl.constexpr = 0 if HAS_ZEROS else TOP
    store_codes(
        p_codes, row, even_level, odd_level, FIRST, m_token, WIDTH, SIZE, ALL, LANES, TOKENS,
        CODE_BITS,
    )  # fmt: skip
    if FINER > 0:
        # What is left of the numbers, times the parts of a step; the values of codes are exact.
        parts = _of_groups(tl.div_rn(nothing + (1 << FINER) * 1.0, step), TOKENS, ALL)
        scale = _of_groups(scale, TOKENS, ALL)
        if HAS_ZEROS:
            offset = _of_groups(zero, TOKENS, ALL)
            even_level -= offset
            odd_level -= offset
        even = _part((even - even_level * scale) * parts, FINER, INTERPRET)
        odd = _part((odd - odd_level * scale) * parts, FINER, INTERPRET)
        store_codes(
            p_finer, row, even, odd, 0, m_token, WIDTH, SIZE, ALL, LANES, TOKENS, FINER_BITS
        )


@triton.jit
def _part(place, FINER: tl.constexpr, INTERPRET: tl.constexpr):
    """The part of a step that is cut into 2^FINER, from a place in such parts; 0 is its middle."""
    HALF: tl.constexpr = 1 << (FINER - 1)
    place = tl.minimum(tl.maximum(place, -HALF * 1.0), HALF - 1.0)
    return floor_of(place, INTERPRET) + HALF * 1.0


@triton.jit
def _store_zeros(
    p_zeros,
    zero,
    first,
    o_token,
    o_group,
    m_group,
    nbytes,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    TOKENS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Zero points of this program's tokens in the stream of a head, a byte each or packed."""
    if BITS == 8:
        at = (first + o_token) * GROUPS + o_group
        tl.store(p_zeros + at, zero.to(tl.uint8), mask=m_group)
    else:
        PER_BYTE: tl.constexpr = 8 // BITS
        COUNT: tl.constexpr = TOKENS * ALL // PER_BYTE
        shift = (tl.arange(0, PER_BYTE) * BITS)[None, :]
        code = tl.reshape(tl.where(m_group, zero, 0.0).to(tl.int32), [COUNT, PER_BYTE])
        at = first * ALL // PER_BYTE + tl.arange(0, COUNT)
        packed = tl.sum(code << shift, 1).to(tl.uint8)
        tl.store(p_zeros + at, packed, mask=at < nbytes)


@triton.jit
def _of_groups(value, TOKENS: tl.constexpr, ALL: tl.constexpr):
    """[TOKENS·ALL] as a tile of residuals has it."""
    return tl.trans(tl.reshape(value, [TOKENS, ALL]))[None, :, :, None, None]
