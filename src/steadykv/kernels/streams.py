"""Device functions: codes and zero points of a tile of tokens as bit streams."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["store_codes", "store_zeros"]


@triton.jit
def store_codes(
    p_codes,
    p_steps,
    p_back,
    m_s,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The codes of a tile as bit streams of a token, its channels in their own order again."""
    ROW: tl.constexpr = (WIDTH * BITS + 7) // 8
    TERMS: tl.constexpr = 8 // BITS if 8 % BITS == 0 else 8 // BITS + 2
    o_s = tl.arange(0, BLOCK_S)
    # Eight bytes: tiles of the shape of the residuals, but of bytes, would lay those out too, with
    # sixteen tokens a lane and channels across lanes.
    for skip in range(0, ROW, 8):
        o_b = skip + tl.arange(0, 8)
        b_bytes = tl.zeros([8, BLOCK_S], tl.int32)
        for term in tl.static_range(TERMS):
            o_c = 8 * o_b // BITS + term
            m_c = o_c < WIDTH
            o_i = tl.load(p_back + o_c, mask=m_c, other=0).to(tl.int32)
            b_codes = tl.load(
                p_steps + o_i[:, None] * BLOCK_S + o_s[None, :], mask=m_c[:, None], other=0
            )
            b_bytes |= _placed(b_codes.to(tl.int32), (o_c * BITS - 8 * o_b)[:, None])
        tl.store(
            p_codes + o_s[None, :] * ROW + o_b[:, None],
            b_bytes.to(tl.uint8),
            mask=m_s[None, :] & (o_b < ROW)[:, None],
        )


@triton.jit
def store_zeros(
    p_zeros,
    p_grid,
    count,
    nbytes,
    MAGIC: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The zero points of the `count` tokens of a tile as one bit stream of at most `nbytes`."""
    TERMS: tl.constexpr = 8 // BITS if 8 % BITS == 0 else 8 // BITS + 2
    for skip in range(0, BLOCK_S * GROUPS * BITS // 8, 32):
        o_b = skip + tl.arange(0, 32)
        b_bytes = tl.zeros([32], tl.int32)
        for term in tl.static_range(TERMS):
            o_z = 8 * o_b // BITS + term
            o_s, o_g = o_z // GROUPS, o_z % GROUPS
            b_low = tl.load(p_grid + (3 * o_g + 2) * BLOCK_S + o_s, mask=o_s < count, other=MAGIC)
            b_bytes |= _placed((-b_low + MAGIC).to(tl.int32), o_z * BITS - 8 * o_b)
        mask = (o_b < BLOCK_S * GROUPS * BITS // 8) & (o_b < nbytes)
        tl.store(p_zeros + o_b, b_bytes.to(tl.uint8), mask=mask)


@triton.jit
def _placed(b_code, o_bit):
    """A code at the bit `o_bit` of a byte; what reaches out of it is lost."""
    up, down = tl.maximum(o_bit, 0), tl.maximum(-o_bit, 0)
    return ((b_code << up) >> down) & 255
