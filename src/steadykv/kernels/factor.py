"""The feedback factor of every head at once, one program each, in FP64.

F^T F = inv(H) with F upper triangular needs no inverse: with rows and columns turned round, H is
L D L^T, and F is D^-1/2 L^-1 turned back. Blocks of 16 channels are eliminated at once: what 16
steps on a small matrix leave is applied to the rest by matrix products, and L^-1 grows where the
rows of H are used up. The matrix stays in memory that a first-level cache holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, kind_of, on_device, tile_width

__all__ = ["MAX_WIDTH", "factors"]

MAX_WIDTH = 128  # FP64 [D, D] is half of a first-level cache


def factors(
    moment: Tensor, count: Tensor, vectors: Tensor, values: Tensor, damping: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`feedback_factor` of `steadykv.ops.feedback_rounding` for D <= MAX_WIDTH.

    F is the reference's up to one rounding to FP32; channels whose H_cc differ by less than 2^-48
    may change places. Allocates FP64 [N, D, D].
    """
    heads, width, _ = moment.shape
    device = moment.device
    order = torch.empty(heads, width, dtype=torch.int64, device=device)
    factor = torch.empty(heads, width, width, dtype=torch.float32, device=device)
    active = torch.empty(heads, dtype=torch.uint8, device=device)
    failed = torch.empty_like(active)
    block = tile_width(width)
    matrix = torch.empty(heads, block, block, dtype=torch.float64, device=device)
    inputs = tuple(t.contiguous() for t in (moment, count, vectors, values))
    # The damping as a constant, because a number of the host would reach the kernel as FP32.
    constants = (float(damping), width, vectors.shape[-1], block)
    if heads:
        with on_device(moment):
            _factor(
                kind_of(*inputs, constants=constants), (heads, 1, 1),
                *inputs, matrix, order, factor, active, failed, *constants,
            )  # fmt: skip
    return order, factor, active, failed


