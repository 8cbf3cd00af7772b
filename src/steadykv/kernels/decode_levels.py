"""The kernels of `decode_nonuniform`: numbers on levels, then the outliers over them."""

from __future__ import annotations

import triton
import triton.language as tl

from .rounded import grid_steps, in_width
from .tiles import store_tile, tile_of

__all__ = ["levels_kernel", "outliers_kernel"]


@triton.jit(
    do_not_specialize=[
        "s_batch", "s_head", "s_token", "s_channel", "rows", "heads", "start", "count", "tokens",
        "tiles",
    ]
)  # fmt: skip
def levels_kernel(
    p_out,
    p_codes,
    p_center,
    p_half,
    p_levels,
    s_batch: tl.int64,
    s_head: tl.int64,
    s_token: tl.int64,
    s_channel: tl.int64,
    rows,
    heads,
    start,
    count,
    tokens,
    tiles,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
    BY_TOKENS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """center + half·level[code], of tokens start..start + count of `rows` heads.

    BY_TOKENS: center and half of a channel over all tokens; otherwise of a token in all heads.
    """
    row, tile = tile_of(tiles, rows, HEADS_FIRST)
    head = row.to(tl.int64)
    batch = head // heads
    first = tile * BLOCK_T
    at = head * tokens + start + first
    o_token = tl.arange(0, BLOCK_T)
    m_token = o_token < count - first
    o_word = tl.arange(0, WORDS)
    o_channel = (8 * o_word)[:, None, None] + tl.arange(0, 8)[None, None, :]
    m_tile = in_width(m_token[None, :, None], o_channel, WIDTH)
    code = grid_steps(p_codes, 0.0, at, o_token, m_token, o_word, WIDTH, ROW, BITS, False)
    value = tl.load(p_levels + (batch << BITS) + code.to(tl.int32)).to(tl.float32)
    if BY_TOKENS:
        o_vector = head * WIDTH + o_channel
        m_vector = in_width(o_channel >= 0, o_channel, WIDTH)
    else:
        o_vector = (batch * tokens + start + first + o_token)[None, :, None]
        m_vector = m_token[None, :, None]
    value *= tl.load(p_half + o_vector, mask=m_vector, other=0).to(tl.float32)
    value += tl.load(p_center + o_vector, mask=m_vector, other=0).to(tl.float32)
    store_tile(
        value, p_out, s_batch, s_head, s_token, s_channel, head, heads, first, o_token, o_channel,
        m_tile, IS_ALIGNED,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "s_batch", "s_head", "s_token", "s_channel", "start", "count", "vectors",
        "first_vector", "used", "each", "blocks",
    ]
)  # fmt: skip
def outliers_kernel(
    p_out,
    p_values,
    p_index,
    s_batch: tl.int64,
    s_head: tl.int64,
    s_token: tl.int64,
    s_channel: tl.int64,
    start,
    count,
    vectors,
    first_vector,
    used,
    each,
    blocks,
    WIDTH: tl.constexpr,
    BY_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the `each` outliers of `used` vectors of each batch row that tokens start.. have."""
    program = tl.program_id(0)
    batch = (program // blocks).to(tl.int64)
    o_outlier = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = o_outlier < used * each
    at = (batch * vectors + first_vector) * each
    index = tl.load(p_index + at + o_outlier, mask=mask, other=0).to(tl.int32)
    exact = tl.load(p_values + at + o_outlier, mask=mask, other=0).to(tl.float32)
    vector = o_outlier // each
    if BY_TOKENS:  # a vector is a channel of a head
        token, place = index - start, vector
    else:
        token, place = first_vector + vector - start, index
    mask = mask & (token >= 0) & (token < count)
    o_out = (place // WIDTH).to(tl.int64) * s_head + (place % WIDTH).to(tl.int64) * s_channel
    o_out += batch * s_batch + token.to(tl.int64) * s_token
    tl.store(p_out + o_out, exact, mask=mask)
