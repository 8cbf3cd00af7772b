"""Kernel: one pass over a host's numbers, which leaves 0 for NaN and infinity and counts them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import blocks, on_device, power_of_two
from .numbers import finite

__all__ = ["copy_finite", "count_nonfinite", "head_rows"]

BLOCK = 4096  # numbers of one program, at least one token


def head_rows(x: Tensor, first: int, last: int, wide: bool = True) -> tuple[Tensor, Tensor]:
    """See `steadykv.ops.finite`."""
    heads = last - first
    kind = torch.bfloat16 if x.dtype == torch.bfloat16 and not wide else torch.float32
    rows = torch.empty(heads, *x.shape[2:], dtype=kind, device=x.device)
    count = torch.zeros(heads, dtype=torch.int64, device=x.device)
    _launch(x, rows, (0, *rows.stride()), count, 1, first, heads)
    return rows, count


def copy_finite(source: Tensor, target: Tensor, count: Tensor) -> None:
    """See `steadykv.ops.finite`."""
    heads = source.shape[0] * source.shape[1]
    _launch(source, target, target.stride(), count, 0, 0, heads)


def count_nonfinite(x: Tensor, count: Tensor) -> None:
    """See `steadykv.ops.finite`."""
    _launch(x, None, (0, 0, 0, 0), count, 0, 0, x.shape[0] * x.shape[1])


def _launch(
    x: Tensor,
    out: Tensor | None,
    strides: tuple[int, ...],
    count: Tensor,
    per_head: int,
    first: int,
    heads: int,
) -> None:
    _, of_row, tokens, width = x.shape
    if not heads * tokens:
        return
    padded = power_of_two(width)
    size = max(1, BLOCK // padded)
    with on_device(x):
        _clean[blocks(tokens, size), heads](
            x, out, count, first, of_row, tokens, *x.stride(), *strides, per_head,
            width, padded, size, num_warps=4,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["first", "heads", "tokens", "x_b", "x_h", "out_b", "out_h"],
)
def _clean(
    x,
    out,
    count,
    first,
    heads,
    tokens,
    x_b: tl.int64,
    x_h: tl.int64,
    x_s,
    x_d,
    out_b: tl.int64,
    out_h: tl.int64,
    out_s,
    out_d,
    PER_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """A tile of a head; the number it counts is an integer, in which the order is nothing."""
    row = first + tl.program_id(1)
    batch, head = row // heads, row % heads
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, PADDED)
    mask = (token < tokens)[:, None] & (channel < WIDTH)[None, :]
    token = token.to(tl.int64)
    p_x = x + batch * x_b + head * x_h + (token * x_s)[:, None] + (channel * x_d)[None, :]
    value = tl.load(p_x, mask=mask, other=0).to(tl.float32)
    if out is not None:
        # Of head_rows the rows of `out` begin with `first`; a batch does not matter there.
        to_row = tl.program_id(1) * out_h if PER_HEAD else batch * out_b + head * out_h
        p_out = out + to_row + (token * out_s)[:, None] + (channel * out_d)[None, :]
        tl.store(p_out, finite(value).to(out.dtype.element_ty), mask=mask)
    lost = tl.sum((value - value != 0).to(tl.int32))
    if lost > 0:
        tl.atomic_add(count + tl.program_id(1) * PER_HEAD, lost.to(tl.int64))
