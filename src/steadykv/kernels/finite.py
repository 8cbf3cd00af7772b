"""Kernel: contiguous, finite rows of some heads, in the dtype in which the others read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import blocks, on_device
from .numbers import finite

__all__ = ["head_rows"]

BLOCK = 4096  # numbers of one program


def head_rows(x: Tensor, first: int, last: int, wide: bool = True) -> tuple[Tensor, Tensor]:
    """See `steadykv.ops.finite`."""
    _, heads, tokens, width = x.shape
    kind = torch.bfloat16 if x.dtype == torch.bfloat16 and not wide else torch.float32
    rows = torch.empty(last - first, tokens, width, dtype=kind, device=x.device)
    programs = blocks(tokens * width, BLOCK)
    bad = torch.empty(last - first, programs, dtype=torch.int32, device=x.device)
    with on_device(x):
        _clean[programs, last - first](
            x, rows, bad, first, heads, tokens, *x.stride(), width, BLOCK
        )
    return rows, bad.sum(1, dtype=torch.int64)


@triton.jit(do_not_specialize=["first", "tokens", "stride_b", "stride_h"])
def _clean(
    x,
    rows,
    bad,
    first,
    heads,
    tokens,
    stride_b,
    stride_h,
    stride_s,
    stride_d,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    source = (first + head) // heads * stride_b + (first + head) % heads * stride_h
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, channel = (at // WIDTH).to(tl.int64), at % WIDTH
    inside = token < tokens
    value = tl.load(x + source + token * stride_s + channel * stride_d, mask=inside, other=0)
    wide = value.to(tl.float32)
    tl.store(rows + head * tokens * WIDTH + at, finite(wide).to(rows.dtype.element_ty), mask=inside)
    lost = tl.sum((wide - wide != 0).to(tl.int32))
    tl.store(bad + head * tl.num_programs(0) + tl.program_id(0), lost)
