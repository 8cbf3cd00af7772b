"""Kernels: k-means. Assignment on the matrix units, means as a product with the one-hot ids.

The sums of a mean are made in parts of consecutive tokens, which are added in order: no atomics,
the same bytes on every run. Of the reference they differ by the order of FP32 sums alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.kmeans import (
    centroid_values,
    gather_rows,
    quantize_centroids,
)
from ..reference.kmeans import kmeans as _kmeans
from ..reference.kmeans import (
    refit_centroids as _refit,
)
from ..reference.kmeans import (
    subtract_centroids as _subtract,
)
from .assign import nearest_kernel
from .launch import (
    Launch,
    blocks,
    interpreted,
    kind_of,
    on_device,
    power_of_two,
    processors,
    shared_memory,
    tile_width,
)

__all__ = [
    "assign_centroids",
    "centroid_values",
    "cluster_means",
    "gather_rows",
    "kmeans",
    "quantize_centroids",
    "refit_centroids",
    "residual_tile",
    "subtract_centroids",
]

BF16_MAX = tl.constexpr(3.3895313892515355e38)

# Of an assignment: tokens of a tile, centroids that a program keeps, bytes of those. Two programs
# share a processor: while one finds the least of its scores, the other multiplies.
ASSIGN_TOKENS, ASSIGN_CENTROIDS, ASSIGN_BYTES = 64, 256, 64 << 10
ASSIGN_WARPS, ASSIGN_PROGRAMS, ASSIGN_STAGES = 4, 2, 3
SUM_TOKENS, SUM_CENTROIDS, SUM_WARPS, SUM_PROGRAMS = 64, 128, 4, 2
COUNT_TOKENS = 1024
Scores = tuple[Tensor, Tensor]
"""-2 mu in BF16 [N, C, D], and |mu|^2 in FP32 [N, C]."""

ROWS = 16  # of the small kernels over [C, D] or [S, D]


def kmeans(
    x: Tensor,
    centroids: Tensor,
    iterations: int,
    with_ids: bool = True,
    rounded: bool = True,
    reseed_empty: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """See `steadykv.ops.kmeans`."""
    if reseed_empty:  # sorts the tokens of every head: rare, and no kernel
        return _kmeans(x.float(), centroids, iterations, with_ids, rounded, reseed_empty)
    means, final, scores = _prepare(centroids)
    for _ in range(iterations):
        ids = _assign(x, scores, torch.int32)
        means, final, scores = _means(x, ids, means)
    if not rounded:
        return None, means
    return (_assign(x, scores, torch.int64) if with_ids else None), final


def assign_centroids(x: Tensor, centroids: Tensor) -> Tensor:
    """See `steadykv.ops.kmeans`."""
    return _assign(x, _prepare(centroids)[2], torch.int64)


def cluster_means(x: Tensor, ids: Tensor, previous: Tensor) -> Tensor:
    """See `steadykv.ops.kmeans`."""
    return _means(x, ids, previous)[0]


def refit_centroids(x: Tensor, residual: Tensor, ids: Tensor, centroids: Tensor) -> Tensor:
    """See `steadykv.ops.kmeans`; an option, without a kernel."""
    return _refit(x.float(), residual, ids, centroids)


def subtract_centroids(
    x: Tensor, centroids: Tensor, ids: Tensor, rounded: Tensor | None = None
) -> Tensor:
    """See `steadykv.ops.kmeans`."""
    if rounded is not None:  # `compensate_clustered` has it in registers
        return _subtract(x.float(), centroids, ids, rounded)
    heads, tokens, width = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    with on_device(x):
        _leave[blocks(tokens, ROWS), heads](
            x,
            centroids.contiguous(),
            ids.contiguous(),
            out,
            tokens,
            centroids.shape[1],
            width,
            tile_width(width),
            ROWS,
        )
    return out


def _prepare(centroids: Tensor) -> tuple[Tensor, Tensor, Scores]:
    """The centroids [N, C, D] in FP32 and in BF16, and what scores tokens against the latter."""
    means = centroids.float().contiguous()
    return means, *_finish(means, None, None, means)


def _assign(x: Tensor, scores: Scores, kind: torch.dtype) -> Tensor:
    (heads, tokens, width), (doubled, norms) = x.shape, scores
    ids = torch.empty(heads, tokens, dtype=kind, device=x.device)
    count = blocks(tokens, ASSIGN_TOKENS)
    programs = max(1, ASSIGN_PROGRAMS * processors(x.device) // heads)
    tiles = blocks(count, programs)
    padded = tile_width(width)
    kept = min(ASSIGN_CENTROIDS, ASSIGN_BYTES // (2 * padded), tile_width(norms.shape[1]))
    stages = ASSIGN_STAGES
    tile_bytes = ASSIGN_TOKENS * padded * x.element_size()
    while stages > 1 and 2 * kept * padded + stages * tile_bytes > shared_memory(x.device) // 2:
        stages -= 1
    constants = (norms.shape[1], width, padded, ASSIGN_TOKENS, kept, stages, interpreted())
    with on_device(x):
        _nearest(
            kind_of(x, ids, constants=constants), (blocks(count, tiles), heads, 1),
            x, doubled, norms, ids, tokens, tiles, *constants,
        )  # fmt: skip
    return ids


def _means(x: Tensor, ids: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Scores]:
    """The means FP32 [N, C, D] of the clusters, rounded to BF16, and what scores tokens."""
    ids, previous = ids.contiguous(), previous.contiguous()
    (heads, tokens, width), clusters = x.shape, previous.shape[1]
    size = min(SUM_CENTROIDS, tile_width(clusters))
    tiles = blocks(clusters, size)
    programs = SUM_PROGRAMS * processors(x.device) // (heads * tiles)
    parts = max(1, min(blocks(tokens, SUM_TOKENS), programs))
    length = blocks(blocks(tokens, parts), SUM_TOKENS) * SUM_TOKENS
    parts = blocks(tokens, length)
    sums = torch.empty(heads, parts, clusters, width, dtype=torch.float32, device=x.device)
    counts = torch.empty(heads, parts, clusters, dtype=torch.float32, device=x.device)
    is_exact = x.dtype != torch.bfloat16
    of_sums = (clusters, width, tile_width(width), SUM_TOKENS, size, is_exact, interpreted())
    of_counts = (clusters, power_of_two(clusters + 1), COUNT_TOKENS)
    with on_device(x):
        _sums(
            kind_of(x, ids, constants=of_sums), (tiles, parts, heads),
            x, ids, sums, tokens, length, *of_sums,
        )  # fmt: skip
        _counts(
            kind_of(ids, constants=of_counts), (parts, heads, 1),
            ids, counts, tokens, length, *of_counts,
        )  # fmt: skip
    means = torch.empty(previous.shape, dtype=torch.float32, device=x.device)
    return means, *_finish(previous, sums, counts, means)


def _finish(
    previous: Tensor, sums: Tensor | None, counts: Tensor | None, means: Tensor
) -> tuple[Tensor, Scores]:
    heads, clusters, width = previous.shape
    rounded = torch.empty(previous.shape, dtype=torch.bfloat16, device=previous.device)
    doubled = torch.empty_like(rounded)
    norms = torch.empty(heads, clusters, dtype=torch.float32, device=previous.device)
    constants = (clusters, width, tile_width(width), ROWS)
    with on_device(previous):
        _divide(
            kind_of(previous, means, constants=constants), (blocks(clusters, ROWS), heads, 1),
            previous, previous if sums is None else sums, previous if counts is None else counts,
            means, rounded, doubled, norms, 0 if sums is None else sums.shape[1], *constants,
        )  # fmt: skip
    return rounded, (doubled, norms)


@triton.jit(do_not_specialize=["tokens", "length"])
def _sums_kernel(
    x,
    ids,
    sums,
    tokens,
    length,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    EXACT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Sums of a tile of clusters over `length` tokens: the one-hot ids times the tokens.

    EXACT: the tokens are FP32, and enter as three BF16 numbers whose sum they are.
    """
    head, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
    cluster = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, PADDED)
    total = tl.zeros([TILE, PADDED], tl.float32)
    for offset in range(0, length, TOKENS):
        token = part * length + offset + tl.arange(0, TOKENS)
        inside = token < tokens
        member = tl.load(ids + head * tokens + token, mask=inside, other=-1).to(tl.int32)
        row = (head * tokens + token)[:, None] * WIDTH
        mask = inside[:, None] & (channel < WIDTH)[None, :]
        value = tl.load(x + row + channel[None, :], mask=mask, other=0)
        chosen = cluster[:, None] == member[None, :]
        if INTERPRETED:
            total += tl.dot(chosen.to(tl.float32), value.to(tl.float32), input_precision="ieee")
        else:
            one_hot = chosen.to(tl.bfloat16)
            high = value.to(tl.bfloat16)
            total = tl.dot(one_hot, high, total)
            if EXACT:
                rest = value - high.to(tl.float32)
                middle = rest.to(tl.bfloat16)
                total = tl.dot(one_hot, middle, total)
                total = tl.dot(one_hot, (rest - middle.to(tl.float32)).to(tl.bfloat16), total)
    place = (head * tl.num_programs(1) + part) * CLUSTERS + cluster
    mask = (cluster < CLUSTERS)[:, None] & (channel < WIDTH)[None, :]
    tl.store(sums + place[:, None] * WIDTH + channel[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["tokens", "length"])
def _counts_kernel(
    ids, counts, tokens, length, CLUSTERS: tl.constexpr, BINS: tl.constexpr, TOKENS: tl.constexpr
):
    """How many of `length` tokens each cluster has: FP32, exact below 2^24."""
    head, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    bin = tl.arange(0, BINS)
    count = tl.zeros([BINS], tl.int32)
    for offset in range(0, length, TOKENS):
        at = offset + tl.arange(0, TOKENS)
        token = part * length + at
        inside = (token < tokens) & (at < length)
        member = tl.load(ids + head * tokens + token, mask=inside, other=BINS - 1).to(tl.int32)
        count += tl.histogram(member, BINS)
    place = counts + (head * tl.num_programs(0) + part) * CLUSTERS + bin
    tl.store(place, count.to(tl.float32), mask=bin < CLUSTERS)


@triton.jit(do_not_specialize=["parts"])
def _divide_kernel(
    previous,
    sums,
    counts,
    means,
    rounded,
    doubled,
    norms,
    parts,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds the parts in order; mean, or the previous one of an empty cluster; BF16 and its norm."""
    head = tl.program_id(1).to(tl.int64)
    cluster = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED)
    known = cluster < CLUSTERS
    mask = known[:, None] & (channel < WIDTH)[None, :]
    place = (head * CLUSTERS + cluster)[:, None] * WIDTH + channel[None, :]
    mean = tl.load(previous + place, mask=mask, other=0)
    if parts > 0:
        total = tl.zeros([ROWS, PADDED], tl.float32)
        count = tl.zeros([ROWS], tl.float32)
        for part in range(parts):
            at = (head * parts + part) * CLUSTERS + cluster
            total += tl.load(sums + at[:, None] * WIDTH + channel[None, :], mask=mask, other=0)
            count += tl.load(counts + at, mask=known, other=0)
        mean = tl.where(count[:, None] > 0, tl.div_rn(total, tl.maximum(count, 1)[:, None]), mean)
    tl.store(means + place, mean, mask=mask)
    # Rounded by hand: the interpreter truncates what it stores as BF16.
    clipped = tl.minimum(tl.maximum(mean, -BF16_MAX), BF16_MAX)
    bits = clipped.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    near = bits.to(tl.float32, bitcast=True)
    tl.store(rounded + place, near.to(tl.bfloat16), mask=mask)
    tl.store(doubled + place, (near * -2.0).to(tl.bfloat16), mask=mask)  # exact, for scores
    tl.store(norms + head * CLUSTERS + cluster, tl.sum(near * near, 1), mask=known)


@triton.jit
def residual_tile(
    x,
    centroids,
    ids,
    tokens,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """x - mu[id] of this program's tokens: FP32 [TOKENS, PADDED], 0 in the padding.

    And the places of these numbers in x, int64, and whether there is one.
    """
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, PADDED)
    mask = (token < tokens)[:, None] & (channel < WIDTH)[None, :]
    place = (head * tokens + token)[:, None] * WIDTH + channel[None, :]
    chosen = tl.load(ids + head * tokens + token, mask=token < tokens, other=0)
    row = (head * CLUSTERS + chosen)[:, None] * WIDTH + channel[None, :]
    mu = tl.load(centroids + row, mask=mask, other=0).to(tl.float32)
    value = tl.load(x + place, mask=mask, other=0).to(tl.float32)
    return value - mu, place, mask


@triton.jit(do_not_specialize=["tokens"])
def _leave(
    x,
    centroids,
    ids,
    out,
    tokens,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """x - mu[id] in FP32."""
    left, place, mask = residual_tile(x, centroids, ids, tokens, CLUSTERS, WIDTH, PADDED, TOKENS)
    tl.store(out + place, left, mask=mask)


_nearest = Launch(nearest_kernel, ASSIGN_WARPS)
_sums = Launch(_sums_kernel, SUM_WARPS)
_counts = Launch(_counts_kernel, 4)
_divide = Launch(_divide_kernel, 4)
