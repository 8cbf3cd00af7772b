"""Contract: replace NaN and Inf."""

from __future__ import annotations

from torch import Tensor

from .dispatch import resolve

__all__ = ["replace_nonfinite"]


def replace_nonfinite(x: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Zeros where `x` is NaN or infinite, and how many there were.

    x: [..., S, D] float. Returns a new tensor of the same shape and dtype, and int64 [...], both on
    x's device. The host never waits for the count.
    """
    return resolve("finite", x.device, backend).replace_nonfinite(x)
