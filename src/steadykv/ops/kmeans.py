"""Contract: k-means of one stage, and the forms its centroids are stored in."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .dispatch import resolve

__all__ = [
    "assign_centroids",
    "centroid_values",
    "gather_centroids",
    "kmeans",
    "quantize_centroids",
]


def kmeans(
    x: Tensor,
    centroids: Tensor,
    iterations: int,
    *,
    with_ids: bool = True,
    rounded: bool = True,
    backend: str | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Clusters the tokens of each head, from the given centroids.

    x: FP32 [N, S, D], contiguous, S > 0. centroids: float [N, C, D].
    Returns ids int64 [N, S] (None without `with_ids`) and the centroids, BF16 [N, C, D]; ids belong
    to these rounded centroids. Ties go to the lowest index, an empty cluster keeps its centroid,
    means are summed in token order. With `rounded` False: no ids, and the means in FP32, for a
    caller that stores them in another form and assigns to that.
    Allocates a BF16-rounded copy of x, the means, and distances of one row block.
    Quant VideoGen (arXiv 2602.02958) Sec. 4, with the rounding stated here.
    """
    module = resolve("kmeans", x.device, backend)
    return module.kmeans(x, centroids, iterations, with_ids, rounded)


def assign_centroids(x: Tensor, centroids: Tensor, *, backend: str | None = None) -> Tensor:
    """The nearest centroid of each token, as the last step of `kmeans` has it: int64 [N, S].

    x: FP32 [N, S, D]. centroids: float [N, C, D]. Both are rounded to BF16 for the products; ties
    go to the lowest index. Allocates a rounded copy of x and distances of one row block.
    """
    return resolve("kmeans", x.device, backend).assign_centroids(x, centroids)


def quantize_centroids(
    means: Tensor, *, backend: str | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """FP32 means [N, C, D] in 8 bits, with a scale for each.

    Returns `centroids` E4M3 [N, C, D] and `centroid_scale` FP16 [N, C], the largest magnitude of a
    mean over 448; and the number of scales that saturated, int64 [N]. Values are at most 2^-4 of
    themselves off, or 2^-10 scales where they are small.
    """
    return resolve("kmeans", means.device, backend).quantize_centroids(means)


def centroid_values(tensors: Mapping[str, Tensor], *, backend: str | None = None) -> Tensor:
    """The centroids [..., C, D] that a payload stores: BF16 as they are, or new FP32 from E4M3.

    tensors: `centroids`, and `centroid_scale` [..., C] for E4M3. The products are exact.
    """
    return resolve("kmeans", tensors["centroids"].device, backend).centroid_values(tensors)


def gather_centroids(centroids: Tensor, ids: Tensor, *, backend: str | None = None) -> Tensor:
    """The centroid of each token: [N, C, D] and int64 [N, S] give a new [N, S, D]."""
    return resolve("kmeans", ids.device, backend).gather_rows(centroids, ids)
