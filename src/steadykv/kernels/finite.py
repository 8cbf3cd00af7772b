"""Kernel: one pass over a host's numbers, which leaves 0 for NaN and infinity and counts them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, blocks, kind_of, on_device, power_of_two
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
    known = (x,) if out is None else (x, out)
    of_x, of_out = x.stride(), strides
    is_aligned = width % 8 == 0 and all(
        s[3] <= 1 and not any(n % 8 for n in s[:3]) for s in (of_x, of_out)
    )
    unit = 8 if is_aligned else 1
    of_x, of_out = ((*(n // unit for n in s[:3]), s[3]) for s in (of_x, of_out))
    constants = (unit, per_head, width, padded, size)
    with on_device(x):
        _clean(
            kind_of(*known, constants=(out is None, *constants)),
            (blocks(tokens, size), heads, 1),
            x, out, count, first, of_row, tokens, *of_x, *of_out, *constants,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "first", "heads", "tokens", "x_b", "x_h", "x_s", "x_d", "out_b", "out_h", "out_s", "out_d",
    ]
)  # fmt: skip
def _clean_kernel(
    x,
    out,
    count,
    first,
    heads,
    tokens,
    x_b: tl.int64,
    x_h: tl.int64,
    x_s: tl.int64,
    x_d: tl.int64,
    out_b: tl.int64,
    out_h: tl.int64,
    out_s: tl.int64,
    out_d: tl.int64,
    UNIT: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """A tile of a head; the number it counts is an integer, in which the order is nothing.

    UNIT: what all strides but the last are counted in; above 1 channels are adjacent. The compiler
    does not see it in a stride, but in a product with it.
    """
    row = first + tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = (token < tokens)[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :]
    p_x = _places(x, batch * x_b + head * x_h, token, x_s, x_d, UNIT, PADDED)
    value = tl.load(p_x, mask=mask, other=0).to(tl.float32)
    if out is not None:
        # Of head_rows the rows of `out` begin with `first`; a batch does not matter there.
        start = batch * out_b + head * out_h
        if PER_HEAD:
            start = tl.program_id(1) * out_h
        p_out = _places(out, start, token, out_s, out_d, UNIT, PADDED)
        tl.store(p_out, finite(value).to(out.dtype.element_ty), mask=mask)
    lost = tl.sum((value - value != 0).to(tl.int32))
    if lost > 0:
        tl.atomic_add(count + tl.program_id(1) * PER_HEAD, lost.to(tl.int64))


@triton.jit
def _places(base, start, token, s_token, s_channel, UNIT: tl.constexpr, PADDED: tl.constexpr):
    channel = tl.arange(0, PADDED)
    row = base + start * UNIT + (token.to(tl.int64) * s_token * UNIT)[:, None]
    if UNIT > 1:
        place = row + channel[None, :]
    else:
        place = row + (channel * s_channel)[None, :]
    return place


_clean = Launch(_clean_kernel, 4)
