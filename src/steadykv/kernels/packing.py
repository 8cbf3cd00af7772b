"""Kernel: codes of a byte each into rows of trits, or of bits that end within a word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.pack import word_of
from .launch import Launch, blocks, interpreted, on_device, power_of_two

__all__ = ["pack_rows"]

TILE, WARPS = 2048, 4  # bytes and warps of a program
PRODUCT_ROWS, PRODUCT_WIDTH = 64, 512  # of trits packed by a product: rows of a program, most codes


def pack_rows(codes: Tensor, bits: int, packing: str = "bits") -> Tensor:
    """`reference.pack` of uint8 codes [N, S, D], contiguous, below the radix. 1 to 4 bits."""
    heads, tokens, width = codes.shape
    per_word = word_of(bits, packing)[1]
    row = blocks(width, per_word) if packing == "trits" else blocks(width * bits, 8)
    packed = torch.empty(heads, tokens, row, dtype=torch.uint8, device=codes.device)
    padded, channels = power_of_two(row), power_of_two(width)
    constants: tuple[int, ...]
    if packing == "trits" and width <= PRODUCT_WIDTH:
        launch, rows = _pack_trits, PRODUCT_ROWS
        constants = (width, row, max(16, padded), max(16, channels), rows, interpreted())
    else:
        launch, rows = _pack, max(1, TILE // padded)
        constants = (width, row, padded, 0 if packing == "trits" else bits, rows)
    with on_device(codes):
        launch(
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


@triton.jit(do_not_specialize=["rows"])
def _pack_trits_kernel(
    p_codes,
    p_packed,
    rows,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Whole rows times the powers of three of each byte, so that loads are of neighbours.

    Exact: a byte is a sum of 2·81 at most and four smaller ones.
    """
    # Interpreted, a product of BF16 operands takes their bits for numbers.
    OPERAND: tl.constexpr = tl.float32 if INTERPRET else tl.bfloat16
    first = tl.program_id(0).to(tl.int64) * ROWS
    o_row, o_channel, o_byte = tl.arange(0, ROWS), tl.arange(0, CHANNELS), tl.arange(0, PADDED)
    m_row = o_row < rows - first
    codes = tl.load(
        p_codes + first * WIDTH + o_row[:, None] * WIDTH + o_channel[None, :],
        mask=m_row[:, None] & (o_channel[None, :] < WIDTH),
        other=0,
    ).to(OPERAND)
    place = o_channel[:, None] - 5 * o_byte[None, :]
    power = tl.where(place == 4, 81, tl.where(place == 3, 27, tl.where(place == 2, 9, 0)))
    power = tl.where(place == 1, 3, tl.where(place == 0, 1, power))
    word = tl.dot(codes, power.to(OPERAND)).to(tl.int32)
    tl.store(
        p_packed + first * ROW + o_row[:, None] * ROW + o_byte[None, :],
        word.to(tl.uint8),
        mask=m_row[:, None] & (o_byte[None, :] < ROW),
    )


_pack = Launch(_pack_kernel, WARPS)
_pack_trits = Launch(_pack_trits_kernel, WARPS)
