"""M = E[q q^T]: the products of a fixed share of the queries a program, added in a fixed order."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import query_moment as reference
from .launch import Launch, blocks, interpreted, kind_of, on_device, size_kinds, tile_width
from .numbers import finite

__all__ = ["accumulate_moment", "channel_weight", "merge_moment"]

# Shares follow from the number of queries of a head alone, so that the sums are the same whatever
# the batch and the device. 512 queries fill an H200 with 12 heads of 4,680; 16 shares bound what
# the partial sums take.
LEAST_SHARE = 512
MAX_SHARES = 16
MAX_TILE = 128  # channels of a block of M
FOLD_BLOCK = 1024  # numbers of M that a program folds in

merge_moment = reference.merge_moment  # a few operations on [N, D, D], once a span


def channel_weight(moment: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """See `steadykv.ops.query_moment`: the reference's bits, in one launch instead of thirty."""
    heads, width, _ = moment.shape
    if width & (width - 1):  # the reference folds halves, which the kernel has for powers of two
        return reference.channel_weight(moment, count)
    weight = torch.empty(heads, width, dtype=torch.float32, device=moment.device)
    active = torch.empty(heads, dtype=torch.uint8, device=moment.device)
    strides = (*moment.stride(), *count.stride())
    kind = kind_of(moment, count, constants=(width, *size_kinds(*strides)))
    with on_device(moment):
        _weight(
            kind, (heads, 1, 1), moment, count, weight, active, *strides, width,
            width.bit_length() - 1,
        )  # fmt: skip
    return weight, active


def accumulate_moment(moment: Tensor, count: Tensor, queries: Tensor) -> None:
    """See `steadykv.ops.query_moment`.

    Products of BF16 and FP16 queries are exact, those of FP32 ones are three TF32 products; sums
    are FP32. Allocates FP32 [B, H, P, D, D], P <= 16 shares of the queries.
    """
    if torch.compiler.is_compiling():
        _accumulate(moment, count, queries)
    else:  # the operator around it takes the host as long as all of this
        _accumulate_now(moment, count, queries)


def _accumulate_now(moment: Tensor, count: Tensor, queries: Tensor) -> None:
    batch, heads, width, _ = moment.shape
    pooled, tokens = queries.shape[1] // heads, queries.shape[2]
    rows = pooled * tokens
    block_d = min(MAX_TILE, tile_width(width))
    # A tile of queries is 16 KB in any type: BF16 tiles are twice as long.
    block_q = 32 if queries.dtype == torch.float32 else 64
    share = block_q * blocks(blocks(rows, min(MAX_SHARES, blocks(rows, LEAST_SHARE))), block_q)
    shares, tiles = blocks(rows, share), blocks(width, block_d)
    partial = torch.empty(
        batch * heads, shares, width, width, dtype=torch.float32, device=moment.device
    )
    of_queries, of_count = queries.stride(), count.stride()
    of_fold = (*moment.stride(), *of_count)
    constants = (pooled, width, tiles, block_q, block_d, interpreted())
    with on_device(moment):
        _product(8 if block_d == MAX_TILE else 4)(
            kind_of(queries, count, constants=(*constants, *size_kinds(*of_queries, *of_count))),
            (shares, batch * heads, tiles * tiles),
            queries, partial, count, *of_queries, *of_count, heads, tokens, rows, share, *constants,
        )  # fmt: skip
        _fold(
            kind_of(moment, count, constants=(width, *size_kinds(*of_fold))),
            (blocks(width * width, FOLD_BLOCK), batch * heads, 1),
            moment, count, partial, *of_fold, heads, shares, rows, width, FOLD_BLOCK,
        )  # fmt: skip


_accumulate = torch.library.custom_op(
    "steadykv::accumulate_moment", _accumulate_now, mutates_args=("moment", "count")
)


@_accumulate.register_fake
def _(moment: Tensor, count: Tensor, queries: Tensor) -> None:
    return None


