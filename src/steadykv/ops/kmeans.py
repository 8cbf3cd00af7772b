"""Contract: k-means of one stage."""

from __future__ import annotations

from torch import Tensor

from .dispatch import resolve

__all__ = ["gather_centroids", "kmeans"]


def kmeans(
    x: Tensor,
    centroids: Tensor,
    iterations: int,
    *,
    with_ids: bool = True,
    backend: str | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Clusters the tokens of each head, from the given centroids.

    x: FP32 [N, S, D], contiguous, S > 0. centroids: float [N, C, D].
    Returns ids int64 [N, S] (None without `with_ids`) and the centroids, BF16 [N, C, D]; ids belong
    to these rounded centroids. Ties go to the lowest index, an empty cluster keeps its centroid,
    means are summed in token order.
    Allocates a BF16-rounded copy of x, the means, and distances of one row block.
    Quant VideoGen (arXiv 2602.02958) Sec. 4, with the rounding stated here.
    """
    module = resolve("kmeans", x.device, backend)
    return module.kmeans(x, centroids, iterations, with_ids)


def gather_centroids(centroids: Tensor, ids: Tensor, *, backend: str | None = None) -> Tensor:
    """The centroid of each token: [N, C, D] and int64 [N, S] give a new [N, S, D]."""
    return resolve("kmeans", ids.device, backend).gather_rows(centroids, ids)
