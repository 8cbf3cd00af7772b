"""Contract: small integers into bytes and back."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import resolve

__all__ = ["pack", "packed_length", "unpack"]

TRITS_PER_BYTE = 5


def packed_length(length: int, bits: int, packing: str = "bits") -> int:
    """Bytes of a row of `length` codes."""
    return -(-length // TRITS_PER_BYTE) if packing == "trits" else -(-length * bits // 8)


def pack(codes: Tensor, bits: int, packing: str = "bits", *, backend: str | None = None) -> Tensor:
    """uint8 codes [..., L] below 2^bits -> uint8 [..., packed_length(L, bits, packing)].

    packing "bits": each row is a little-endian bit stream, the first code in the lowest bits of the
    first byte; bits is 1 to 4. packing "trits": codes below 3, five a byte, sum_k code_k·3^k
    (1.6 bits a code); bits is not looked at. Codes beyond L are 0.
    """
    return resolve("pack", codes.device, backend).pack(codes, bits, packing)


def unpack(
    packed: Tensor,
    bits: int,
    length: int,
    packing: str = "bits",
    *,
    dtype: torch.dtype = torch.uint8,
    backend: str | None = None,
) -> Tensor:
    """Inverse of `pack`: the first `length` codes of each row, as `dtype`, contiguous."""
    return resolve("pack", packed.device, backend).unpack(packed, bits, length, dtype, packing)