# Strides are specialized, so that a row is read in wide words: whether 16 divides them follows from
# D, not from a length.
@triton.jit(do_not_specialize=["heads", "tokens", "rows", "share"])
def _product_kernel(
    p_queries,
    p_partial,
    p_count,
    stride_b,
    stride_h,
    stride_s,
    stride_d,
    stride_cb,
    stride_ch,
    heads,
    tokens,
    rows,
    share,
    POOLED: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One block of q^T q over one share of the queries that one KV head is asked with.

    One program of a head counts them.
    """
    i_share = tl.program_id(0)
    i_n = tl.program_id(1)
    o_i = tl.program_id(2) // TILES * BLOCK_D + tl.arange(0, BLOCK_D)
    o_j = tl.program_id(2) % TILES * BLOCK_D + tl.arange(0, BLOCK_D)
    i_b, i_h = (i_n // heads).to(tl.int64), (i_n % heads).to(tl.int64)
    if (i_share == 0) & (tl.program_id(2) == 0):
        p_count += i_b * stride_cb + i_h * stride_ch
        tl.store(p_count, tl.load(p_count) + rows)
    p_queries += i_b * stride_b + i_h * POOLED * stride_h
    b_sum = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    for first in range(i_share * share, min((i_share + 1) * share, rows), BLOCK_Q):
        o_q = first + tl.arange(0, BLOCK_Q)
        m_q = o_q < rows
        at = (o_q // tokens).to(tl.int64) * stride_h + (o_q % tokens).to(tl.int64) * stride_s
        p_row = p_queries + at[:, None]
        b_left = _queries(p_row + o_i[None, :] * stride_d, m_q[:, None] & (o_i < WIDTH)[None, :])
        if TILES == 1:
            b_right = b_left
        else:
            b_right = _queries(
                p_row + o_j[None, :] * stride_d, m_q[:, None] & (o_j < WIDTH)[None, :]
            )
        if INTERPRETED:  # its product of BF16 is wrong
            b_left, b_right = b_left.to(tl.float32), b_right.to(tl.float32)
        b_sum = tl.dot(tl.trans(b_left), b_right, b_sum, input_precision="tf32x3")
    p_sum = p_partial + (i_n.to(tl.int64) * tl.num_programs(0) + i_share) * WIDTH * WIDTH
    tl.store(
        p_sum + o_i[:, None] * WIDTH + o_j[None, :],
        b_sum,
        mask=(o_i < WIDTH)[:, None] & (o_j < WIDTH)[None, :],
    )


@triton.jit
def _queries(p_tile, mask):
    b_tile = tl.load(p_tile, mask=mask, other=0.0)
    return finite(b_tile.to(tl.float32)).to(b_tile.dtype)


@triton.jit(do_not_specialize=["heads", "shares", "rows"])
def _fold_kernel(
    p_moment,
    p_count,
    p_partial,
    stride_b,
    stride_h,
    stride_i,
    stride_j,
    stride_cb,
    stride_ch,
    heads,
    shares,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """mean += (sum / n - mean)·(n / count), as `merge_moment` has it; count has those n already."""
    i_n = tl.program_id(1)
    i_b, i_h = (i_n // heads).to(tl.int64), (i_n % heads).to(tl.int64)
    o_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_m < WIDTH * WIDTH
    p_partial += i_n.to(tl.int64) * shares * WIDTH * WIDTH
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_share in range(shares):
        b_sum += tl.load(p_partial + i_share * WIDTH * WIDTH + o_m, mask=mask, other=0.0)
    added = rows.to(tl.float32)
    total = tl.load(p_count + i_b * stride_cb + i_h * stride_ch).to(tl.float32)
    weight = tl.div_rn(added, total)
    p_at = p_moment + i_b * stride_b + i_h * stride_h
    p_at += o_m // WIDTH * stride_i + o_m % WIDTH * stride_j
    b_mean = tl.load(p_at, mask=mask, other=0.0)
    b_new = tl.div_rn(b_sum, tl.zeros([BLOCK], tl.float32) + added)
    tl.store(p_at, b_mean + (b_new - b_mean) * weight, mask=mask)


@triton.jit
def _weight_kernel(
    p_moment,
    p_count,
    p_weight,
    p_active,
    stride_n,
    stride_i,
    stride_j,
    stride_c,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """The diagonal over its mean, or 1 where that says nothing."""
    i_n = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, WIDTH)
    energy = tl.load(p_moment + i_n * stride_n + o_c * (stride_i + stride_j))
    fold = energy
    for level in tl.static_range(LEVELS):  # one order on every device
        fold = tl.sum(tl.reshape(fold, [2, WIDTH >> (level + 1)]), 0)
    mean = tl.sum(fold, 0) / WIDTH
    used = (tl.load(p_count + i_n * stride_c) > 0) & (mean > 0) & (mean - mean == 0)
    weight = tl.where(used, tl.div_rn(energy, mean + energy * 0), 1.0)
    tl.store(p_weight + i_n * WIDTH + o_c, weight)
    tl.store(p_active + i_n, used.to(tl.uint8))


@cache
def _product(warps: int) -> Launch:
    return Launch(_product_kernel, warps, num_stages=2)


_fold = Launch(_fold_kernel, 4, enable_fp_fusion=False)
_weight = Launch(_weight_kernel, 1)
