"""Kernels: k-means. Assignment on the matrix units, means as a product with the one-hot ids.

The sums of a mean are made in parts of consecutive tokens, which are added in order: no atomics,
the same bytes on every run. Of the reference they differ by the order of FP32 sums alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.kmeans import (
    centroid_values,
    gather_rows,
)
from ..reference.kmeans import kmeans as _kmeans
from ..reference.kmeans import (
    refit_centroids as _refit,
)
from ..reference.kmeans import (
    subtract_centroids as _subtract,
)
from .assign import nearest_kernel
from .centroids import eight_bits_kernel
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
from .means import counts_kernel, divide_kernel, sums_kernel

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

# Of an assignment: tokens of a tile, centroids that a program keeps, bytes of those. Two programs
# share a processor: while one finds the least of its scores, the other multiplies.
ASSIGN_TOKENS, ASSIGN_CENTROIDS, ASSIGN_BYTES = 64, 256, 64 << 10
ASSIGN_WARPS, ASSIGN_PROGRAMS, ASSIGN_STAGES = 4, 2, 3
SUM_TOKENS, SUM_CENTROIDS, SUM_WARPS, SUM_PROGRAMS = 64, 128, 4, 2
COUNT_TOKENS = 1024
ROWS = 16  # of the small kernels over [C, D] or [S, D]


class Means(NamedTuple):
    """Centroids mu [N, C, D] in FP32 and BF16; what scores tokens: BF16 -2 mu, FP32 |mu|^2."""

    exact: Tensor
    rounded: Tensor
    doubled: Tensor
    norms: Tensor


class Sums(NamedTuple):
    """FP32 [N, P, C, D] sums and [N, P, C] counts of P parts of `length` tokens; of how many
    clusters a program makes them.
    """

    sums: Tensor
    counts: Tensor
    length: int
    tile: int


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
    means = _prepare(centroids)
    if iterations:
        ids = torch.empty(x.shape[:2], dtype=torch.int32, device=x.device)
        sums = _partial_sums(x, means)
        for _ in range(iterations):
            _assign(x, means, ids)
            _update(x, ids, means.exact, means, sums)
        del ids, sums  # others are about to be allocated
    if not rounded:
        return None, means.exact
    return (_nearest_ids(x, means) if with_ids else None), means.rounded


def assign_centroids(x: Tensor, centroids: Tensor) -> Tensor:
    """See `steadykv.ops.kmeans`."""
    return _nearest_ids(x, _prepare(centroids))


def cluster_means(x: Tensor, ids: Tensor, previous: Tensor) -> Tensor:
    """See `steadykv.ops.kmeans`."""
    means = _empty_means(previous)
    _update(x, ids.contiguous(), previous.contiguous(), means, _partial_sums(x, means))
    return means.exact


def quantize_centroids(means: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """See `steadykv.ops.kmeans`."""
    heads, clusters, width = means.shape
    means = means.contiguous()
    codes = torch.empty(means.shape, dtype=torch.uint8, device=means.device)
    scale = torch.empty(heads, clusters, dtype=torch.float16, device=means.device)
    values = torch.empty(means.shape, dtype=torch.bfloat16, device=means.device)
    lost = torch.zeros(heads, dtype=torch.int64, device=means.device)
    constants = (clusters, width, tile_width(width), ROWS)
    with on_device(means):
        _eight_bits(
            kind_of(means, constants=constants), (blocks(clusters, ROWS), heads, 1),
            means, codes, scale, values, lost, *constants,
        )  # fmt: skip
    stored = {"centroids": codes.view(torch.float8_e4m3fn), "centroid_scale": scale}
    return stored, values, lost


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
    inputs = (x, centroids.contiguous(), ids.contiguous())
    constants = (centroids.shape[1], width, tile_width(width), ROWS)
    with on_device(x):
        _leave(
            kind_of(*inputs, constants=constants), (blocks(tokens, ROWS), heads, 1),
            *inputs, out, tokens, *constants,
        )  # fmt: skip
    return out


def _prepare(centroids: Tensor) -> Means:
    """What scores tokens against the centroids [N, C, D]."""
    means = _empty_means(centroids)
    _finish(centroids.contiguous(), None, means)
    return means


def _empty_means(like: Tensor) -> Means:
    rounded = torch.empty(like.shape, dtype=torch.bfloat16, device=like.device)
    exact = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    norms = torch.empty(like.shape[:2], dtype=torch.float32, device=like.device)
    return Means(exact, rounded, torch.empty_like(rounded), norms)


def _nearest_ids(x: Tensor, means: Means) -> Tensor:
    ids = torch.empty(x.shape[:2], dtype=torch.int64, device=x.device)
    _assign(x, means, ids)
    return ids


def _assign(x: Tensor, means: Means, ids: Tensor) -> None:
    (heads, tokens, width), clusters, device = x.shape, means.norms.shape[1], x.device
    count = blocks(tokens, ASSIGN_TOKENS)
    programs = max(1, ASSIGN_PROGRAMS * processors(device) // heads)
    tiles = blocks(count, programs)
    padded = tile_width(width)
    kept = min(ASSIGN_CENTROIDS, ASSIGN_BYTES // (2 * padded), tile_width(clusters))
    stages = ASSIGN_STAGES
    tile_bytes = ASSIGN_TOKENS * padded * x.element_size()
    while stages > 1 and 2 * kept * padded + stages * tile_bytes > shared_memory(device) // 2:
        stages -= 1
    constants = (clusters, width, padded, ASSIGN_TOKENS, kept, stages, interpreted())
    with on_device(x):
        _nearest(
            kind_of(x, ids, constants=constants), (blocks(count, tiles), heads, 1),
            x, means.doubled, means.norms, ids, tokens, tiles, *constants,
        )  # fmt: skip


def _partial_sums(x: Tensor, means: Means) -> Sums:
    (heads, tokens, width), clusters = x.shape, means.norms.shape[1]
    size = min(SUM_CENTROIDS, tile_width(clusters))
    programs = SUM_PROGRAMS * processors(x.device) // (heads * blocks(clusters, size))
    parts = max(1, min(blocks(tokens, SUM_TOKENS), programs))
    length = blocks(blocks(tokens, parts), SUM_TOKENS) * SUM_TOKENS
    parts = blocks(tokens, length)
    sums = torch.empty(heads, parts, clusters, width, dtype=torch.float32, device=x.device)
    counts = torch.empty(heads, parts, clusters, dtype=torch.float32, device=x.device)
    return Sums(sums, counts, length, size)


def _update(x: Tensor, ids: Tensor, previous: Tensor, means: Means, parts: Sums) -> None:
    """The means of the clusters; `previous` ones stay where a cluster is empty."""
    (heads, tokens, width), clusters = x.shape, means.norms.shape[1]
    sums, counts, length, size = parts
    is_exact = x.dtype != torch.bfloat16
    of_sums = (clusters, width, tile_width(width), SUM_TOKENS, size, is_exact, interpreted())
    of_counts = (clusters, power_of_two(clusters + 1), COUNT_TOKENS)
    with on_device(x):
        _sums(
            kind_of(x, ids, constants=of_sums), (blocks(clusters, size), sums.shape[1], heads),
            x, ids, sums, tokens, length, *of_sums,
        )  # fmt: skip
        _counts(
            kind_of(ids, constants=of_counts), (sums.shape[1], heads, 1),
            ids, counts, tokens, length, *of_counts,
        )  # fmt: skip
    _finish(previous, parts, means)


def _finish(previous: Tensor, parts: Sums | None, means: Means) -> None:
    """`previous` may be `means.exact`."""
    heads, clusters, width = previous.shape
    # Without parts any pointers of FP32.
    sums, counts, count = (means.exact, means.norms, 0)
    if parts is not None:
        sums, counts, count = parts.sums, parts.counts, parts.sums.shape[1]
    constants = (clusters, width, tile_width(width), ROWS)
    with on_device(previous):
        _divide(
            kind_of(previous, constants=constants), (blocks(clusters, ROWS), heads, 1),
            previous, sums, counts, *means, count, *constants,
        )  # fmt: skip


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
def _leave_kernel(
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
_sums = Launch(sums_kernel, SUM_WARPS)
_counts = Launch(counts_kernel, 4)
_divide = Launch(divide_kernel, 4)
_leave = Launch(_leave_kernel, 4)
_eight_bits = Launch(eight_bits_kernel, 4)
