"""Contract: groups of a token row (or of a channel) onto a small grid."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .dispatch import resolve

__all__ = [
    "GRIDS",
    "group_dequantize",
    "group_quantize",
    "quantize_clustered",
    "refine_clustered",
]

# A grid's name says what is stored beside the codes, too.
GRIDS = ("symmetric", "symmetric_int8", "affine_min", "affine_min_fp8", "affine_zero")


def group_quantize(
    x: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    *,
    axis: str = "channels",
    packing: str = "bits",
    clip_ratio: float = 1.0,
    include_zero: bool = True,
    scale_search: bool = False,
    backend: str | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Quantizes each group of FP32 [N, S, D], S > 0, on its own; the last group may be shorter.

    Returns the packed tensors and the number of metadata values that saturated, int64 [N]. With Q =
    2^bits - 1, Lq = 2^(bits-1) - 1 and G = ceil(D / group_size):
    - "symmetric": `scale` E4M3 [N, S, G], at least 2^-9; value s·q, |q| <= Lq. Quant VideoGen.
    - "symmetric_int8": the same levels with `scale_codes` uint8 [N, S, G] and `scale_base` FP16
      [N], s = base·scale_code.
    - "affine_min": `scale`, `minimum` FP16 [N, S, G], or [N, ceil(S / group_size), D] for axis
      "tokens"; value m + s·q. KIVI (arXiv 2402.02750). The ends of a group are taken times
      clip_ratio (QuaRot, arXiv 2404.00456).
    - "affine_min_fp8": the same with both in E4M3, the scale at least 2^-9. Quant VideoGen's
      asymmetric option.
    - "affine_zero": `scale_codes` uint8 [N, S, G], `scale_base` FP16 [N], `zeros` uint8 [N,
      ceil(S·G·bits/8)]; value s·(q - z), s = base·scale_code. QuantWM (arXiv 2609.26425) eq. 1-2,
      App. D.1.
    All with `codes` uint8 [N, S, packed_length(D, bits, packing)]; packing "trits" is for the three
    levels of a symmetric grid at 2 bits. Codes always use the stored scale. Other arguments than
    the ones named for a grid keep their defaults. Allocates the codes, a byte each, and row blocks
    ("affine_min", "affine_min_fp8": a few FP32 copies of x).

    Only for "affine_zero": without `include_zero` a range is that of the numbers alone, so that the
    zero point, which stays 0 to 2^bits - 1, cuts off most of a group of one sign. `scale_search`
    also tries 0.9, 0.8, 0.7 and 0.6 times the range of each group, with the zero point of each, and
    keeps what leaves the least squared error (ties: the wider); the base is that of the range.
    """
    module = resolve("group_quantize", x.device, backend)
    return module.group_quantize(
        x, grid, bits, group_size, axis, packing, clip_ratio, include_zero, scale_search
    )


def quantize_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    *,
    packing: str = "bits",
    include_zero: bool = True,
    scale_search: bool = False,
    refinement: int = 0,
    backend: str | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """`group_quantize` of what the centroid of each token leaves, x - mu[id] in FP32.

    x: FP32 [N, S, D], or BF16 where `head_rows` gives that. centroids: BF16 or FP32 [N, C, D]. ids:
    int64 [N, S]. With `refinement` also `refinement`, what `refine_clustered` returns. The residual
    need not exist as a tensor.
    """
    module = resolve("group_quantize", x.device, backend)
    return module.quantize_clustered(
        x, centroids, ids, grid, bits, group_size, packing, include_zero, scale_search, refinement
    )


def refine_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    tensors: Mapping[str, Tensor],
    grid: str,
    bits: int,
    group_size: int,
    refinement: int,
    *,
    packing: str = "bits",
    backend: str | None = None,
) -> Tensor:
    """Where in its step each number lies: uint8 [N, S, packed_length(D, refinement)].

    tensors: what `quantize_clustered` made of the same arguments, or any other codes on its grid.
    With v the value of a code and s its stored scale, the step [v - s/2, v + s/2] is cut into
    2^refinement equal parts; what lies outside, where a range was cut off or a scale rounded down,
    gets the nearest part: floor((x - mu[id] - v)·w) + 2^refinement/2 with w = 2^refinement/s in
    FP32. A value is then s·(part + 1/2)/2^refinement - s/2 farther on. 1 to 4 bits.
    Allocates codes, a byte each, and FP32 row blocks.
    """
    module = resolve("group_quantize", x.device, backend)
    return module.refine_clustered(
        x, centroids, ids, tensors, grid, bits, group_size, refinement, packing
    )


def group_dequantize(
    tensors: Mapping[str, Tensor],
    grid: str,
    bits: int,
    group_size: int,
    head_dim: int,
    start: int,
    end: int,
    *,
    axis: str = "channels",
    packing: str = "bits",
    refinement: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Values of the tokens start..end of what `group_quantize` made: new FP32 [N, end-start, D].

    refinement: bits of the `refinement` in `tensors`; 0 leaves it alone.
    """
    module = resolve("group_quantize", tensors["codes"].device, backend)
    return module.group_dequantize(
        tensors, grid, bits, group_size, head_dim, start, end, axis, packing, refinement
    )
