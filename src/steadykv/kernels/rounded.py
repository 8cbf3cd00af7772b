"""Device functions: codes on a grid, back to numbers, in tiles of [tokens, words, 8 channels].

A word is eight channels: one thread holds whole words, so that it stores 16 bytes of BF16 at once,
finds their codes in one load of `bits` bytes, and their scale in one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import e4m3_value

__all__ = ["grid_steps", "group_places", "in_width", "packed_zeros", "stored_number"]

_TWO_23 = tl.constexpr(0x4B000000)  # the bits of FP32 2^23: what is in the mantissa is added to it


@triton.jit
def grid_steps(
    p_codes,
    zero,
    o_token,
    m_token,
    o_word,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
    IS_TRITS: tl.constexpr,
    IS_WORDS: tl.constexpr,
):
    """code - zero, exact: FP32 [T, W, 8] of the codes at p_codes, ROW bytes a token.

    zero: FP32 that broadcasts to the result, small integers. IS_WORDS: p_codes points to words, as
    int16 for 2 bits, bytes for 3, int32 for 4; otherwise to bytes, of which each code is looked up.
    """
    o_lane = tl.arange(0, 8)
    TOP: tl.constexpr = (1 << BITS) - 1
    if IS_WORDS:
        # Codes stay where they are in the word: with 2^23 beside them they are numbers, times a
        # power of two. Those whose place is above the mantissa are shifted down first.
        HALF: tl.constexpr = 8 if BITS == 2 else 4
        place = (o_lane % HALF) * BITS
        m_word = in_width(m_token[:, None], (8 * o_word)[None, :], WIDTH)[:, :, None]
        word = _word(p_codes, o_token, m_word, o_word, ROW, BITS)
        code = (word >> (o_lane // HALF * HALF * BITS)[None, None, :]) & (TOP << place)[
            None, None, :
        ]
    else:
        place = tl.zeros_like(o_lane)
        o_channel = 8 * o_word[:, None] + o_lane[None, :]
        m_channel = in_width(m_token[:, None, None], o_channel[None], WIDTH)
        p_row = p_codes + (o_token * ROW)[:, None, None]
        if IS_TRITS:
            byte = tl.load(p_row + (o_channel // 5)[None], mask=m_channel, other=0).to(tl.int32)
            # byte // 3^k by a product: exact for all bytes that five trits make.
            k = o_channel % 5
            inverse = tl.where(k == 0, 65536, tl.where(k == 1, 21846, 7282))
            inverse = tl.where(k == 3, 2428, tl.where(k == 4, 810, inverse))
            above = (byte * inverse[None]) >> 16
            code = above - 3 * ((above * 21846) >> 16)
        else:
            o_bit = o_channel * BITS
            o_byte = (o_bit // 8)[None]
            pair = tl.load(p_row + o_byte, mask=m_channel, other=0).to(tl.int32)
            if BITS == 3:
                m_next = m_channel & (o_byte + 1 < ROW)
                pair |= tl.load(p_row + o_byte + 1, mask=m_next, other=0).to(tl.int32) << 8
            code = (pair >> (o_bit % 8)[None]) & TOP
    number = (code | _TWO_23).to(tl.float32, bitcast=True)
    unit = ((127 - place) << 23).to(tl.float32, bitcast=True)[None, None, :]  # 2^-place
    offset = ((150 - place) << 23).to(tl.float32, bitcast=True)[None, None, :]  # 2^(23 - place)
    return number * unit - (offset + zero)


@triton.jit
def _word(p_codes, o_token, m_word, o_word, ROW: tl.constexpr, BITS: tl.constexpr):
    """int32 [T, W, 1] with the eight codes of each word."""
    if BITS == 3:
        p_word = p_codes + (o_token[:, None] * ROW + (3 * o_word)[None, :])[:, :, None]
        low = tl.load(p_word, mask=m_word, other=0).to(tl.int32)
        middle = tl.load(p_word + 1, mask=m_word, other=0).to(tl.int32)
        high = tl.load(p_word + 2, mask=m_word, other=0).to(tl.int32)
        return low | (middle << 8) | (high << 16)
    o_code = (o_token[:, None] * (ROW // BITS) + o_word[None, :])[:, :, None]
    # One word a thread, as the channels are laid out: longer runs would have to be exchanged.
    o_code = tl.max_contiguous(o_code, [1, 1, 1])
    return tl.load(p_codes + o_code, mask=m_word, other=0).to(tl.int32)


@triton.jit
def group_places(
    o_row, m_token, o_word, WIDTH: tl.constexpr, GROUP: tl.constexpr, BY_TOKENS: tl.constexpr
):
    """Where the numbers of each channel's group are in rows of them, and which exist.

    [T, W, 1], or [T, W, 8] where groups do not begin with words. BY_TOKENS: a row has a number for
    every channel, and belongs to a run of tokens.
    """
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    if not BY_TOKENS and GROUP % 8 == 0:
        o_channel = (8 * o_word)[:, None]
    else:
        o_channel = 8 * o_word[:, None] + tl.arange(0, 8)[None, :]
    mask = in_width(m_token[:, None, None], o_channel[None], WIDTH)
    if BY_TOKENS:
        return (o_row * WIDTH)[:, None, None] + o_channel[None], mask
    return (o_row * GROUPS)[:, None, None] + (o_channel // GROUP)[None], mask


@triton.jit
def packed_zeros(p_zeros, o_flat, mask, BITS: tl.constexpr):
    """FP32 zero points at o_flat of a head's stream of codes."""
    o_bit = o_flat * BITS
    pair = tl.load(p_zeros + (o_bit >> 3), mask=mask, other=0).to(tl.int32)
    if BITS == 3:
        is_split = mask & ((o_bit & 7) > 5)
        pair |= tl.load(p_zeros + (o_bit >> 3) + 1, mask=is_split, other=0).to(tl.int32) << 8
    code = (pair >> (o_bit & 7)) & ((1 << BITS) - 1)
    return (code | _TWO_23).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def stored_number(p_number, offsets, mask, IS_INTEGER: tl.constexpr):
    """FP32 of FP16, BF16 or, as uint8, E4M3 numbers; with IS_INTEGER of integers."""
    number = tl.load(p_number + offsets, mask=mask, other=0)
    if p_number.dtype.element_ty == tl.uint8 and not IS_INTEGER:
        return e4m3_value(number)
    return number.to(tl.float32)


@triton.jit
def in_width(mask, o_channel, WIDTH: tl.constexpr):
    """mask, and channels below WIDTH where the tile is wider."""
    if (WIDTH & (WIDTH - 1)) == 0 and WIDTH >= 8:
        return mask
    return mask & (o_channel < WIDTH)
