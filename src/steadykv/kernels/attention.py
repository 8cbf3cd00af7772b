"""Kernel: attention by the vendor's kernels, piece by piece, merged by log-sum-exp.

A pass loads the tokens of a few heads into scratch memory and attends to them. Passes over
different heads need no merging, so a pass has as few heads, and as many tokens, as fit the budget;
two lanes (CUDA streams) of passes keep the multiprocessors busy that the last blocks of a pass
leave idle. Where one head alone is too long, its tokens are cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import attention as reference
from ..reference.blocks import Heads, Tokens, head_groups
from .launch import Launch, blocks, on_device, power_of_two
from .passes import Plan, plan
from .vendor import attention as vendor_attention
from .vendor import vendor_for

__all__ = ["attend", "attend_nbytes", "attend_planned", "merge_attention"]


def attend(
    q: Tensor, tokens: Tokens, out: Tensor, scale: float, bias: Tensor | None, budget: int
) -> None:
    """See `steadykv.ops.attention`."""
    vendor = vendor_for(q.device, q.shape[-1], tokens.dtype, bias is not None)
    if vendor is None or q.dtype != tokens.dtype:
        # FP32 caches and head dims that no vendor kernel takes; queries finer than the cache.
        reference.attend(q, tokens, out, scale, bias, budget)
        return
    shape = (q.shape[0], q.shape[1], q.shape[2], q.shape[3])
    attend_planned(q, tokens, out, scale, bias, plan(shape, tokens, q.device, budget), vendor)


def attend_nbytes(
    shape: tuple[int, int, int, int], tokens: Tokens, device: torch.device, budget: int
) -> int:
    """See `steadykv.ops.attention`."""
    if vendor_for(device, shape[-1], tokens.dtype, False) is None:
        return reference.attend_nbytes(shape, tokens, device, budget)
    return plan(shape, tokens, device, budget).nbytes


def attend_planned(
    q: Tensor,
    tokens: Tokens,
    out: Tensor,
    scale: float,
    bias: Tensor | None,
    chosen: Plan,
    vendor: str,
) -> None:
    """`attend` by a given plan and the vendor's kernel of that name."""
    batch, heads, _, width = q.shape
    group = heads // tokens.heads
    merging = Launch(_merge_kernel, MERGE_WARPS)
    with on_device(q), _lanes(q.device, chosen.lanes) as streams:
        size = chosen.heads * chosen.tokens * width
        rooms = [q.new_empty(2, size) for _ in range(chosen.lanes)]
        for number, part in enumerate(head_groups(batch, tokens.heads, chosen.heads)):
            lane = number % chosen.lanes
            if streams:
                torch.cuda.set_stream(streams[lane])
            _attend_part(
                part.of(q, group),
                tokens,
                part,
                part.of(out, group),
                scale,
                None if bias is None else part.of(bias),
                rooms[lane],
                chosen.tokens,
                vendor,
                merging,
            )


def _attend_part(
    q: Tensor,
    tokens: Tokens,
    part: Heads,
    out: Tensor,
    scale: float,
    bias: Tensor | None,
    room: Tensor,
    step: int,
    vendor: str,
    merging: Launch,
) -> None:
    width = q.shape[-1]
    low = lse = None
    for start in range(0, tokens.length, step):
        end = min(start + step, tokens.length)
        if start == 0 or end == tokens.length:  # pieces are alike, but for a shorter last one
            size = (2, part.rows, part.heads, end - start, width)
            count = part.rows * part.heads * (end - start) * width
            k_room, v_room = room.narrow(1, 0, count).view(size).unbind()
        k, v = tokens.load(part, start, end, k_room, v_room)
        part_bias = None if bias is None else bias[:, :, start:end]
        partial, partial_lse = vendor_attention(vendor, q, k, v, part_bias, scale)
        if lse is None:
            out.copy_(partial)
            lse = partial_lse
            continue
        is_first, is_last = low is None, end == tokens.length
        if low is None:
            low = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if torch.compiler.is_compiling():
            merge_attention(out, low, lse, partial, partial_lse, is_first, is_last)
        else:
            _merge(merging, (out, low, lse, partial, partial_lse), is_first, is_last)
        del partial, partial_lse  # or three outputs would be there during the next piece


# --- lanes ------------------------------------------------------------------------------------


@contextmanager
def _lanes(device: torch.device, count: int) -> Iterator[list[torch.cuda.Stream]]:
    """The current stream and others beside it, which start after it and end before it goes on.

    The body may leave any of them current. Empty for a single lane.
    """
    if count == 1:
        yield []
        return
    current = torch.cuda.current_stream(device)
    others = [_side_stream(device, number) for number in range(1, count)]
    for stream in others:
        stream.wait_stream(current)
    try:
        yield [current, *others]
    finally:
        torch.cuda.set_stream(current)
        for stream in others:
            current.wait_stream(stream)


@cache
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# --- merging ----------------------------------------------------------------------------------


