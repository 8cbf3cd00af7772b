"""Contract: the tokens of some heads, made fit for encoding."""

from __future__ import annotations

from torch import Tensor

from .dispatch import resolve

__all__ = ["head_rows"]


def head_rows(
    x: Tensor, first: int, last: int, *, wide: bool = True, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Heads first..last of the B·H heads of `x`, with zeros where it is NaN or infinite.

    x: FP16, BF16 or FP32 [B, H, S, D], any strides; it is not changed.
    Returns new contiguous [N, S, D], N = last - first, and how many numbers were replaced, int64
    [N], on x's device; the host never waits for the count. The rows are FP32;
    where kernels, which read BF16, do the rest (`wide` off), those of a BF16 `x` stay BF16.
    """
    return resolve("finite", x.device, backend).head_rows(x, first, last, wide)
