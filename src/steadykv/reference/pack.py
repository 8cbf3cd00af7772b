"""Definition: code i sits in byte i div n, from bit (i mod n)·b up; n = 8/b codes a byte."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["pack", "unpack"]


def pack(codes: Tensor, bits: int) -> Tensor:
    """See `steadykv.ops.pack`."""
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    if missing:
        codes = pad(codes, (0, missing))
    packed = codes[..., ::per_byte].clone(memory_format=torch.contiguous_format)
    for slot in range(1, per_byte):
        packed |= codes[..., slot::per_byte] << (slot * bits)
    return packed


def unpack(packed: Tensor, bits: int, length: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """See `steadykv.ops.pack`."""
    per_byte = 8 // bits
    codes = torch.empty(*packed.shape, per_byte, dtype=dtype, device=packed.device)
    for slot in range(per_byte):
        codes[..., slot] = (packed >> (slot * bits)) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :length]