@triton.jit
def _factor_kernel(
    p_moment,
    p_count,
    p_vectors,
    p_values,
    p_matrix,
    p_order,
    p_factor,
    p_active,
    p_failed,
    DAMPING: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    ROWS: tl.constexpr = 32 if BLOCK_D >= 32 else 16
    i_n = tl.program_id(0).to(tl.int64)
    p_moment += i_n * WIDTH * WIDTH
    p_matrix += i_n * BLOCK_D * BLOCK_D
    p_order += i_n * WIDTH
    p_factor += i_n * WIDTH * WIDTH
    o_a = tl.arange(0, BLOCK_D)
    m_a = o_a < WIDTH
    b_diagonal = tl.load(p_moment + o_a * (WIDTH + 1), mask=m_a, other=0.0).to(tl.float64)
    filled = tl.sum((b_diagonal != 0).to(tl.int32), 0)
    is_wanted = (tl.load(p_count + i_n) > 0) & (filled > 0)
    ridge = (tl.sum(b_diagonal, 0) / WIDTH) * DAMPING
    b_place = _places(p_vectors + i_n * WIDTH * RANK, p_values + i_n * RANK, b_diagonal + ridge,
                      WIDTH, RANK, BLOCK_D)  # fmt: skip
    tl.store(p_order + o_a, o_a.to(tl.int64), mask=m_a)
    tl.debug_barrier()
    tl.store(p_order + b_place, o_a.to(tl.int64), mask=m_a)
    tl.debug_barrier()

    broken = _fill(p_matrix, p_moment, p_vectors + i_n * WIDTH * RANK, p_values + i_n * RANK,
                   p_order, ridge, WIDTH, RANK, BLOCK_D, ROWS)  # fmt: skip
    indefinite = 0
    for first in range(0, BLOCK_D, 16):
        tl.debug_barrier()
        indefinite += _eliminate(p_matrix, first, BLOCK_D, ROWS)
    tl.debug_barrier()

    shift = _shift_of(tl.load(p_matrix + (WIDTH - 1) * (BLOCK_D + 1)))
    b_lost = tl.zeros([ROWS, BLOCK_D], tl.int32)
    for first in range(0, BLOCK_D, ROWS):
        o_r = first + tl.arange(0, ROWS)
        b_a = tl.load(p_matrix + o_r[:, None] * BLOCK_D + o_a[None, :])
        b_factor = tl.where(o_r[:, None] >= o_a[None, :], b_a * shift, 0.0).to(tl.float32)
        b_lost |= (b_factor - b_factor != 0).to(tl.int32)
        o_f = (WIDTH - 1 - o_r)[:, None] * WIDTH + (WIDTH - 1 - o_a)[None, :]
        tl.store(p_factor + o_f, b_factor, mask=(o_r < WIDTH)[:, None] & m_a[None, :])
    lost = tl.sum(tl.sum(b_lost, 1), 0)
    is_active = is_wanted & (broken + indefinite + lost == 0)
    tl.store(p_active + i_n, is_active.to(tl.uint8))
    tl.store(p_failed + i_n, (is_wanted & (is_active == 0)).to(tl.uint8))
    tl.debug_barrier()
    if is_active == 0:
        tl.store(p_order + o_a, o_a.to(tl.int64), mask=m_a)
        for first in range(0, BLOCK_D, ROWS):
            o_r = first + tl.arange(0, ROWS)
            b_eye = (o_r[:, None] == o_a[None, :]).to(tl.float32)
            o_f = o_r[:, None] * WIDTH + o_a[None, :]
            tl.store(p_factor + o_f, b_eye, mask=(o_r < WIDTH)[:, None] & m_a[None, :])


@triton.jit
def _places(
    p_vectors, p_values, b_h, WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The place of each channel by descending H_cc; `b_h`: the diagonal without the vectors."""
    o_a = tl.arange(0, BLOCK_D)
    for k in range(RANK):
        b_u = tl.load(p_vectors + o_a * RANK + k, mask=o_a < WIDTH, other=0.0).to(tl.float64)
        b_h -= b_u * tl.load(p_values + k).to(tl.float64) * b_u
    b_h = tl.where(o_a < WIDTH, b_h, -float("inf"))
    is_before = (b_h[None, :] > b_h[:, None]) | (
        (b_h[None, :] == b_h[:, None]) & (o_a[None, :] < o_a[:, None])
    )
    # With NaN among the channels their places are not distinct, but then none of this is used.
    return tl.minimum(tl.sum(is_before.to(tl.int32), 1), WIDTH - 1)


@triton.jit
def _fill(
    p_matrix,
    p_moment,
    p_vectors,
    p_values,
    p_order,
    ridge,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """H turned round, the last channel in the order first, with rows of I beyond D.

    And how many numbers of the moment are not finite.
    """
    o_a = tl.arange(0, BLOCK_D)
    m_a = o_a < WIDTH
    o_c = tl.load(p_order + (WIDTH - 1 - o_a), mask=m_a, other=0)
    b_broken = tl.zeros([ROWS, BLOCK_D], tl.int32)
    for first in range(0, BLOCK_D, ROWS):
        o_r = first + tl.arange(0, ROWS)
        m_r = o_r < WIDTH
        mask = m_r[:, None] & m_a[None, :]
        # Every number is seen, whatever the order.
        b_m = tl.load(p_moment + o_r[:, None] * WIDTH + o_a[None, :], mask=mask, other=0.0)
        b_broken += (b_m - b_m != 0).to(tl.int32)
        o_i = tl.load(p_order + (WIDTH - 1 - o_r), mask=m_r, other=0)
        b_m = tl.load(p_moment + o_i[:, None] * WIDTH + o_c[None, :], mask=mask, other=0.0)
        b_own = tl.where(o_r < WIDTH, ridge, 1.0)[:, None]
        b_a = b_m.to(tl.float64) + tl.where(o_r[:, None] == o_a[None, :], b_own, 0.0)
        for k in range(RANK):
            b_u = tl.load(p_vectors + o_i * RANK + k, mask=m_r, other=0.0).to(tl.float64)
            b_v = tl.load(p_vectors + o_c * RANK + k, mask=m_a, other=0.0).to(tl.float64)
            b_u *= tl.load(p_values + k).to(tl.float64)
            b_a -= b_u[:, None] * b_v[None, :]
        tl.store(p_matrix + o_r[:, None] * BLOCK_D + o_a[None, :], b_a)
    return tl.sum(tl.sum(b_broken, 1), 0)


@triton.jit
def _eliminate(p_matrix, first, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """Rows `first` to `first` + 15 become those of D^-1/2 L^-1, and all below are rid of them.

    Right of the diagonal they keep P = D^-1/2 L^-1 H, whose P^T P the others lose. Returns how many
    pivots are not above zero.
    """
    o_a = tl.arange(0, BLOCK_D)
    o_k = tl.arange(0, 16)
    o_i, o_j = o_k[:, None], o_k[None, :]
    b_s = tl.load(p_matrix + (first + o_i) * BLOCK_D + first + o_j)
    b_t = tl.zeros([16, 16], tl.float64)
    # The symmetric sweep: row k of what is swept so far is that of -L^-1, and its pivot.
    for k in range(16):
        o_none = tl.full([16, 16], 0, tl.int32)
        b_column = tl.gather(b_s, o_none + k, 1)
        b_row = tl.gather(tl.trans(b_column), o_none + o_j, 1)
        b_pivot = tl.gather(b_row, o_none + k, 1)
        b_t = tl.where(o_i == k, tl.where(o_j < k, -b_row, b_pivot), b_t)
        b_row = b_row / b_pivot
        b_s = tl.where(o_i == k, b_row, b_s - b_column * b_row)
        b_s = tl.where(o_j == k, b_column / b_pivot, b_s)
    b_pivot = tl.sum(tl.where(o_i == o_j, b_t, 0.0), 1)
    b_root = tl.sqrt(tl.where(b_pivot > 0, b_pivot, 1.0))[:, None]
    b_t = tl.where(o_i >= o_j, tl.where(o_i == o_j, 1.0, b_t) / b_root, 0.0)

    o_row = (first + o_i) * BLOCK_D + o_a[None, :]
    b_row = tl.load(p_matrix + o_row)
    is_own = (o_a[None, :] >= first) & (o_a[None, :] < first + 16)
    b_row = tl.where(is_own, (o_a[None, :] == first + o_i).to(tl.float64), b_row)
    b_row = tl.dot(b_t, b_row, out_dtype=tl.float64)
    tl.debug_barrier()
    tl.store(p_matrix + o_row, b_row)
    tl.debug_barrier()
    for start in range((first + 16) // ROWS * ROWS, BLOCK_D, ROWS):
        o_r = start + tl.arange(0, ROWS)
        is_below = (o_r >= first + 16)[:, None]
        b_step = tl.load(
            p_matrix + (first + o_j) * BLOCK_D + o_r[:, None], mask=is_below, other=0.0
        )
        o_at = o_r[:, None] * BLOCK_D + o_a[None, :]
        b_a = tl.where(is_own & is_below, 0.0, tl.load(p_matrix + o_at))
        tl.store(p_matrix + o_at, b_a - tl.dot(b_step, b_row, out_dtype=tl.float64))
    return tl.sum((b_pivot > 0).to(tl.int32) ^ 1, 0)


@triton.jit
def _shift_of(x):
    """The power of two that brings FP64 x > 0 into [0.5, 1)."""
    exponent = (x.to(tl.int64, bitcast=True) >> 52) - 1022
    return ((1023 - exponent) << 52).to(tl.float64, bitcast=True)


_factor = Launch(_factor_kernel, 8)
