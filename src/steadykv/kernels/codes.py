"""Device functions: numbers to the nearest levels of a grid, and their codes into words.

Of two bits the thresholds below a number are counted by products that saturate: at twice the rate
of comparisons, and the counts are numbers to go on with. Codes stay FP32 until they are a word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import nearest
from .residual import word_places

__all__ = ["above", "clipped", "divisor", "rounded", "store_codes", "threshold"]

# Makes every difference of a number and a threshold of 2^-25 or more 1 or more: the numbers next to
# it are 2^-49 away. The same number is in the instruction below.
_MAGNIFIED = tl.constexpr(2.0**50)


@triton.jit
def above(value, limit, INTERPRET: tl.constexpr):
    """1.0 where value > limit, otherwise 0.0; |limit| >= 2^-25."""
    if INTERPRET:
        result = (value > limit).to(tl.float32)
    else:
        result = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0f58800000, $2;",
            "=f,f,f",
            [value, limit * -_MAGNIFIED],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def store_codes(
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
    """Codes - FIRST of the even and odd channels, FP32: a byte each, or packed.

    p_codes: bytes, for 2 and 4 bits int16; for a byte each either.
    """
    words = word_places(SIZE // 8, ALL, LANES)
    o_token, mask = tl.arange(0, TOKENS)[None, None, :, None], m_token[None, None, :, None]
    if ALL * SIZE != WIDTH:
        mask = mask & (8 * words < WIDTH)
    if BITS == 8 and p_codes.dtype.element_ty == tl.int16:
        # Added to 2^23, an integer is the low bits of the sum: faster than a conversion.
        unit = (even + 256.0 * odd + (8388608.0 + FIRST * 257)).to(tl.int32, bitcast=True)
        pair = 4 * words[:, :, :, :, None] + tl.arange(0, 4)[None, None, None, None, :]
        at = (o_token * (WIDTH // 2))[:, :, :, :, None] + pair
        p_row = p_codes + row * (WIDTH // 2)
        tl.store(p_row + at, unit.to(tl.int16), mask=mask[:, :, :, :, None])
    elif BITS == 8:
        code = tl.join(even, odd) + FIRST
        pair = 4 * words[:, :, :, :, None] + tl.arange(0, 4)[None, None, None, None, :]
        channel = 2 * pair[:, :, :, :, :, None] + tl.arange(0, 2)[None, None, None, None, None, :]
        at = (o_token * WIDTH)[:, :, :, :, None, None] + channel
        mask = mask[:, :, :, :, None, None] & (channel < WIDTH)
        tl.store(p_codes + row * WIDTH + at, code.to(tl.uint8), mask=mask)
    elif BITS % 2 == 1:
        ROW_BYTES: tl.constexpr = WIDTH * BITS // 8
        word = _packed(even, odd, FIRST, BITS)
        p_word = p_codes + row * ROW_BYTES + (o_token * ROW_BYTES + words * BITS)
        for i in tl.static_range(BITS):
            tl.store(p_word + i, (word >> (8 * i)).to(tl.uint8), mask=mask)
    else:
        ROW: tl.constexpr = WIDTH * BITS // 16
        at = o_token * ROW + words * (BITS // 2)
        if BITS == 2:
            unit = _packed(even, odd, FIRST, BITS).to(tl.int16)
        else:  # two units of 16 bits in a word
            shape: tl.constexpr = [LANES, ALL, TOKENS, SIZE // 8 // LANES, 2, 2]
            unit = _packed(tl.reshape(even, shape), tl.reshape(odd, shape), FIRST, BITS)
            unit = unit.to(tl.int16)
            at = at[:, :, :, :, None] + tl.arange(0, 2)[None, None, None, None, :]
            mask = mask[:, :, :, :, None]
        tl.store(p_codes + row * ROW + at, unit, mask=mask)


@triton.jit
def _packed(even, odd, FIRST: tl.constexpr, BITS: tl.constexpr):
    """int32, the lower bits of which are the codes along the last axis, pairs of even and odd."""
    PAIRS: tl.constexpr = 2 if BITS == 4 else 4
    o_pair = tl.arange(0, PAIRS)
    place = ((127 + 2 * BITS * o_pair) << 23).to(tl.float32, bitcast=True)  # 4^(BITS·pair)
    place = tl.reshape(place, [1] * (len(even.shape) - 1) + [PAIRS])
    axis: tl.constexpr = len(even.shape) - 1
    unit = tl.sum(even * place, axis) + (1 << BITS) * tl.sum(odd * place, axis)
    # FIRST added to every code.
    ADDED: tl.constexpr = FIRST * (((1 << (2 * PAIRS * BITS)) - 1) // ((1 << BITS) - 1))
    if BITS == 3:
        word = unit.to(tl.int32) + ADDED
    else:  # added to 2^23, an integer is the low bits of the sum
        word = (unit + (8388608.0 + ADDED)).to(tl.int32, bitcast=True)
    return word


@triton.jit
def divisor(scale):
    """Infinity for a scale of 0, so that the quotient is 0."""
    return tl.where(scale == 0, float("inf"), scale)


@triton.jit
def clipped(quotient):
    """The nearest integer of what is clipped to a few levels afterwards anyway."""
    return nearest(tl.minimum(tl.maximum(quotient, -1024.0), 1024.0))


@triton.jit
def rounded(value, step, inverse):
    """The nearest integer to value / step, halves to even, as the rounded quotient gives it.

    The product with the inverse may be off by one next to a half. A step has 19 bits at most, so
    that step·level is exact for the levels that survive clipping, and so is what it leaves.
    """
    shifted = tl.minimum(tl.maximum(value * inverse, -1024.0), 1024.0) + 12582912.0
    level = shifted - 12582912.0  # as in `nearest`; the last bit of the sum is that of the integer
    rest = value - step * level
    over = tl.abs(rest) - step * 0.5
    is_odd = (shifted.to(tl.int32, bitcast=True) & 1) == 1
    away = tl.where(rest > 0, level + 1.0, level - 1.0)
    return tl.where((over > 0) | ((over == 0) & is_odd), away, level)


@triton.jit
def threshold(level, step):
    """Above it, value / step rounds to `level` or more, halves to even; exact, as step has 19 bits.

    A half is rounded up to an even level: then the number below it is the threshold.
    """
    border = (level - 0.5) * step
    bits = border.to(tl.int32, bitcast=True)
    below = tl.where(border > 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
    is_even = (level.to(tl.int32) & 1) == 0
    return tl.where(is_even & (tl.abs(border) < float("inf")), below, border)
