"""Device functions: which tile a program has, and how it leaves for the caller's buffer."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["store_tile", "tile_of"]


@triton.jit
def tile_of(tiles, rows, HEADS_FIRST: tl.constexpr):
    """(row, tile) of this program, of `rows` rows (heads of a batch) of `tiles` each.

    HEADS_FIRST: programs that run together have the same tokens of several heads.
    """
    program = tl.program_id(0)
    if HEADS_FIRST:
        row, tile = program % rows, program // rows
    else:
        row, tile = program // tiles, program % tiles
    return row, tile


@triton.jit
def store_tile(
    value,
    p_out,
    s_batch,
    s_head,
    s_token,
    s_channel,
    row,
    heads,
    first,
    o_token,
    o_channel,
    mask,
    IS_ALIGNED: tl.constexpr,
):
    """Casts FP32 [W, T, 8] once and stores it as tokens first + o_token of a row.

    o_channel: [W, 1, 8].

    IS_ALIGNED: channels are adjacent, every other stride is a multiple of 16 numbers, and that of
    tokens less than 2^20.
    """
    batch, head = row // heads, row % heads
    start = batch * s_batch + head * s_head + first * s_token
    if IS_ALIGNED:
        start = tl.multiple_of(start, 16)
        o_row = tl.multiple_of(o_token * s_token.to(tl.int32), 16)
        o_out = o_row[None, :, None] + o_channel
    else:
        o_row = o_token.to(tl.int64) * s_token
        o_out = o_row[None, :, None] + o_channel * s_channel
    if p_out.dtype.element_ty == tl.float16:
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
    tl.store(p_out + start + o_out, value, mask=mask)
