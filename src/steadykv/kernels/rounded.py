"""Device functions: codes on a grid, back to numbers, in tiles of [words, tokens, 8 channels].

A word is eight channels: one thread holds whole words, so that it stores 16 bytes of BF16 at once,
finds their codes in one load, and mostly their scale in another. Words come first, because Triton
gives the lanes of a warp to the first axes first: the warp then stores whole rows. With tokens
first it stored 16 or 32 bytes of each of as many rows as it has lanes, and took twice to three
times as long.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import e4m3_value

__all__ = ["grid_steps", "group_places", "in_width", "packed_zeros", "stored_number"]

# The bits of FP32 2^23, to which an integer beside them is added.
_TWO_23 = tl.constexpr(0x4B000000)


@triton.jit
def grid_steps(
    p_codes,
    zero,
    first_token,
    o_token,
    m_token,
    o_word,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
    IS_TRITS: tl.constexpr,
):
    """code - zero, exact: FP32 [W, T, 8] of tokens first_token + o_token, ROW bytes each.

    zero: FP32 that broadcasts to the result, small integers. p_codes: bytes, or where a word starts
    at a whole one, for 2 bits int16, for 4 bits int32.
    """
    o_lane = tl.arange(0, 8)
    word = _code_word(p_codes, first_token, o_token, m_token, o_word, WIDTH, ROW, BITS, IS_TRITS)
    if IS_TRITS:
        # Three bytes are 15 digits to base 3; the word begins at the first to the fifth of them.
        digits = (word & 255) + 243 * ((word >> 8) & 255) + 59049 * (word >> 16)
        first = (8 * o_word % 5)[:, None, None]
        inverse = tl.where(first < 3, tl.where(first == 1, 1431655766, 477218589), 159072863)
        inverse = tl.where(first == 4, 53024288, inverse)  # 2^32 / 3^first, rounded up
        digits = tl.where(first == 0, digits, tl.umulhi(digits, inverse))
        four = tl.where((o_lane < 4)[None, None, :], digits % 81, digits // 81 % 81)
        # Digit k is three times the fraction of n / 3^(k+1). In 2^-16, rounded up, it is exact.
        k = o_lane % 4
        inverse = tl.where(k < 2, tl.where(k == 0, 21846, 7282), tl.where(k == 2, 2428, 810))
        place = tl.full([8], 16, tl.int32)
        number = (3 * ((four * inverse[None, None, :]) & 0xFFFF) | _TWO_23) & 0x4B030000
    else:
        # Codes stay where they are in the word, as numbers times a power of two; those above the
        # mantissa are shifted down first. The word is joined with 2^23 before the codes are cut out
        # of it, for one instruction a code instead of two.
        HALF: tl.constexpr = 8 if BITS <= 2 else 4
        TOP: tl.constexpr = (1 << BITS) - 1
        place = (o_lane % HALF) * BITS
        below = (o_lane // HALF * HALF * BITS)[None, None, :]
        number = ((word >> below) | _TWO_23) & ((TOP << place) | _TWO_23)[None, None, :]
    unit = ((127 - place) << 23).to(tl.float32, bitcast=True)[None, None, :]  # 2^-place
    offset = ((150 - place) << 23).to(tl.float32, bitcast=True)[None, None, :]  # 2^(23 - place)
    return number.to(tl.float32, bitcast=True) * unit - (offset + zero)


@triton.jit
def _code_word(
    p_codes,
    first_token,
    o_token,
    m_token,
    o_word,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
    IS_TRITS: tl.constexpr,
):
    """int32 [W, T, 1]: the bytes of the eight codes of each word, the first one lowest."""
    UNIT: tl.constexpr = p_codes.dtype.element_ty.primitive_bitwidth // 8
    p_tile = p_codes + first_token * (ROW // UNIT)
    if UNIT > 1:
        o_code = (o_token[None, :] * (ROW // UNIT) + o_word[:, None])[:, :, None]
        # One word a thread, as the channels are laid out: longer runs would have to be exchanged.
        o_code = tl.max_contiguous(o_code, [1, 1, 1])
        mask = in_width(m_token[None, :, None], (8 * o_word)[:, None, None], WIDTH)
        word = tl.load(p_tile + o_code, mask=mask, other=0).to(tl.int32)
        if UNIT == 2:
            word = word & 0xFFFF
    else:
        o_byte = 8 * o_word // 5 if IS_TRITS else BITS * o_word
        word = tl.zeros_like(m_token[None, :, None] & (o_byte < 0)[:, None, None]).to(tl.int32)
        for i in tl.static_range(3 if IS_TRITS else BITS):
            o_code = (o_token * ROW)[None, :, None] + (o_byte + i)[:, None, None]
            mask = m_token[None, :, None] & (o_byte + i < ROW)[:, None, None]
            word |= tl.load(p_tile + o_code, mask=mask, other=0).to(tl.int32) << (8 * i)
    return word


@triton.jit
def group_places(
    o_row, m_token, o_word, WIDTH: tl.constexpr, GROUP: tl.constexpr, BY_TOKENS: tl.constexpr
):
    """Where the numbers of each channel's group are in rows of them, and which exist.

    [W, T, 1], or [W, T, 8] where groups do not begin with words. BY_TOKENS: a row has a number for
    every channel, and belongs to a run of tokens.
    """
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    if not BY_TOKENS and GROUP % 8 == 0:
        o_channel = (8 * o_word)[:, None, None]
    else:
        o_channel = (8 * o_word)[:, None, None] + tl.arange(0, 8)[None, None, :]
    mask = in_width(m_token[None, :, None], o_channel, WIDTH)
    if BY_TOKENS:
        places = (o_row * WIDTH)[None, :, None] + o_channel
    else:
        places = (o_row * GROUPS)[None, :, None] + o_channel // GROUP
    return places, mask


@triton.jit
def packed_zeros(p_zeros, o_flat, mask, BITS: tl.constexpr):
    """FP32 zero points at o_flat of a head's stream of codes."""
    o_bit = o_flat * BITS
    pair = tl.load(p_zeros + (o_bit >> 3), mask=mask, other=0).to(tl.int32)
    if BITS == 3:
        is_split = mask & ((o_bit & 7) > 5)
        pair |= tl.load(p_zeros + (o_bit >> 3) + 1, mask=is_split, other=0).to(tl.int32) << 8
    return ((pair >> (o_bit & 7)) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def stored_number(p_number, offsets, mask, IS_INTEGER: tl.constexpr):
    """FP32 of FP16, BF16 or, as uint8, E4M3 numbers; with IS_INTEGER of integers."""
    number = tl.load(p_number + offsets, mask=mask, other=0)
    if p_number.dtype.element_ty == tl.uint8 and not IS_INTEGER:
        value = e4m3_value(number)
    else:
        value = number.to(tl.float32)
    return value


@triton.jit
def in_width(mask, o_channel, WIDTH: tl.constexpr):
    """mask, and channels below WIDTH where the tile is wider."""
    if WIDTH < 8 or (WIDTH & (WIDTH - 1)) != 0:
        mask = mask & (o_channel < WIDTH)
    return mask
