"""Contract: principal subspace-aware compensation (PSAC)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .dispatch import resolve

__all__ = ["compensate", "compensate_clustered", "query_subspace"]


def query_subspace(
    moment: Tensor, count: Tensor, rank: int, *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The directions in which queries are strongest, U_r, and how strong they are there, L_r.

    moment: FP32 [N, D, D], count: int64 [N], rank <= D.
    Returns the first `rank` eigenvectors as columns, FP32 [N, D, rank], by descending eigenvalue,
    the first largest entry of each positive; their eigenvalues, FP32 [N, rank]; and uint8 [N]
    `active` and `failed`. A head without queries, and one whose moment is not finite or whose
    solver failed, is not active and gets zeros; only the latter counts as failed. The vectors
    rounded to BF16 are the basis that PSAC stores. Solves in FP64, because the moment is nearly
    singular. The reference's solver reports its status to the host: a host sync; the kernel takes a
    fixed number of steps instead.
    QuantWM (arXiv 2609.26425), PSAC.
    """
    module = resolve("psac", moment.device, backend)
    return module.query_subspace(moment, count, rank)


def compensate(
    error: Tensor, basis: Tensor, moment: Tensor, retain: str, *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Stores the part of the key error that queries see best.

    error: FP32 [N, S, D], key minus decoded key. basis: BF16 [N, D, r]. moment: FP32 [N, D, D].
    retain: "row" keeps a row only where it lowers the expected squared logit error e^T M e,
    "always" keeps every row.
    Returns `coef_codes` int8 [N, S, r], `coef_scales` FP16 [N, S] (both zero for rows that are not
    kept) and the number of saturated scales, int64 [N]. Allocates a few [N, S, r] FP32 tensors.
    QuantWM (arXiv 2609.26425), PSAC and App. D.
    """
    module = resolve("psac", error.device, backend)
    return module.compensate(error, basis, moment, retain)


def compensate_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    tensors: Mapping[str, Tensor],
    grid: str,
    bits: int,
    group_size: int,
    basis: Tensor,
    moment: Tensor,
    retain: str,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`compensate` of the error of clustered tokens, x - (mu[id] + rounded residual) in FP32.

    x: FP32 [N, S, D], or BF16 where `head_rows` gives that. centroids: BF16 or FP32 [N, C, D]. ids:
    int64 [N, S]. tensors: what `quantize_clustered` made of the residual on
    `grid`, two to four `bits`. The error need not exist as a tensor.
    """
    module = resolve("psac", x.device, backend)
    return module.compensate_clustered(
        x, centroids, ids, tensors, grid, bits, group_size, basis, moment, retain
    )
