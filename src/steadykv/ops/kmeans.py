"""Contract: k-means of one stage, and the forms its centroids are stored in."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .dispatch import resolve

__all__ = [
    "assign_centroids",
    "centroid_values",
    "cluster_means",
    "gather_centroids",
    "kmeans",
    "quantize_centroids",
    "refit_centroids",
    "subtract_centroids",
]


def kmeans(
    x: Tensor,
    centroids: Tensor,
    iterations: int,
    *,
    with_ids: bool = True,
    rounded: bool = True,
    reseed_empty: bool = False,
    backend: str | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Clusters the tokens of each head, from the given centroids.

    x: FP32 [N, S, D], contiguous, S > 0. centroids: float [N, C, D].
    Returns ids int64 [N, S] (None without `with_ids`) and the centroids, BF16 [N, C, D]; ids belong
    to these rounded centroids. Ties go to the lowest index, an empty cluster keeps its centroid,
    means are summed in token order. With `rounded` False: no ids, and the means in FP32, for a
    caller that stores them in another form and assigns to that. With `reseed_empty` the n-th empty
    cluster of an iteration (by index) takes the token of its head that is n-th farthest from its
    centroid (ties: first token).
    Allocates a BF16-rounded copy of x, the means, and distances of one row block.
    Quant VideoGen (arXiv 2602.02958) Sec. 4, with the rounding stated here.
    """
    module = resolve("kmeans", x.device, backend)
    return module.kmeans(x, centroids, iterations, with_ids, rounded, reseed_empty)


def assign_centroids(x: Tensor, centroids: Tensor, *, backend: str | None = None) -> Tensor:
    """The nearest centroid of each token, as the last step of `kmeans` has it: int64 [N, S].

    x: FP32 [N, S, D]. centroids: float [N, C, D]. Both are rounded to BF16 for the products; ties
    go to the lowest index. Allocates a rounded copy of x and distances of one row block.
    """
    return resolve("kmeans", x.device, backend).assign_centroids(x, centroids)


def quantize_centroids(
    means: Tensor, *, backend: str | None = None
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """FP32 means [N, C, D] in 8 bits, with a scale for each.

    Returns `centroids` E4M3 [N, C, D] and `centroid_scale` FP16 [N, C], the least power of two, of
    2^-24 to 2^15, with which the largest magnitude of a mean is at most 448 scales; the values of
    these, BF16 [N, C, D], which hold them exactly; and the number of means that are beyond 448·2^15
    and saturate, int64 [N]. Values are at most 2^-4 of themselves off, or 2^-10 scales where they
    are small. E4M3 has as many bits at any exponent, so that a power of two costs nothing but
    some of the numbers below 2^-14 of the largest.
    """
    return resolve("kmeans", means.device, backend).quantize_centroids(means)


def centroid_values(tensors: Mapping[str, Tensor], *, backend: str | None = None) -> Tensor:
    """The centroids [..., C, D] that a payload stores: BF16 as they are, or new FP32 from E4M3.

    tensors: `centroids`, and `centroid_scale` [..., C] for E4M3, any FP16 numbers: payloads of
    earlier releases have others than powers of two. The products are exact.
    """
    return resolve("kmeans", tensors["centroids"].device, backend).centroid_values(tensors)


def cluster_means(
    x: Tensor, ids: Tensor, previous: Tensor, *, backend: str | None = None
) -> Tensor:
    """FP32 means [N, C, D] of the members of each cluster, added in token order.

    x: FP32 [N, S, D]. ids: int64 [N, S]. previous: FP32 [N, C, D], kept by empty clusters.
    """
    return resolve("kmeans", x.device, backend).cluster_means(x, ids, previous)


def refit_centroids(
    x: Tensor, residual: Tensor, ids: Tensor, centroids: Tensor, *, backend: str | None = None
) -> Tensor:
    """The centroids that fit best once the codes of the residual are fixed.

    x: FP32 [N, S, D], what was clustered. residual: FP32 [N, S, D], decoded. ids: int64 [N, S].
    centroids: BF16 [N, C, D]. mu_j becomes the mean of x - residual over its members, rounded to
    BF16; empty clusters stay. A head whose squared error |x - (mu + residual)|^2 would not fall
    keeps all its centroids. Returns new BF16 [N, C, D]. Allocates an FP32 copy of one head.
    """
    return resolve("kmeans", x.device, backend).refit_centroids(x, residual, ids, centroids)


def gather_centroids(centroids: Tensor, ids: Tensor, *, backend: str | None = None) -> Tensor:
    """The centroid of each token: [N, C, D] and int64 [N, S] give a new [N, S, D]."""
    return resolve("kmeans", ids.device, backend).gather_rows(centroids, ids)


def subtract_centroids(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    *,
    rounded: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """What the centroid of each token leaves: x - mu[id], or x - (mu[id] + rounded), in FP32.

    x: FP32 [N, S, D]. centroids: BF16 or FP32 [N, C, D]. ids: int64 [N, S]. rounded: FP32 [N, S,
    D], a decoded residual; the result takes its place. Returns `rounded`, or a new [N, S, D];
    allocates row blocks beside it.
    """
    return resolve("kmeans", x.device, backend).subtract_centroids(x, centroids, ids, rounded)
