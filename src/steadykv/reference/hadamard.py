"""Definition: (-1)^popcount(i & j) / sqrt(n) at i, j of a block of n, summed in pairs (QuaRot)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["hadamard"]

FP32_MAX = torch.finfo(torch.float32).max


def hadamard(x: Tensor, widths: Sequence[int]) -> Tensor:
    """See `steadykv.ops.hadamard`."""
    out = torch.empty_like(x)
    for part, y in zip(x.split(list(widths), -1), out.split(list(widths), -1), strict=True):
        size = y.shape[-1] & -y.shape[-1]  # the largest power of two that divides the width
        torch.clamp(part, -FP32_MAX / size, FP32_MAX / size, out=y)
        step = 1
        while step < size:
            _butterfly(*y.unflatten(-1, (-1, 2, step)).unbind(-2))
            step *= 2
        y.mul_(size**-0.5)
    return out


def _butterfly(low: Tensor, high: Tensor) -> None:
    """(low, high) becomes (low + high, low - high)."""
    total = low + high
    torch.sub(low, high, out=high)
    low.copy_(total)
