"""QSAC: the nearest centroids by matrix products, then the ranges of the few that are near."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import qsac as reference
from .launch import (
    Launch,
    blocks,
    interpreted,
    kind_of,
    on_device,
    power_of_two,
    shared_memory,
    tile_width,
)
from .networks import joined, least_in_lanes, merged, sortable, unsorted

__all__ = ["query_metric", "select_centroids"]

MAX_CANDIDATES = 8  # minima that a tile keeps in registers
MAX_GROUP = 128  # channels of a tile of residuals
PARTS = 2  # BF16 numbers that add up to an FP32 one, to 2^-18 of it
LARGE_TILE_BYTES = 200 << 10  # shared memory in which 128 tokens meet 128 centroids twice
MAXNREG = 128  # two programs a multiprocessor: one multiplies while the other one sorts
ROUND = 256  # centroids that six bits tell apart: four of them are those of different threads

RANGE_TOKENS = 32  # of a program that takes ranges

query_metric = reference.query_metric  # an ablation: solves once a span


def select_centroids(
    x: Tensor,
    centroids: Tensor,
    weight: Tensor | None,
    candidates: int,
    group_size: int,
    metric: Tensor | None = None,
    include_zero: bool = True,
) -> Tensor:
    """See `steadykv.ops.qsac`.

    d_Q is taken without its constant, |mu|_w^2 - 2 k·(w mu), and FP32 sums of products that are
    right to 2^-18: BF16 tokens times w mu as two BF16 numbers, three TF32 products for FP32 tokens.
    Ids are those of the reference unless two distances differ by less than 2^-16·(|k|_w^2 +
    |mu|_w^2), or two range scores by less than 2^-20 of them. Allocates BF16 [N, 2, C, D] or FP32
    [N, C, D], FP32 [N, C], and with several candidates int16 [N, S, candidates].
    """
    heads, tokens, width = x.shape
    clusters = centroids.shape[1]
    candidates, group_size = min(candidates, clusters), min(group_size, width)
    # The full metric is an ablation; so are more candidates than a tile holds.
    if metric is not None or candidates > MAX_CANDIDATES or group_size > MAX_GROUP:
        return reference.select_centroids(
            x.float(), centroids, weight, candidates, group_size, metric, include_zero
        )
    device = x.device
    ids = torch.empty(heads, tokens, dtype=torch.int64, device=device)
    if not heads or not tokens:
        return ids
    centroids = centroids.contiguous()
    weight = None if weight is None else weight.contiguous()
    is_split = x.dtype == torch.bfloat16
    # Unweighted BF16 centroids are one part already.
    parts = PARTS if is_split and not (weight is None and centroids.dtype == x.dtype) else 1
    weighted = torch.empty(heads, parts, clusters, width, dtype=x.dtype, device=device)
    square = torch.empty(heads, clusters, dtype=torch.float32, device=device)
    near = ids
    if candidates > 1:
        kind = torch.int16 if clusters <= 1 << 15 else torch.int32
        near = torch.empty(heads, tokens, candidates, dtype=kind, device=device)
    block_s, block_c, block_k, warps = _tile(shared_memory(device), is_split)
    block_c = min(block_c, tile_width(clusters))
    block_k = min(block_k, tile_width(width))
    chunks = min(ROUND // block_c, blocks(clusters, block_c))
    # Smaller tiles, and those that read their tokens again, have room for more programs.
    maxnreg = MAXNREG if warps == 8 and width <= block_k else None
    inputs = (centroids,) if weight is None else (centroids, weight)
    of_weights = (width, clusters, parts, power_of_two(width))
    of_near = (
        width, clusters, candidates, parts, blocks(clusters, chunks * block_c), chunks,
        power_of_two(chunks * block_c // 4), (block_c // 8).bit_length(),
        block_s, block_c, block_k, power_of_two(candidates), interpreted(),
    )  # fmt: skip
    of_range = (
        width, clusters, candidates, group_size, blocks(width, group_size), include_zero,
        RANGE_TOKENS, power_of_two(group_size), power_of_two(candidates),
    )  # fmt: skip
    with on_device(x):
        _weigh(
            kind_of(*inputs, constants=(x.dtype, *of_weights)), (blocks(clusters, 32), heads, 1),
            centroids, weight, weighted, square, *of_weights,
        )  # fmt: skip
        _near(warps, maxnreg)(
            kind_of(x, constants=(near.dtype, *of_near)), (blocks(tokens, block_s), heads, 1),
            x, weighted, square, near, tokens, *of_near,
        )  # fmt: skip
        if candidates > 1:
            _range(
                kind_of(x, *inputs, constants=(near.dtype, *of_range)),
                (blocks(tokens, RANGE_TOKENS), heads, 1),
                x, centroids, weight, near, ids, tokens, *of_range,
            )  # fmt: skip
    return ids


def _tile(nbytes: int, is_split: bool) -> tuple[int, int, int, int]:
    """Tokens, centroids and channels of a product, and warps, for so much shared memory."""
    if not is_split:
        return 64, 64, 64, 4
    return (128, 128, 128, 8) if nbytes >= LARGE_TILE_BYTES else (64, 128, 64, 4)


@triton.jit
def _weigh_kernel(
    p_mu,
    p_weight,
    p_weighted,
    p_square,
    WIDTH: tl.constexpr,
    CLUSTERS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """w mu, in parts that add up to it, and |mu|_w^2 of 32 centroids."""
    i_n = tl.program_id(1).to(tl.int64)
    o_c = tl.program_id(0) * 32 + tl.arange(0, 32)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_c < CLUSTERS)[:, None] & (o_d < WIDTH)[None, :]
    at = o_c[:, None] * WIDTH + o_d[None, :]
    b_mu = tl.load(p_mu + i_n * CLUSTERS * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    b_rest = b_mu
    if p_weight is not None:
        b_weight = tl.load(p_weight + i_n * WIDTH + o_d, mask=o_d < WIDTH, other=0.0)
        b_rest = b_weight[None, :] * b_mu
    tl.store(p_square + i_n * CLUSTERS + o_c, tl.sum(b_rest * b_mu, 1), mask=o_c < CLUSTERS)
    for part in tl.static_range(PARTS):
        b_part = b_rest.to(p_weighted.dtype.element_ty)
        tl.store(p_weighted + (i_n * PARTS + part) * CLUSTERS * WIDTH + at, b_part, mask=mask)
        b_rest -= b_part.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _near_kernel(
    p_x,
    p_weighted,
    p_square,
    p_near,
    tokens,
    WIDTH: tl.constexpr,
    CLUSTERS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PARTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CODES: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The centroids of least d_Q of BLOCK_S tokens, nearest first, lowest index on ties.

    The last bits of a distance say whose it is, and networks of minima and maxima sort them. In the
    layout of a product four threads share a row, two columns of every eight each: centroids are
    placed so that order within a thread, then threads, is their order.
    """
    TILES: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    i_n = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK_S
    o_s = tl.arange(0, BLOCK_S)
    o_p = tl.arange(0, BLOCK_C)
    o_code = o_p // 8 * 2 + o_p % 2
    o_place = o_code * 4 + o_p // 2 % 4
    o_m = tl.arange(0, 2 * BLOCK_M)[None, :]
    m_s = first + o_s < tokens
    p_x += (i_n * tokens + first) * WIDTH
    p_weighted += i_n * PARTS * CLUSTERS * WIDTH
    if TILES == 1:
        b_x = _tokens(p_x, m_s, 0, WIDTH, BLOCK_S, BLOCK_K, INTERPRETED)
    # The least so far in the first half, those of one round in the second.
    b_value = tl.full([BLOCK_S, 2 * BLOCK_M], float("inf"), tl.float32)
    b_index = tl.zeros([BLOCK_S, 2 * BLOCK_M], tl.int32)
    for round in tl.static_range(ROUNDS):
        least = ()
        for chunk in tl.static_range(CHUNKS):
            o_c = (round * CHUNKS + chunk) * BLOCK_C + o_place
            m_c = o_c < CLUSTERS
            b_dot = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
            p_mu = p_weighted + o_c[None, :] * WIDTH
            if TILES == 1:
                for part in tl.static_range(PARTS):
                    b_dot = _more(b_dot, b_x, p_mu + part * (CLUSTERS * WIDTH), 0, m_c,
                                  WIDTH, BLOCK_K, INTERPRETED)  # fmt: skip
            else:
                for i in range(PARTS * TILES):
                    b_x = _tokens(p_x, m_s, i % TILES, WIDTH, BLOCK_S, BLOCK_K, INTERPRETED)
                    b_dot = _more(b_dot, b_x, p_mu + i // TILES * (CLUSTERS * WIDTH), i % TILES,
                                  m_c, WIDTH, BLOCK_K, INTERPRETED)  # fmt: skip
            b_square = tl.load(p_square + i_n * CLUSTERS + o_c, mask=m_c, other=float("inf"))
            b_key = sortable(b_square[None, :] - 2 * b_dot)
            b_key = (b_key & -CODES) | (chunk * (BLOCK_C // 4) + o_code)[None, :]
            found = least_in_lanes(b_key, BLOCK_S, BLOCK_C, BLOCK_M, STEPS)
            if chunk == 0:
                least = found
            else:
                least = merged(least, found, BLOCK_M, BLOCK_M)
        b_least = tl.reshape(joined(least, BLOCK_M), (BLOCK_S, 4 * BLOCK_M))
        for m in tl.static_range(CANDIDATES):
            b_key, b_at = tl.min(
                b_least, 1, return_indices=True, return_indices_tie_break_left=True
            )
            is_chosen = tl.arange(0, 4 * BLOCK_M)[None, :] == b_at[:, None]
            b_least = tl.where(is_chosen, 0x7FFFFFFF, b_least)
            b_id = round * (CHUNKS * BLOCK_C) + (b_key & (CODES - 1)) * 4 + b_at // BLOCK_M
            is_column = o_m == (m if round == 0 else BLOCK_M + m)
            b_value = tl.where(is_column, unsorted(b_key & -CODES)[:, None], b_value)
            b_index = tl.where(is_column, b_id[:, None], b_index)
        if round > 0:
            b_old, b_of = b_value, b_index
            for m in tl.static_range(CANDIDATES):
                b_first, b_at = tl.min(
                    b_old, 1, return_indices=True, return_indices_tie_break_left=True
                )
                is_chosen = o_m == b_at[:, None]
                b_old = tl.where(is_chosen, float("inf"), b_old)
                b_chosen = tl.sum(tl.where(is_chosen, b_of, 0), 1)
                b_value = tl.where(o_m == m, b_first[:, None], b_value)
                b_index = tl.where(o_m == m, b_chosen[:, None], b_index)
    b_index = tl.minimum(b_index, CLUSTERS - 1)  # distances that are not finite choose anything
    p_near += (i_n * tokens + first) * CANDIDATES
    tl.store(
        p_near + o_s[:, None] * CANDIDATES + o_m,
        b_index.to(p_near.dtype.element_ty),
        mask=m_s[:, None] & (o_m < CANDIDATES),
    )


@triton.jit
def _tokens(
    p_x,
    m_s,
    tile,
    WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    o_d = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    at = tl.arange(0, BLOCK_S)[:, None] * WIDTH + o_d[None, :]
    b_x = tl.load(p_x + at, mask=m_s[:, None] & (o_d < WIDTH)[None, :], other=0.0)
    return b_x.to(tl.float32) if INTERPRETED else b_x  # its product of BF16 is wrong


@triton.jit
def _more(
    b_dot,
    b_x,
    p_mu,
    tile,
    m_c,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """`b_dot` and the products of one tile of channels with `p_mu` [1, centroids]."""
    o_d = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = m_c[None, :] & (o_d < WIDTH)[:, None]
    b_mu = tl.load(p_mu + o_d[:, None], mask=mask, other=0.0)
    if INTERPRETED:
        b_mu = b_mu.to(tl.float32)
    return tl.dot(b_x, b_mu, b_dot, input_precision="tf32x3")


@triton.jit(do_not_specialize=["tokens"])
def _range_kernel(
    p_x,
    p_mu,
    p_weight,
    p_near,
    p_ids,
    tokens,
    WIDTH: tl.constexpr,
    CLUSTERS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Of the near centroids of each token the one with the least weighted squared range."""
    i_n = tl.program_id(1).to(tl.int64)
    row = i_n * tokens + tl.program_id(0).to(tl.int64) * BLOCK_S
    o_s = tl.arange(0, BLOCK_S)
    o_g = tl.arange(0, BLOCK_G)
    o_m = tl.arange(0, BLOCK_M)[None, :]
    m_s = tl.program_id(0).to(tl.int64) * BLOCK_S + o_s < tokens
    p_x += row * WIDTH
    p_mu += i_n * CLUSTERS * WIDTH
    p_near += row * CANDIDATES
    b_score = tl.zeros([BLOCK_S, BLOCK_M], tl.float32)
    for i_g in tl.static_range(GROUPS):
        o_c = i_g * GROUP + o_g
        m_c = (o_g < GROUP) & (o_c < WIDTH)
        mask = m_s[:, None] & m_c[None, :]
        b_x = tl.load(p_x + o_s[:, None] * WIDTH + o_c[None, :], mask=mask, other=0.0)
        b_x = b_x.to(tl.float32)
        if p_weight is None:
            b_weight = tl.sum(m_c.to(tl.float32), 0)
        else:
            b_weight = tl.sum(tl.load(p_weight + i_n * WIDTH + o_c, mask=m_c, other=0.0), 0)
        for m in tl.static_range(CANDIDATES):
            o_id = tl.load(p_near + o_s * CANDIDATES + m, mask=m_s, other=0).to(tl.int32)
            b_mu = tl.load(p_mu + o_id[:, None] * WIDTH + o_c[None, :], mask=mask, other=0.0)
            b_rest = b_x - b_mu.to(tl.float32)
            if INCLUDE_ZERO:  # channels that are no part of the group are 0
                b_span = tl.maximum(tl.max(b_rest, 1), 0.0) - tl.minimum(tl.min(b_rest, 1), 0.0)
            else:
                b_high = tl.max(tl.where(mask, b_rest, -float("inf")), 1)
                b_span = b_high - tl.min(tl.where(mask, b_rest, float("inf")), 1)
            b_sum = b_score + (b_weight * (b_span * b_span))[:, None]
            b_score = tl.where(o_m == m, b_sum, b_score)
    b_score = tl.where(o_m < CANDIDATES, b_score, float("inf"))
    _, b_at = tl.min(b_score, 1, return_indices=True, return_indices_tie_break_left=True)
    b_id = tl.load(p_near + o_s * CANDIDATES + tl.minimum(b_at, CANDIDATES - 1), mask=m_s, other=0)
    tl.store(p_ids + row + o_s, b_id.to(tl.int64), mask=m_s)


@cache
def _near(warps: int, maxnreg: int | None) -> Launch:
    return Launch(_near_kernel, warps, num_stages=2, maxnreg=maxnreg)


_weigh = Launch(_weigh_kernel, 4)
_range = Launch(_range_kernel, 4, enable_fp_fusion=False)
