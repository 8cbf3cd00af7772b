"""Contract: small integers into bytes and back."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import resolve

__all__ = ["pack", "packed_length", "unpack"]


def packed_length(length: int, bits: int) -> int:
    """Bytes of a row of `length` codes."""
    return -(-length * bits // 8)


def pack(codes: Tensor, bits: int, *, backend: str | None = None) -> Tensor:
    """uint8 codes [..., L] below 2^bits -> uint8 [..., ceil(L·bits/8)]; bits is 2 or 4.

    The first code sits in the lowest bits; codes beyond L are 0.
    """
    return resolve("pack", codes.device, backend).pack(codes, bits)


def unpack(
    packed: Tensor,
    bits: int,
    length: int,
    *,
    dtype: torch.dtype = torch.uint8,
    backend: str | None = None,
) -> Tensor:
    """Inverse of `pack`: the first `length` codes of each row, as `dtype`."""
    return resolve("pack", packed.device, backend).unpack(packed, bits, length, dtype)
