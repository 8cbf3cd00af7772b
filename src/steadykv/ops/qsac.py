"""Contract: quantization- and sensitivity-aware centroid choice (QSAC)."""

from __future__ import annotations

from torch import Tensor

from .dispatch import resolve

__all__ = ["query_metric", "select_centroids"]


def query_metric(
    moment: Tensor, count: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """A root W of the query moment: W W^T = M / mean_c M_cc.

    moment: FP32 [N, D, D], count: int64 [N]. Returns FP32 [N, D, D] and uint8 [N], whether it is in
    use; W is the identity for a head without queries, with a zero trace, with a moment that is not
    finite or whose eigenvectors were not found. Solves in FP64 and waits for the solver's status.
    QuantWM (arXiv 2609.26425), table 10.
    """
    module = resolve("qsac", moment.device, backend)
    return module.query_metric(moment, count)


def select_centroids(
    x: Tensor,
    centroids: Tensor,
    weight: Tensor | None,
    candidates: int,
    group_size: int,
    *,
    metric: Tensor | None = None,
    include_zero: bool = True,
    backend: str | None = None,
) -> Tensor:
    """The centroid that leaves each token the cheapest residual to quantize.

    x: FP32 [N, S, D]. centroids: BF16 or FP32 [N, C, D]. weight: FP32 [N, D] channel weights, None
    for all ones. metric: FP32 [N, D, D], as `query_metric` returns it, or None. Of the `candidates`
    centroids nearest in the weighted squared distance, sum_c w_c (k_c - mu_c)^2, or in the full
    one, |W^T (k - mu)|^2 from tokens and centroids multiplied by W (ties: lowest index), takes the
    one whose residual has the least weighted squared group range (ties: the nearer one). The range
    is that of the grid: extended to zero for "affine_zero" unless `include_zero` is off, the
    group's own for "affine_min_fp8".
    Returns int64 [N, S]. Allocates one row block of [rows, C, D] differences, computed directly,
    and with a metric the tokens of one head.
    QuantWM (arXiv 2609.26425) eq. 9-14.
    """
    module = resolve("qsac", x.device, backend)
    return module.select_centroids(
        x, centroids, weight, candidates, group_size, metric, include_zero
    )
