"""Contract: rounding with feedback, aware of what PSAC will correct."""

from __future__ import annotations

from torch import Tensor

from .dispatch import resolve

__all__ = ["feedback_factor", "feedback_quantize", "feedback_quantize_clustered"]


def feedback_factor(
    moment: Tensor,
    count: Tensor,
    vectors: Tensor,
    values: Tensor,
    damping: float,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How the error of one key channel moves the channels that are rounded after it.

    moment: FP32 [N, D, D], count: int64 [N]. vectors, values: FP32 [N, D, r] and [N, r], the pairs
    that PSAC will store, as `query_subspace` returns them; r = 0 subtracts nothing.
    H = M - U_r L_r U_r^T + damping·mean(diag M)·I. Channels go by descending H_cc, lowest index on
    ties; F is upper triangular with F^T F = inv(H) in that order, up to a power of two. Inverse and
    Cholesky factor in FP64, head by head.
    Returns the order, int64 [N, D]; F, FP32 [N, D, D]; and uint8 [N] `active` and `failed`. A head
    without queries or with a zero trace is not active; one whose moment is not finite or whose
    factorisation failed is not active and counts as failed. Either gets the natural order and F =
    I, which is plain rounding. The host never waits for any of it. Allocates a few FP64 [D, D].
    """
    module = resolve("feedback_rounding", moment.device, backend)
    return module.feedback_factor(moment, count, vectors, values, damping)


def feedback_quantize(
    x: Tensor,
    order: Tensor,
    factor: Tensor,
    bits: int,
    group_size: int,
    *,
    include_zero: bool = True,
    backend: str | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """`group_quantize` on grid "affine_zero", one channel after the other.

    x: FP32 [N, S, D], S > 0. order: int64 [N, D], a permutation of the channels. factor: FP32
    [N, D, D], upper triangular. Scale, base and zero point of every group come from x as it is.
    Then, for the channels i in `order`: q_i is the clipped grid value of x_i, err = (x_i - q_i) /
    F_ii, and x_j -= err·F_ij for every later j; no multiply-add is fused.
    Returns the tensors of `group_quantize` and the number of saturated bases, int64 [N]. Tokens are
    independent. Allocates the codes, a byte each, and row blocks.
    """
    module = resolve("feedback_rounding", x.device, backend)
    return module.feedback_quantize(x, order, factor, bits, group_size, include_zero)


def feedback_quantize_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    order: Tensor,
    factor: Tensor,
    bits: int,
    group_size: int,
    *,
    include_zero: bool = True,
    backend: str | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """`feedback_quantize` of what the centroid of each token leaves, x - mu[id] in FP32.

    x: FP32 [N, S, D], or BF16 where `head_rows` gives that. centroids: BF16 or FP32 [N, C, D]. ids:
    int64 [N, S]. The residual need not exist as a tensor.
    """
    module = resolve("feedback_rounding", x.device, backend)
    return module.feedback_quantize_clustered(
        x, centroids, ids, order, factor, bits, group_size, include_zero
    )
