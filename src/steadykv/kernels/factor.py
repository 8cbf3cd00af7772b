"""The feedback factor of every head at once, each in the registers of one program, in FP64.

F^T F = inv(H) with F upper triangular needs no inverse: with rows and columns turned round, H is
L D L^T, and F is D^-1/2 L^-1 turned back. One elimination leaves L^-1 where L would stand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on_device, tile_width

__all__ = ["MAX_WIDTH", "factors"]

MAX_WIDTH = 128  # FP64 [D, D] is half of the registers of a multiprocessor


def factors(
    moment: Tensor, count: Tensor, vectors: Tensor, values: Tensor, damping: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`feedback_factor` of `steadykv.ops.feedback_rounding` for D <= MAX_WIDTH.

    F is the reference's up to one rounding to FP32; channels whose H_cc differ by less than 2^-48
    may change places.
    """
    heads, width, _ = moment.shape
    device = moment.device
    order = torch.empty(heads, width, dtype=torch.int64, device=device)
    factor = torch.empty(heads, width, width, dtype=torch.float32, device=device)
    active = torch.empty(heads, dtype=torch.uint8, device=device)
    failed = torch.empty_like(active)
    block = tile_width(width)
    # A number of the host would reach the kernel as FP32.
    ridge = torch.full((), damping, dtype=torch.float64, device=device)
    if heads:
        with on_device(moment):
            _factor_kernel[(heads,)](
                moment.contiguous(),
                count.contiguous(),
                vectors.contiguous(),
                values.contiguous(),
                ridge,
                order,
                factor,
                active,
                failed,
                WIDTH=width,
                RANK=vectors.shape[-1],
                BLOCK_D=block,
                num_warps=16 if block == MAX_WIDTH else 4,
            )
    return order, factor, active, failed


@triton.jit
def _factor_kernel(
    p_moment,
    p_count,
    p_vectors,
    p_values,
    p_ridge,
    p_order,
    p_factor,
    p_active,
    p_failed,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    p_moment += i_n * WIDTH * WIDTH
    p_vectors += i_n * WIDTH * RANK
    p_order += i_n * WIDTH
    o_a = tl.arange(0, BLOCK_D)
    m_a = o_a < WIDTH
    mask = m_a[:, None] & m_a[None, :]
    b_m = tl.load(p_moment + o_a[:, None] * WIDTH + o_a[None, :], mask=mask, other=0.0)
    broken = tl.sum(tl.sum((b_m - b_m != 0).to(tl.int32), 1), 0)
    b_diagonal = tl.load(p_moment + o_a * (WIDTH + 1), mask=m_a, other=0.0).to(tl.float64)
    filled = tl.sum((b_diagonal != 0).to(tl.int32), 0)
    is_wanted = (tl.load(p_count + i_n) > 0) & (filled > 0)
    ridge = tl.load(p_ridge) * (tl.sum(b_diagonal, 0) / WIDTH)

    b_h = b_diagonal + ridge
    for k in range(RANK):
        b_u = tl.load(p_vectors + o_a * RANK + k, mask=m_a, other=0.0).to(tl.float64)
        b_h -= b_u * tl.load(p_values + i_n * RANK + k).to(tl.float64) * b_u
    b_h = tl.where(m_a, b_h, -float("inf"))
    is_before = (b_h[None, :] > b_h[:, None]) | (
        (b_h[None, :] == b_h[:, None]) & (o_a[None, :] < o_a[:, None])
    )
    # With NaN among the channels their places are not distinct, but then none of this is used.
    b_place = tl.minimum(tl.sum(is_before.to(tl.int32), 1), WIDTH - 1)
    tl.store(p_order + o_a, o_a.to(tl.int64), mask=m_a)
    tl.debug_barrier()
    tl.store(p_order + b_place, o_a.to(tl.int64), mask=m_a)
    tl.debug_barrier()

    # Turned round: the last channel in the order comes first; rows beyond D are those of I.
    o_c = tl.load(p_order + (WIDTH - 1 - o_a), mask=m_a, other=0)
    b_a = tl.load(p_moment + o_c[:, None] * WIDTH + o_c[None, :], mask=mask, other=0.0)
    b_a = b_a.to(tl.float64)
    is_diagonal = o_a[:, None] == o_a[None, :]
    b_a += tl.where(is_diagonal, tl.where(m_a, ridge, 1.0)[:, None], 0.0)
    for k in range(RANK):
        b_u = tl.load(p_vectors + o_c * RANK + k, mask=m_a, other=0.0).to(tl.float64)
        b_scaled = b_u * tl.load(p_values + i_n * RANK + k).to(tl.float64)
        b_a -= b_scaled[:, None] * b_u[None, :]
    for k in range(WIDTH):
        is_row, is_column = (o_a == k)[:, None], (o_a == k)[None, :]
        b_row = tl.sum(tl.where(is_row, b_a, 0.0), 0)
        b_column = tl.sum(tl.where(is_column, b_a, 0.0), 1)
        pivot = tl.sum(tl.where(o_a == k, b_column, 0.0), 0)
        b_step = tl.where(o_a > k, b_column / pivot, 0.0)[:, None]
        # Column k of H is used up, and that of the inverse begins.
        b_a = tl.where(is_column & (o_a > k)[:, None], 0.0, b_a)
        b_a -= b_step * tl.where(o_a == k, 1.0, b_row)[None, :]

    b_pivot = tl.sum(tl.where(is_diagonal, b_a, 0.0), 1)
    indefinite = tl.sum((m_a & ((b_pivot > 0) == 0)).to(tl.int32), 0)
    b_root = tl.sqrt(tl.where(b_pivot > 0, b_pivot, 1.0))
    first = tl.sum(tl.where(o_a == WIDTH - 1, 1.0 / b_root, 0.0), 0)
    b_a = tl.where(is_diagonal, 1.0, b_a) / b_root[:, None] * _shift_of(first)
    b_factor = tl.where(o_a[:, None] >= o_a[None, :], b_a, 0.0).to(tl.float32)
    b_lost = mask & (b_factor - b_factor != 0)
    lost = tl.sum(tl.sum(b_lost.to(tl.int32), 1), 0)
    is_active = is_wanted & (broken == 0) & (indefinite == 0) & (lost == 0)
    tl.store(p_active + i_n, is_active.to(tl.uint8))
    tl.store(p_failed + i_n, (is_wanted & (is_active == 0)).to(tl.uint8))
    b_factor = tl.where(is_active, b_factor, is_diagonal.to(tl.float32))
    o_f = (WIDTH - 1 - o_a)[:, None] * WIDTH + (WIDTH - 1 - o_a)[None, :]
    tl.store(p_factor + i_n * WIDTH * WIDTH + o_f, b_factor, mask=mask)
    tl.debug_barrier()
    tl.store(p_order + tl.where(is_active, b_place, o_a), o_a.to(tl.int64), mask=m_a)


@triton.jit
def _shift_of(x):
    """The power of two that brings FP64 x > 0 into [0.5, 1)."""
    exponent = (x.to(tl.int64, bitcast=True) >> 52) - 1022
    return ((1023 - exponent) << 52).to(tl.float64, bitcast=True)
