"""Contract: vectors on non-uniform levels, with outliers apart. KVQuant (arXiv 2401.18079).

Vectors are [N, R, L], contiguous FP32: N batch rows, each with R = H·D channels of L tokens (axis
"tokens") or R tokens of L = H·D numbers (axis "channels", number h·D + c).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .dispatch import resolve

__all__ = [
    "find_outliers",
    "fit_levels",
    "inlier_range",
    "nonuniform_codes",
    "nonuniform_dequantize",
]


def find_outliers(
    vectors: Tensor, count: int, center: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Places of `count` < L outliers of each vector, `count` even: int64 [N, R, count].

    Without `center`: the count/2 largest, largest first, then the count/2 smallest of the rest,
    smallest first. With a fixed center FP16 [N, R]: the `count` farthest from it, farthest first.
    The lowest place goes first on ties. Allocates blocks of rows. Sec. 3.4.
    """
    return resolve("nonuniform", vectors.device, backend).find_outliers(vectors, count, center)


def inlier_range(
    vectors: Tensor, outliers: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Middle and half width of what is not an outlier: FP16 [N, R] each.

    Also int64 [N, R], how many of the two saturated. Allocates blocks of rows.
    """
    return resolve("nonuniform", vectors.device, backend).inlier_range(vectors, outliers)


def fit_levels(
    vectors: Tensor,
    outliers: Tensor,
    center: Tensor,
    half: Tensor,
    bits: int,
    q_norm: bool,
    weight: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Levels for the inliers of all R vectors together: FP32 and FP16 [N, 2^bits], ascending.

    50 iterations of Lloyd on u = (x - center) / half (0 where half is 0), from evenly spaced
    quantiles, with weight FP64 [N, R] (None: 1) of a vector; a tie goes to the lower level and an
    empty level stays. The first result decides codes. The second is stored: with `q_norm` it is
    moved so that levels taken have mean and deviation of u. Allocates two FP32 copies of vectors
    and blocks of rows. Sec. 3.3 and 3.6.
    """
    module = resolve("nonuniform", vectors.device, backend)
    return module.fit_levels(vectors, outliers, center, half, bits, q_norm, weight)


def nonuniform_codes(
    x: Tensor,
    axis: str,
    outliers: Tensor,
    center: Tensor,
    half: Tensor,
    levels: Tensor,
    bits: int,
    *,
    backend: str | None = None,
) -> Tensor:
    """The level nearest to each number, 0 for outliers, packed: uint8 [N, H, S, ceil(D·bits/8)].

    x: FP32 [N, H, S, D], any strides. The others as above, of the same numbers as vectors along
    `axis`. Allocates one byte a number and blocks of tokens.
    """
    module = resolve("nonuniform", x.device, backend)
    return module.nonuniform_codes(x, axis, outliers, center, half, levels, bits)


def nonuniform_dequantize(
    tensors: Mapping[str, Tensor],
    axis: str,
    bits: int,
    head_dim: int,
    start: int,
    end: int,
    *,
    backend: str | None = None,
) -> Tensor:
    """Tokens start..end, center + half·level or the outlier: new FP32 [B, H, end - start, D].

    tensors: `codes`, `center`, `half`, `outlier_values`, `outlier_index` and `levels` of a kvquant
    payload. Allocates two FP32 copies of the result and the places of all outliers.
    """
    module = resolve("nonuniform", tensors["codes"].device, backend)
    return module.nonuniform_dequantize(tensors, axis, bits, head_dim, start, end)
