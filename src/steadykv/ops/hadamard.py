"""Contract: rotation of channels by Hadamard blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .dispatch import resolve

__all__ = ["hadamard"]


def hadamard(x: Tensor, widths: Sequence[int], *, backend: str | None = None) -> Tensor:
    """x·Hd for FP32 [..., D]: a new FP32 [..., D]. Hd is orthonormal and its own inverse.

    Hd is block-diagonal. The channels are cut into `widths`, whose sum is D, and each width into
    Sylvester-Hadamard blocks of n = the largest power of two that divides it: 128 is one block, 80
    five blocks of 16, and odd widths stay as they are. A signed sum of FP32 numbers in any order,
    times FP32(1/sqrt(n)); numbers beyond the largest FP32 over n saturate first, so that no sum
    overflows. Allocates one and a half copies of x. QuaRot (arXiv 2404.00456) Sec. 3.
    """
    return resolve("hadamard", x.device, backend).hadamard(x, widths)
