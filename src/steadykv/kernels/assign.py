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
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """argmin_j |mu_j|^2 - 2 x·mu_j, the lowest j on ties, of `tiles` tiles of tokens.

    The first TILE centroids stay in shared memory, while the next tokens are on their way.
    """
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * tiles
    channel = tl.arange(0, PADDED)
    mu, norm = _table(doubled, norms, head, 0, CLUSTERS, WIDTH, PADDED, TILE, INTERPRETED)
    for tile in tl.range(first, first + tiles, num_stages=STAGES):
        start = head * tokens + tile * TOKENS
        offset = tl.arange(0, TOKENS)
        inside = offset < tokens - tile * TOKENS
        mask = inside[:, None] & (channel < WIDTH)[None, :]
        place = x + start * WIDTH + (offset[:, None] * WIDTH + channel[None, :])
        value = tl.load(place, mask=mask, other=0).to(tl.bfloat16)
        if INTERPRETED:
            value = value.to(tl.float32)
        best, chosen = _least(value, mu, norm, TILE)
        for other in range(TILE, CLUSTERS, TILE):
            more, more_norm = _table(
                doubled, norms, head, other, CLUSTERS, WIDTH, PADDED, TILE, INTERPRETED
            )
            least, where = _least(value, more, more_norm, TILE)
            chosen = tl.where(least < best, other + where, chosen)
            best = tl.minimum(least, best)
        chosen = tl.minimum(chosen, CLUSTERS - 1)  # numbers that overflow have no least score
        tl.store(ids + start + offset, chosen.to(ids.dtype.element_ty), mask=inside)


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
