"""Kernel: attention by the vendor's kernels, piece by piece, merged by log-sum-exp.

A pass loads the tokens of a few heads into scratch memory and attends to them. Passes over
different heads need no merging, so a pass has as few heads, and as many tokens, as fit the budget;
two lanes (CUDA streams) of passes keep the multiprocessors busy that the last blocks of a pass
leave idle. Where one head alone is too long, its tokens are cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import attention as reference
from ..reference.blocks import Heads, Load, head_groups
from .launch import blocks, on_device, processors

__all__ = ["Plan", "attend", "attend_nbytes", "attend_planned", "merge_attention", "plan"]

# What a plan's time is estimated by, measured on one H200 of 132 multiprocessors: the matrix rate
# of the vendor's attention, its rows a block, the copy rate, and what a pass takes the host.
FLOPS = 650e12 / 132
BLOCK_ROWS = 128
BYTES = 4.2e12 / 132
PASS_SECONDS = 100e-6

# The bias of a key that is to get no weight. Of a piece without any other key, kernels return NaN,
# infinity or 0 as the log-sum-exp, each its own.
REMOVED = -30000.0

LEAST_TOKENS = 256  # of a piece
ROUND_TOKENS = 128  # a piece is a multiple of it, so that few shapes occur


class Plan(NamedTuple):
    """KV heads of a pass, tokens of a piece, lanes side by side, and the bytes all that takes."""

    heads: int
    tokens: int
    lanes: int
    nbytes: int


def attend(
    q: Tensor,
    load: Load,
    tokens: int,
    kv_heads: int,
    out: Tensor,
    dtype: torch.dtype,
    scale: float,
    bias: Tensor | None,
    budget: int,
    can_split: bool,
) -> None:
    """See `steadykv.ops.attention`."""
    vendor = _vendor(q.device, q.shape[-1], dtype, bias is not None)
    if vendor is None or q.dtype != dtype:
        # FP32 caches and head dims that no vendor kernel takes; queries finer than the cache.
        reference.attend(q, load, tokens, kv_heads, out, dtype, scale, bias, budget, can_split)
        return
    shape = (q.shape[0], q.shape[1], q.shape[2], q.shape[3])
    chosen = plan(shape, tokens, kv_heads, dtype.itemsize, q.device, budget, can_split)
    attend_planned(q, load, tokens, kv_heads, out, scale, bias, chosen, vendor)


def attend_nbytes(
    shape: tuple[int, int, int, int],
    tokens: int,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    budget: int,
    can_split: bool,
) -> int:
    """See `steadykv.ops.attention`."""
    if _vendor(device, shape[-1], dtype, False) is None:
        return reference.attend_nbytes(shape, tokens, kv_heads, dtype, device, budget, can_split)
    return plan(shape, tokens, kv_heads, dtype.itemsize, device, budget, can_split).nbytes


def plan(
    shape: tuple[int, int, int, int],
    tokens: int,
    kv_heads: int,
    itemsize: int,
    device: torch.device,
    budget: int,
    can_split: bool,
) -> Plan:
    """The passes over queries of `shape` [B, n·H, S, D] that are estimated to be fastest."""
    lanes = 1 if device.type != "cuda" or torch.compiler.is_compiling() else 2
    return _plan(shape, tokens, kv_heads, itemsize, processors(device), budget, can_split, lanes)


@lru_cache(maxsize=256)
def _plan(
    shape: tuple[int, int, int, int],
    tokens: int,
    kv_heads: int,
    itemsize: int,
    multiprocessors: int,
    budget: int,
    can_split: bool,
    most_lanes: int,
) -> Plan:
    batch, query_heads, rows, width = shape
    group, every = query_heads // kv_heads, batch * kv_heads
    sizes = [*range(1, kv_heads + 1), *range(2 * kv_heads, every + 1, kv_heads)]
    head_scratch = 2 * width * itemsize  # of one token

    def outputs(heads: int, merges: bool) -> int:
        """One partial output and its log-sum-exp; merged ones also have low halves."""
        partial = heads * group * rows * (width * itemsize + 4)
        return 2 * partial if merges else partial

    best, least = None, 0.0
    for lanes in range(1, most_lanes + 1):
        for heads in sizes if can_split else [every]:
            passes = -(-every // heads)
            if lanes > passes:
                continue
            room = budget // lanes
            length = (room - outputs(heads, False)) // (heads * head_scratch)
            if length < tokens:
                length = (room - outputs(heads, True)) // (heads * head_scratch)
                pieces = -(-tokens // max(1, length - ROUND_TOKENS))
                length = -(-tokens // (pieces * ROUND_TOKENS)) * ROUND_TOKENS
            length = min(length, tokens)
            if length < min(tokens, LEAST_TOKENS):
                continue
            pieces = -(-tokens // length)
            nbytes = lanes * (heads * head_scratch * length + outputs(heads, pieces > 1))
            if nbytes > budget:
                continue
            filled = -(-rows // BLOCK_ROWS) * group * heads / multiprocessors
            if lanes == 1:
                waves = pieces * passes * -(-filled // 1)
            else:
                waves = pieces * passes * filled / min(1.0, lanes * filled) + 0.5
            attention = waves * 4 * BLOCK_ROWS * length * width / FLOPS
            partial = passes * heads * group * rows * width * itemsize
            merging = partial * (2 + 5 * (pieces - 1)) / (BYTES * multiprocessors)
            seconds = max(attention + merging, passes * pieces * PASS_SECONDS)
            if best is None or seconds < least:
                best, least = Plan(heads, length, lanes, nbytes), seconds
    if best is not None:
        return best
    heads, length = (1 if can_split else every), min(tokens, LEAST_TOKENS)
    nbytes = heads * head_scratch * length + outputs(heads, length < tokens)
    return Plan(heads, length, 1, nbytes)


def attend_planned(
    q: Tensor,
    load: Load,
    tokens: int,
    kv_heads: int,
    out: Tensor,
    scale: float,
    bias: Tensor | None,
    chosen: Plan,
    vendor: str,
) -> None:
    """`attend` by a given plan and the vendor's kernel of that name."""
    batch, heads, _, width = q.shape
    group = heads // kv_heads
    with on_device(q), _lanes(q.device, chosen.lanes) as streams:
        size = chosen.heads * chosen.tokens * width
        rooms = [q.new_empty(2, size) for _ in streams]
        for number, part in enumerate(head_groups(batch, kv_heads, chosen.heads)):
            lane = number % len(streams)
            with _on(streams[lane]):
                _attend_part(
                    part.of(q, group),
                    load,
                    part,
                    tokens,
                    part.of(out, group),
                    scale,
                    None if bias is None else part.of(bias),
                    rooms[lane],
                    chosen.tokens,
                    vendor,
                )


