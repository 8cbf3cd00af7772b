"""Kernel: codes of a byte each into rows of trits, or of bits that end within a word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.pack import word_of
from .launch import Launch, blocks, on_device, power_of_two

__all__ = ["pack_rows"]

TILE, WARPS = 2048, 4  # bytes and warps of a program


def pack_rows(codes: Tensor, bits: int, packing: str = "bits") -> Tensor:
    """`reference.pack` of uint8 codes [N, S, D], contiguous, below the radix. 1 to 4 bits."""
    heads, tokens, width = codes.shape
    per_word = word_of(bits, packing)[1]
    row = blocks(width, per_word) if packing == "trits" else blocks(width * bits, 8)
    packed = torch.empty(heads, tokens, row, dtype=torch.uint8, device=codes.device)
    padded = power_of_two(row)
    rows = max(1, TILE // padded)
    constants = (width, row, padded, 0 if packing == "trits" else bits, rows)
    with on_device(codes):
        _pack(
            (codes.get_device(), constants), (blocks(heads * tokens, rows), 1, 1),
            codes, packed, heads * tokens, *constants,
        )  # fmt: skip
    return packed


@triton.jit(do_not_specialize=["rows"])
def _pack_kernel(
    p_codes,
    p_packed,
    rows,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """BITS: 0 for trits. A program has ROWS rows of ROW bytes."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    o_row, o_byte = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    mask = (o_row < rows - first) & (o_byte < ROW)
    p_row = p_codes + first * WIDTH + o_row * WIDTH
    word = tl.zeros([ROWS, PADDED], tl.int32)
    if BITS == 0:
        for slot in tl.static_range(5):
            channel = 5 * o_byte + (4 - slot)
            code = tl.load(p_row + channel, mask=mask & (channel < WIDTH), other=0)
            word = 3 * word + code.to(tl.int32)
    else:
        start = 8 * o_byte // BITS  # the code that the byte begins in
        for slot in tl.static_range((8 + 2 * BITS - 2) // BITS):
            channel = start + slot
            code = tl.load(p_row + channel, mask=mask & (channel < WIDTH), other=0)
            # Of the first code, the bits that are left: its place may be negative.
            place = channel * BITS - 8 * o_byte + BITS
            word |= (code.to(tl.int32) << place) >> BITS
    tl.store(p_packed + first * ROW + o_row * ROW + o_byte, word.to(tl.uint8), mask=mask)


_pack = Launch(_pack_kernel, WARPS)
