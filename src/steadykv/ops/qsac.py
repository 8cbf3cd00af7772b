"""Contract: quantization- and sensitivity-aware centroid choice (QSAC)."""

from __future__ import annotations

from torch import Tensor

from .dispatch import resolve

__all__ = ["select_centroids"]


def select_centroids(
    x: Tensor,
    centroids: Tensor,
    weight: Tensor | None,
    candidates: int,
    group_size: int,
    *,
    include_zero: bool = True,
    backend: str | None = None,
) -> Tensor:
    """The centroid that leaves each token the cheapest residual to quantize.

    x: FP32 [N, S, D]. centroids: BF16 or FP32 [N, C, D]. weight: FP32 [N, D] channel weights, None
    for all ones. Of the `candidates` centroids nearest in the weighted squared distance (ties:
    lowest index) takes the one whose residual has the least weighted squared group range (ties: the
    nearer one). The range is that of the grid: extended to zero (include_zero) for "affine_zero",
    the group's own for "affine_min_fp8".
    Returns int64 [N, S]. Allocates one row block of [rows, C, D] differences, computed directly.
    QuantWM (arXiv 2609.26425) eq. 9-14.
    """
    module = resolve("qsac", x.device, backend)
    return module.select_centroids(x, centroids, weight, candidates, group_size, include_zero)