def _attend_part(
    q: Tensor,
    load: Load,
    part: Heads,
    tokens: int,
    out: Tensor,
    scale: float,
    bias: Tensor | None,
    room: Tensor,
    step: int,
    vendor: str,
) -> None:
    width = q.shape[-1]
    low = lse = None
    for start in range(0, tokens, step):
        end = min(start + step, tokens)
        size = (part.rows, part.heads, end - start, width)
        count = part.rows * part.heads * (end - start) * width
        k, v = load(part, start, end, room[0, :count].view(size), room[1, :count].view(size))
        part_bias = None if bias is None else bias[:, :, start:end]
        partial, partial_lse = _ATTENTION[vendor](q, k, v, part_bias, scale)
        if lse is None:
            out.copy_(partial)
            lse = partial_lse
            continue
        is_first, is_last = low is None, end == tokens
        if low is None:
            low = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        merge_attention(out, low, lse, partial, partial_lse, is_first, is_last)


# --- the vendor's kernels: (output, log-sum-exp FP32 [B, H, S]) -------------------------------


def _vendor(device: torch.device, width: int, dtype: torch.dtype, has_bias: bool) -> str | None:
    """Which of them runs, from static facts alone."""
    if device.type == "cpu":  # where kernels are interpreted
        return "cpu"
    if dtype not in (torch.bfloat16, torch.float16) or width % 8 or width > 256:
        return None
    if has_bias:
        return "efficient"
    # cuDNN 9 is the faster one from Hopper on: 4.3 ms against 7.3 for 32 heads of 4,680 queries and
    # 34,320 keys. It takes head dims up to 128 everywhere.
    return "cudnn" if width <= 128 and _has_cudnn(device.index) else "flash"


@cache
def _has_cudnn(index: int | None) -> bool:
    return (
        torch.cuda.get_device_capability(index) >= (9, 0)
        and torch.backends.cudnn.is_available()
        and (torch.backends.cudnn.version() or 0) >= 90000
    )


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, False, False, scale=scale
    )
    return found[0], found[1].reshape(q.shape[:3])


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, False, False, scale=scale
    )
    return found[0], found[1]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    folded, mask = _folded(q, k, bias)
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
        folded, k, v, mask, True, 0.0, False, scale=scale
    )[:2]
    # Its log-sum-exp is padded to whole blocks of queries.
    return out.reshape(q.shape), lse[:, :, : folded.shape[2]].reshape(q.shape[:3])


def _cpu(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    folded, mask = _folded(q, k, bias)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


_ATTENTION = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "cpu": _cpu}


def _folded(q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The query heads of a KV head as more queries of one head, and the bias as their mask."""
    rows, heads, tokens, width = k.shape
    folded = q.reshape(rows, heads, -1, width)
    if bias is None:
        return folded, None
    # Strides that are multiples of 16, which the kernels load by.
    padded = q.new_empty(rows, heads, 1, -(-tokens // 16) * 16)[..., :tokens]
    padded.copy_(bias[:, :, None].clamp(min=REMOVED))
    return folded, padded.expand(-1, -1, folded.shape[2], -1)


# --- lanes ------------------------------------------------------------------------------------


@contextmanager
def _lanes(device: torch.device, count: int) -> Iterator[list[torch.cuda.Stream | None]]:
    """The current stream and others beside it, which start after it and end before it goes on."""
    if count == 1:
        yield [None]
        return
    current = torch.cuda.current_stream(device)
    others = [_side_stream(device, number) for number in range(1, count)]
    for stream in others:
        stream.wait_stream(current)
    try:
        yield [None, *others]
    finally:
        for stream in others:
            current.wait_stream(stream)


@cache
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield


# --- merging ----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "heads"])
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
    batch, heads, rows, width = out.shape
    block_d = triton.next_power_of_2(width)
    block_s = max(1, 4096 // block_d)
    with on_device(out):
        _merge_kernel[(blocks(rows, block_s), batch * heads)](
            out,
            low,
            lse,
            part,
            part_lse,
            rows,
            heads,
            *out.stride()[:3],
            *low.stride()[:2],
            *part.stride()[:3],
            *lse.stride()[:2],
            *part_lse.stride()[:2],
            WIDTH=width,
            BLOCK_D=block_d,
            BLOCK_S=block_s,
            IS_FIRST=is_first,
            IS_LAST=is_last,
            num_warps=4,
        )


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