# All other strides are multiples of the width, whatever the number of rows.
_RUNTIME = ["rows", "heads", "s_lse_b", "s_lse_h", "s_part_lse_b", "s_part_lse_h"]


MERGE_WARPS = 4


@triton.jit(do_not_specialize=_RUNTIME)
def _merge_kernel(
    p_out,
    p_low,
    p_lse,
    p_part,
    p_part_lse,
    rows,
    heads,
    s_out_b,
    s_out_h,
    s_out_s,
    s_low_b,
    s_low_h,
    s_part_b,
    s_part_h,
    s_part_s,
    s_lse_b,
    s_lse_h,
    s_part_lse_b,
    s_part_lse_h,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    i_head = tl.program_id(1)
    i_b = (i_head // heads).to(tl.int64)
    i_h = (i_head % heads).to(tl.int64)
    o_s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, BLOCK_D)
    m_s = o_s < rows
    m_sd = m_s[:, None] & (o_d < WIDTH)[None, :]
    p_lse += i_b * s_lse_b + i_h * s_lse_h
    b_lse = tl.load(p_lse + o_s, mask=m_s, other=0.0)
    p_part_lse += i_b * s_part_lse_b + i_h * s_part_lse_h
    b_part_lse = tl.load(p_part_lse + o_s, mask=m_s, other=0.0)
    b_top = tl.maximum(b_lse, b_part_lse)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)  # no key in either
    b_old = tl.exp(b_lse - b_top)
    b_new = tl.exp(b_part_lse - b_top)
    b_sum = b_old + b_new
    b_weight = b_new / tl.where(b_sum == 0.0, 1.0, b_sum)
    p_out += i_b * s_out_b + i_h * s_out_h + o_s[:, None] * s_out_s + o_d[None, :]
    p_low += i_b * s_low_b + i_h * s_low_h + o_s[:, None] * WIDTH + o_d[None, :]
    p_part += i_b * s_part_b + i_h * s_part_h + o_s[:, None] * s_part_s + o_d[None, :]
    b_out = tl.load(p_out, mask=m_sd, other=0.0).to(tl.float32)
    if not IS_FIRST:
        b_out += tl.load(p_low, mask=m_sd, other=0.0).to(tl.float32)
    b_part = tl.load(p_part, mask=m_sd, other=0.0).to(tl.float32)
    # What has no weight may be NaN: the mean of no values.
    b_out = tl.where(b_old[:, None] > 0.0, b_out, 0.0)
    b_part = tl.where(b_new[:, None] > 0.0, b_part, 0.0)
    b_out += b_weight[:, None] * (b_part - b_out)
    b_high = b_out.to(p_out.dtype.element_ty)
    tl.store(p_out, b_high, mask=m_sd)
    if not IS_LAST:
        b_low = (b_out - b_high.to(tl.float32)).to(p_low.dtype.element_ty)
        tl.store(p_low, b_low, mask=m_sd)
        tl.store(p_lse + o_s, b_top + tl.log(b_sum), mask=m_s)


def _merge(launch: Launch, tensors: tuple[Tensor, ...], is_first: bool, is_last: bool) -> None:
    """What the operator below does; called by itself it costs the host a fifth of the time.

    launch: of tensors of these dtypes and this width. tensors: its five.
    """
    out, low, lse, part, part_lse = tensors
    batch, heads, rows, width = out.shape
    block_d = power_of_two(width)
    block_s = max(1, 4096 // block_d)
    strides = (
        *out.stride()[:3], *low.stride()[:2], *part.stride()[:3], *lse.stride()[:2],
        *part_lse.stride()[:2],
    )  # fmt: skip
    kind = (*[x.data_ptr() % 16 for x in tensors], strides, is_first, is_last)
    with on_device(out):
        launch(
            kind, (blocks(rows, block_s), batch * heads, 1),
            *tensors, rows, heads, *strides, width, block_d, block_s, is_first, is_last,
        )  # fmt: skip


@torch.library.custom_op(
    "steadykv::merge_attention",
    mutates_args=("out", "low", "lse"),
    schema="(Tensor(a!) out, Tensor(b!) low, Tensor(c!) lse, Tensor part, Tensor part_lse, "
    "bool is_first, bool is_last) -> ()",
)
def merge_attention(
    out: Tensor,
    low: Tensor,
    lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    is_first: bool,
    is_last: bool,
) -> None:
    """Adds the attention `part` to more tokens to `out` + `low`, weighted by their log-sum-exps.

    out, part: [B, H, S, D], rows contiguous. low: contiguous, what rounding left of `out`; read
    unless `is_first`, written unless `is_last`, as is lse, FP32 [B, H, S]. Allocates nothing.
    """
    launch = Launch(_merge_kernel, MERGE_WARPS)
    _merge(launch, (out, low, lse, part, part_lse), is_first, is_last)


@merge_attention.register_fake
def _(
    out: Tensor,
    low: Tensor,
    lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    is_first: bool,
    is_last: bool,
) -> None:
    return None
