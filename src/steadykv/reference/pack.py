"""Definition: a word is sum_i code_i·radix^i over the fewest codes that end with a byte.

Radix 2^b makes a row a little-endian bit stream: words of 4 codes in one byte for 2 bits, 8 in
three bytes for 3 bits, 2 in one byte for 4 bits. Trits have radix 3, five of them in one byte.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["pack", "unpack", "word_of"]


def word_of(bits: int, packing: str = "bits") -> tuple[int, int, int]:
    """Radix, codes and bytes of a word."""
    if packing == "trits":
        return 3, 5, 1  # 3^5 = 243 values
    shared = gcd(8, bits)
    return 1 << bits, 8 // shared, bits // shared


def pack(codes: Tensor, bits: int, packing: str = "bits") -> Tensor:
    """See `steadykv.ops.pack`."""
    radix, per_word, nbytes = word_of(bits, packing)
    length = codes.shape[-1]
    missing = -length % per_word
    if missing:
        codes = pad(codes, (0, missing))
    kind = torch.uint8 if nbytes == 1 else torch.int32
    word = codes[..., ::per_word].to(kind, copy=True, memory_format=torch.contiguous_format)
    for slot in range(1, per_word):
        word += codes[..., slot::per_word].to(kind) * radix**slot
    if nbytes == 1:
        return word
    row = -(-length * bits // 8)
    packed = torch.empty(*word.shape[:-1], row, dtype=torch.uint8, device=word.device)
    for at in range(nbytes):
        out = packed[..., at::nbytes]
        out.copy_((word >> (8 * at) & 255)[..., : out.shape[-1]])
    return packed


def unpack(
    packed: Tensor, bits: int, length: int, dtype: torch.dtype = torch.uint8, packing: str = "bits"
) -> Tensor:
    """See `steadykv.ops.pack`."""
    radix, per_word, nbytes = word_of(bits, packing)
    word = packed
    if nbytes > 1:
        packed = pad(packed, (0, -packed.shape[-1] % nbytes))
        word = packed[..., ::nbytes].to(torch.int32)
        for at in range(1, nbytes):
            word += packed[..., at::nbytes].to(torch.int32) << (8 * at)
    codes = torch.empty(*packed.shape[:-1], length, dtype=dtype, device=packed.device)
    for slot in range(min(per_word, length)):
        out = codes[..., slot::per_word]
        rest = word[..., : out.shape[-1]]
        if packing == "trits":
            out.copy_(rest // radix**slot % radix)
        else:  # the same by shifts, which are faster
            out.copy_((rest >> (slot * bits)) & (radix - 1))
    return codes
