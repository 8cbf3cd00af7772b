"""Contract: packed tokens into a dense view. This is the read path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .dispatch import resolve

__all__ = ["decode_clustered", "decode_grouped", "decode_nonuniform"]


def decode_clustered(
    tensors: Mapping[str, Tensor],
    out: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    start: int,
    end: int,
    *,
    packing: str = "bits",
    backend: str | None = None,
) -> None:
    """(mu_1[id] + …) + residual + alpha·(basis·codes) of tokens start..end: FP32 sums, one cast.

    tensors: of a qvg, qvg4 or quantwm payload, [B, H, ...] or sparse coefficients; centroids are
    BF16, or E4M3 times `centroid_scale`. grid, bits, group_size, packing: as in `group_quantize`.
    out: [B, H, end-start, D], float, any strides, on the same device. An FP16 `out` saturates.
    Allocates FP32 row blocks, and FP32 copies of E4M3 centroids; nothing that grows with S.
    """
    module = resolve("decode", out.device, backend)
    module.decode_clustered(tensors, out, grid, bits, group_size, start, end, packing)


def decode_grouped(
    tensors: Mapping[str, Tensor],
    out: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    axis: str,
    start: int,
    end: int,
    *,
    packing: str = "bits",
    rotation: Sequence[int] = (),
    backend: str | None = None,
) -> None:
    """The same for payloads that hold nothing but groups (rtn, kivi, quarot).

    rotation: widths of `hadamard`, which turns the FP32 values back before the cast; empty for
    values in the frame of the host.
    """
    module = resolve("decode", out.device, backend)
    module.decode_grouped(tensors, out, grid, bits, group_size, axis, start, end, packing, rotation)


def decode_nonuniform(
    tensors: Mapping[str, Tensor],
    out: Tensor,
    axis: str,
    bits: int,
    start: int,
    end: int,
    *,
    backend: str | None = None,
) -> None:
    """The same for kvquant payloads; the tokens in `dense` come first."""
    module = resolve("decode", out.device, backend)
    module.decode_nonuniform(tensors, out, axis, bits, start, end)
