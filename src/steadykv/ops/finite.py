"""Contract: numbers of a host, made fit for storing and encoding."""

from __future__ import annotations

from torch import Tensor

from .dispatch import resolve

__all__ = ["copy_finite", "count_nonfinite", "head_rows"]


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


def copy_finite(
    source: Tensor, target: Tensor, count: Tensor, *, backend: str | None = None
) -> None:
    """Copies [B, H, S, D] with NaN and Inf as 0, and adds how many there were to `count`.

    source, target: of one float dtype and device, any strides. count: int64 [], on the device.
    The reference allocates one byte per element, the kernel nothing.
    """
    resolve("finite", source.device, backend).copy_finite(source, target, count)


def count_nonfinite(x: Tensor, count: Tensor, *, backend: str | None = None) -> None:
    """Adds the number of NaN and Inf in x [B, H, S, D] to `count`, int64 [] on the device.

    The reference allocates the numbers' bits once more and one byte each, the kernel nothing.
    """
    resolve("finite", x.device, backend).count_nonfinite(x, count)
