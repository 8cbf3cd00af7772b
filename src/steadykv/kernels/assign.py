"""Kernel: the nearest centroid of each token, on the matrix units."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["nearest_kernel"]


@triton.jit(do_not_specialize=["tokens", "tiles"])
def nearest_kernel(
    x,
    doubled,
    norms,
    ids,
    tokens,
    tiles,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """argmin_j |mu_j|^2 - 2 x·mu_j, the lowest j on ties, of `tiles` tiles of tokens.

    The centroids stay in shared memory where one tile of them is all.
    """
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * tiles
    channel = tl.arange(0, PADDED)
    mu, norm = _table(doubled, norms, head, 0, CLUSTERS, WIDTH, PADDED, TILE, INTERPRETED)
    for tile in range(first, first + tiles):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        inside = (token < tokens)[:, None] & (channel < WIDTH)[None, :]
        row = (head * tokens + token)[:, None] * WIDTH
        value = tl.load(x + row + channel[None, :], mask=inside, other=0).to(tl.bfloat16)
        if INTERPRETED:
            value = value.to(tl.float32)
        best, chosen = _least(value, mu, norm, TILE)
        for start in range(TILE, CLUSTERS, TILE):
            more, more_norm = _table(
                doubled, norms, head, start, CLUSTERS, WIDTH, PADDED, TILE, INTERPRETED
            )
            least, where = _least(value, more, more_norm, TILE)
            chosen = tl.where(least < best, start + where, chosen)
            best = tl.minimum(least, best)
        chosen = tl.minimum(chosen, CLUSTERS - 1)  # numbers that overflow have no least score
        tl.store(ids + head * tokens + token, chosen.to(ids.dtype.element_ty), mask=token < tokens)


@triton.jit
def _table(
    doubled,
    norms,
    head,
    start,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """-2 mu of a tile of centroids, BF16 [PADDED, TILE], and the squared norms of these."""
    cluster, channel = start + tl.arange(0, TILE), tl.arange(0, PADDED)
    known = cluster < CLUSTERS
    place = doubled + (head * CLUSTERS + cluster)[None, :] * WIDTH + channel[:, None]
    mu = tl.load(place, mask=known[None, :] & (channel < WIDTH)[:, None], other=0)
    norm = tl.load(norms + head * CLUSTERS + cluster, mask=known, other=float("inf"))
    return mu.to(tl.float32) if INTERPRETED else mu, norm


@triton.jit
def _least(value, doubled, norm, TILE: tl.constexpr):
    """The least score of each token and the first centroid that has it."""
    score = tl.dot(value, doubled) + norm[None, :]
    least = tl.min(score, 1)
    index = tl.arange(0, TILE)[None, :]
    return least, tl.min(tl.where(score == least[:, None], index, TILE - 1), 1)
