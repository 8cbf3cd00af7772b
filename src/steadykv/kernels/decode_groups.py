"""The kernel of `decode_clustered` and `decode_grouped`: one pass from packed bytes to `out`."""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import halves
from .rounded import grid_steps, group_places, in_width, packed_zeros, stored_number
from .tiles import store_tile, tile_of

__all__ = ["groups_kernel"]


@triton.jit(
    do_not_specialize=[
        "s_batch", "s_head", "s_token", "s_channel", "rows", "heads", "start", "count", "tokens",
        "tiles", "first_row", "runs", "clusters", "zeros_row",
    ]
)  # fmt: skip
def groups_kernel(
    p_out,
    p_codes,
    p_finer,
    p_scale,
    p_base,
    p_minimum,
    p_zeros,
    p_ids,
    p_centroids,
    p_centroid_scale,
    p_basis,
    p_coef_codes,
    p_coef_scales,
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
    first_row,
    runs,
    clusters,
    zeros_row,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BY_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_TRITS: tl.constexpr,
    FINER: tl.constexpr,
    FINER_ROW: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Tokens start..start + count of `rows` heads, BLOCK_T of one head a program.

    first_row: of these heads among the payload's.

    Absent tensors are None. p_base: p_scale has steps of it. p_minimum, p_zeros: the affine grids.
    runs: rows of scales a head, of `tokens` without BY_TOKENS. p_centroids: BF16 as pairs in int32
    or plain, or E4M3 as uint8.
    """
    row, tile = tile_of(tiles, rows, HEADS_FIRST)
    head = row.to(tl.int64) + first_row
    first = tile * BLOCK_T
    at = head * tokens + start + first  # this tile's first row in the payload
    o_token = tl.arange(0, BLOCK_T)
    m_token = o_token < count - first
    o_word = tl.arange(0, WORDS)
    o_channel = (8 * o_word)[:, None, None] + tl.arange(0, 8)[None, None, :]
    m_tile = in_width(m_token[None, :, None], o_channel, WIDTH)

    correction = 0.0
    if RANK > 0:
        correction = _correction(
            p_basis + head * (WIDTH * RANK), p_coef_codes + at * RANK, p_coef_scales + at,
            o_token, m_token, WIDTH, WORDS, RANK, BLOCK_R, BLOCK_T, INTERPRET,
        )  # fmt: skip

    GROUPS: tl.constexpr = WIDTH if BY_TOKENS else (WIDTH + GROUP - 1) // GROUP
    if BY_TOKENS:
        o_run, first_run = (start + first + o_token) // GROUP, head * runs
    else:
        o_run, first_run = o_token, at
    o_group, m_group = group_places(o_run, m_token, o_word, WIDTH, GROUP, BY_TOKENS)
    scale = stored_number(p_scale + first_run * GROUPS, o_group, m_group, p_base is not None)
    if p_base is not None:
        scale *= tl.load(p_base + head).to(tl.float32)
    if p_minimum is not None:
        zero = 0.0
    elif p_zeros is not None:
        o_flat = (start + first) * GROUPS + o_group
        zero = packed_zeros(p_zeros + head * zeros_row, o_flat, m_group, BITS)
    else:
        zero = (1 << (BITS - 1)) - 1.0
    value = grid_steps(p_codes, zero, at, o_token, m_token, o_word, WIDTH, ROW, BITS, IS_TRITS)
    value *= scale
    if FINER > 0:
        # From the middle of a step to that of its part. Both products are exact, so that their sum
        # is the rounded product of the reference, whether it is fused with one of them or not.
        LEVELS_FINER: tl.constexpr = 1 << FINER
        part = grid_steps(
            p_finer, 0.0, at, o_token, m_token, o_word, WIDTH, FINER_ROW, FINER, False
        )
        value += ((part + 0.5) * (1.0 / LEVELS_FINER) - 0.5) * scale
    if p_minimum is not None:
        value += stored_number(p_minimum + first_run * GROUPS, o_group, m_group, False)
    if STAGES > 0:
        value += _centroid_sum(
            p_ids, p_centroids, p_centroid_scale, head, at, tokens, clusters, o_token, m_token,
            o_word, m_tile, WIDTH, WORDS, STAGES, BLOCK_T,
        )  # fmt: skip
    if RANK > 0:
        value += correction
    if LEVELS > 0:
        value = _rotated(value, WORDS, LEVELS, BLOCK_T)
    store_tile(
        value, p_out, s_batch, s_head, s_token, s_channel, row.to(tl.int64), heads, first, o_token,
        o_channel, m_tile, IS_ALIGNED,
    )  # fmt: skip


@triton.jit
def _centroid_sum(
    p_ids,
    p_centroids,
    p_centroid_scale,
    head,
    at,
    tokens,
    clusters,
    o_token,
    m_token,
    o_word,
    m_tile,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """(mu_1[id_1] + mu_2[id_2]) + …, FP32 [W, T, 8]."""
    total = tl.zeros([WORDS, BLOCK_T, 8], tl.float32)
    for stage in tl.static_range(STAGES):
        # Row n·T + t of ids [N, T, S], of which `at` counts n·S + s.
        p_id = p_ids + at + head * ((STAGES - 1) * tokens) + stage * tokens
        ids = tl.load(p_id + o_token, mask=m_token, other=0).to(tl.int32)
        table = (head * STAGES + stage) * clusters
        if p_centroids.dtype.element_ty == tl.int32:  # pairs of BF16: no conversion, two shifts
            o_pair = (4 * o_word)[:, None, None] + tl.arange(0, 4)[None, None, :]
            o_pair = (ids * (WIDTH // 2))[None, :, None] + o_pair
            m_pair = in_width(m_token[None, :, None], (8 * o_word)[:, None, None], WIDTH)
            pair = tl.load(p_centroids + table * (WIDTH // 2) + o_pair, mask=m_pair, other=0)
            even, odd = halves(pair)
            value = tl.reshape(tl.join(even, odd), [WORDS, BLOCK_T, 8])
        else:
            o_channel = (8 * o_word)[:, None, None] + tl.arange(0, 8)[None, None, :]
            o_entry = (ids * WIDTH)[None, :, None] + o_channel
            value = stored_number(p_centroids + table * WIDTH, o_entry, m_tile, False)
            if p_centroid_scale is not None:
                scale = tl.load(p_centroid_scale + table + ids, mask=m_token, other=0)
                value *= scale.to(tl.float32)[None, :, None]
        total = value if stage == 0 else total + value
    return total


@triton.jit
def _correction(
    p_basis,
    p_codes,
    p_scales,
    o_token,
    m_token,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """alpha·(codes·U^T), FP32 [W, T, 8]: products of int8 and BF16 are exact."""
    # Interpreted, a product of BF16 operands takes their bits for numbers.
    OPERAND: tl.constexpr = tl.float32 if INTERPRET else tl.bfloat16
    o_channel = tl.arange(0, 8 * WORDS)
    total = tl.zeros([BLOCK_T, 8 * WORDS], tl.float32)
    for first in tl.static_range(0, RANK, BLOCK_R):
        o_rank = first + tl.arange(0, BLOCK_R)
        m_rank = o_rank < RANK
        codes = tl.load(
            p_codes + (o_token * RANK)[:, None] + o_rank[None, :],
            mask=m_token[:, None] & m_rank[None, :],
            other=0,
        ).to(OPERAND)
        basis = tl.load(
            p_basis + (o_channel * RANK)[None, :] + o_rank[:, None],
            mask=in_width(m_rank[:, None], o_channel[None, :], WIDTH),
            other=0,
        ).to(OPERAND)
        total = tl.dot(codes, basis, total)
    scales = tl.load(p_scales + o_token, mask=m_token, other=0).to(tl.float32)
    total = tl.permute(tl.reshape(total, [BLOCK_T, WORDS, 8]), [1, 0, 2])
    return total * scales[None, :, None]


@triton.jit
def _rotated(value, WORDS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Blocks of 2^LEVELS channels times the Hadamard matrix, summed as the reference does."""
    SIZE: tl.constexpr = 1 << LEVELS
    bound: tl.constexpr = 3.4028234663852886e38 / SIZE
    value = tl.minimum(tl.maximum(value, -bound), bound)
    for level in tl.static_range(LEVELS):
        if level < 3:
            value = _butterfly(value, WORDS * BLOCK_T * 8, 1 << level)
        else:
            value = _butterfly(value, WORDS * BLOCK_T * 8, BLOCK_T << level)
    return tl.reshape(value, [WORDS, BLOCK_T, 8]) * (SIZE**-0.5)


@triton.jit
def _butterfly(value, SIZE: tl.constexpr, STEP: tl.constexpr):
    """(low, high) becomes (low + high, low - high), of the numbers STEP apart."""
    value = tl.reshape(value, [SIZE // (2 * STEP), 2, STEP])
    low, high = tl.split(tl.permute(value, [0, 2, 1]))
    return tl.permute(tl.join(low + high, low - high), [0, 2, 1])
