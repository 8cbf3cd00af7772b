"""The strongest eigenvectors of query moments, a fixed number of steps and no word to the host.

Subspace iteration on a block of vectors, one program a head, all of it in FP64: two products with
M, then Chebyshev polynomials that are small on [0, b] and grow fast above, b close to the least of
the block's own eigenvalues; after each the block is made orthonormal, and in the end turned to its
eigenvectors by Jacobi rotations (Zhou et al., Chebyshev-filtered subspace iteration, 2006). What
one column of a small matrix tells the others is a gather along rows that a warp holds: shuffles
instead of sums through shared memory.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, kind_of, on_device, power_of_two, shared_memory, tile_width

__all__ = ["can_iterate", "strongest"]

MAX_RANK = 28  # a block of 32 vectors has four to spare
MAX_WIDTH = 256
LARGE_BLOCK_BYTES = 172 << 10  # shared memory of D over 128, or of 32 vectors; else 88 KB


def can_iterate(moment: Tensor, rank: int) -> bool:
    """Whether `strongest` takes this rank and width on this device."""
    width = moment.shape[-1]
    if moment.is_cuda and not _multiplies_doubles(moment.get_device()):
        return False
    is_large = width > 128 or block_of(rank) > 16
    if is_large and shared_memory(moment.device) < LARGE_BLOCK_BYTES:
        return False
    return 0 < rank <= MAX_RANK and block_of(rank) <= width <= MAX_WIDTH


def strongest(moment: Tensor, count: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`query_subspace` of `steadykv.ops.psac`, where `can_iterate`.

    moment: FP32 [N, D, D], positive semidefinite up to rounding. The subspace is off by less than
    1e-4 (sine of the largest angle) where the last eigenvalue kept is 1.3 times the first one
    beyond the block of 16 (rank up to 12) or 32 vectors, and by less than 1e-6 where it is twice
    it; eigenvalues below 1e-6 of the trace are not told apart. Allocates FP64 [N, D, 16 or 32].
    """
    heads, width, _ = moment.shape
    vectors = torch.empty(heads, width, rank, dtype=torch.float32, device=moment.device)
    values = torch.empty(heads, rank, dtype=torch.float32, device=moment.device)
    active = torch.empty(heads, dtype=torch.uint8, device=moment.device)
    failed = torch.empty_like(active)
    block = block_of(rank)
    rows = power_of_two(width)
    scratch = torch.empty(heads, rows, block, dtype=torch.float64, device=moment.device)
    moment, count = moment.contiguous(), count.contiguous()
    sizes = (width, rank, block, rows)
    if heads:
        with on_device(moment):
            _strongest(
                kind_of(moment, count, constants=sizes), (heads, 1, 1),
                moment, count, scratch, vectors, values, active, failed, *sizes,
            )  # fmt: skip
    return vectors, values, active, failed


@cache
def _multiplies_doubles(index: int) -> bool:
    """Triton cannot compile such products of FP64 for compute capability 10."""
    return torch.cuda.get_device_capability(index)[0] != 10


def block_of(rank: int) -> int:
    """How many vectors are iterated: at least four more than are wanted."""
    return tile_width(rank + 4)


@triton.jit
def _strongest_kernel(
    p_moment,
    p_count,
    p_block,
    p_vectors,
    p_values,
    p_active,
    p_failed,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    p_moment += i_n * WIDTH * WIDTH
    p_block += i_n * BLOCK_D * COLUMNS
    o_d = tl.arange(0, BLOCK_D)
    o_r = tl.arange(0, COLUMNS)
    m_d = o_d < WIDTH
    broken = 0
    for first in range(0, WIDTH, 32):
        o_k = first + tl.arange(0, 32)
        mask = m_d[:, None] & (o_k < WIDTH)[None, :]
        b_m = tl.load(p_moment + o_d[:, None] * WIDTH + o_k[None, :], mask=mask, other=0.0)
        broken += tl.sum(tl.sum((b_m - b_m != 0).to(tl.int32), 1), 0)
    b_diagonal = tl.load(p_moment + o_d * (WIDTH + 1), mask=m_d, other=0.0).to(tl.float64)
    trace = tl.where(broken == 0, tl.sum(b_diagonal, 0), 0.0)
    size = tl.where(trace > 0, 1.0 / tl.where(trace > 0, trace, 1.0), 0.0)

    # Fixed numbers without structure, of their place alone: no direction may escape the block.
    b_v, _, _, _ = tl.randint4x(0, o_d[:, None] * COLUMNS + o_r[None, :])
    b_v = b_v.to(tl.int32, bitcast=True).to(tl.float64)
    b_v = tl.where(m_d[:, None], b_v, 0.0)
    for _ in range(2):  # what M maps to zero stays in the block, or it would lose its rank
        b_v += 1e10 * _times(p_moment, p_block, b_v, size, WIDTH, COLUMNS, BLOCK_D)
        b_v = _orthonormal(b_v, BLOCK_D, COLUMNS)
    for _ in range(3):
        b_old = b_v
        b_v = _times(p_moment, p_block, b_v, size, WIDTH, COLUMNS, BLOCK_D)
        # The columns are nearly sorted: the least of these is close to the block's own least.
        bound = tl.maximum(tl.min(tl.sum(b_v * b_old, 0), 0), 1e-6)
        b_v = 2 / bound * b_v - b_old
        for _step in range(5):
            b_next = _times(p_moment, p_block, b_v, size, WIDTH, COLUMNS, BLOCK_D)
            b_next = 4 / bound * b_next - 2 * b_v - b_old
            b_old = b_v
            b_v = b_next
        for _pass in range(2):
            b_v = _orthonormal(b_v, BLOCK_D, COLUMNS)
    b_mv = _times(p_moment, p_block, b_v, size, WIDTH, COLUMNS, BLOCK_D)
    b_t = tl.dot(tl.trans(b_v), b_mv, out_dtype=tl.float64)
    b_v, b_theta = _diagonalized(b_v, b_t, 4, COLUMNS)

    count = tl.load(p_count + i_n)
    b_bad = tl.sum(tl.sum((b_v - b_v != 0).to(tl.int32), 1), 0) + broken
    is_active = (b_bad == 0) & (count > 0)
    tl.store(p_active + i_n, is_active.to(tl.uint8))
    tl.store(p_failed + i_n, ((b_bad != 0) & (count > 0)).to(tl.uint8))
    b_rank = _ranks(b_theta, COLUMNS)
    b_u = b_v.to(tl.float32)
    b_size = tl.where(m_d[:, None], tl.abs(b_u), -1.0)
    is_largest = b_size == tl.max(b_size, 0)[None, :]
    at = tl.min(tl.where(is_largest, o_d[:, None], BLOCK_D), 0)
    b_first = tl.sum(tl.where(o_d[:, None] == at[None, :], b_u, 0.0), 0)
    b_u = tl.where(b_first[None, :] < 0, -b_u, b_u)
    b_u = tl.where(is_active, b_u, 0.0)
    tl.store(
        p_vectors + i_n * WIDTH * RANK + o_d[:, None] * RANK + b_rank[None, :],
        b_u,
        mask=m_d[:, None] & (b_rank < RANK)[None, :],
    )
    b_value = tl.where(is_active, b_theta * trace, 0.0).to(tl.float32)
    tl.store(p_values + i_n * RANK + b_rank, b_value, mask=b_rank < RANK)


@triton.jit
def _times(
    p_moment,
    p_block,
    b_v,
    size,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """size·M V; the block goes through memory, so that rows of it meet columns of M."""
    o_d = tl.arange(0, BLOCK_D)
    o_r = tl.arange(0, COLUMNS)
    tl.store(p_block + o_d[:, None] * COLUMNS + o_r[None, :], b_v)
    tl.debug_barrier()
    b_out = tl.zeros([BLOCK_D, COLUMNS], tl.float64)
    if size > 0:
        for first in range(0, WIDTH, 32):
            o_k = first + tl.arange(0, 32)
            mask = (o_d < WIDTH)[:, None] & (o_k < WIDTH)[None, :]
            b_m = tl.load(p_moment + o_d[:, None] * WIDTH + o_k[None, :], mask=mask, other=0.0)
            o_row = o_k[:, None]
            b_k = tl.load(p_block + o_row * COLUMNS + o_r[None, :], mask=o_row < BLOCK_D, other=0.0)
            b_out = tl.dot(b_m.to(tl.float64), b_k, b_out, out_dtype=tl.float64)
    tl.debug_barrier()
    return b_out * size


@triton.jit
def _orthonormal(b_v, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr):
    """Gram-Schmidt, each column taken from all that follow; columns of zeros stay."""
    o_r = tl.arange(0, COLUMNS)[None, :]
    o_none = tl.full([BLOCK_D, COLUMNS], 0, tl.int32)
    b_v = tl.gather(b_v, o_none + o_r, 1)
    for j in range(COLUMNS):
        b_column = tl.gather(b_v, o_none + j, 1)
        b_share = tl.sum(b_v * b_column, 0)[None, :]
        b_square = tl.sum(tl.where(o_r == j, b_share, 0.0), 1)[:, None]
        b_share = tl.where(o_r > j, b_share / tl.where(b_square > 0, b_square, 1.0), 0.0)
        b_v -= b_column * b_share
    b_norm = tl.sqrt(tl.sum(b_v * b_v, 0))
    return b_v / tl.where(b_norm > 0, b_norm, 1.0)[None, :]


@triton.jit
def _diagonalized(b_v, b_t, SWEEPS: tl.constexpr, COLUMNS: tl.constexpr):
    """The block turned so that its V^T M V, given as `b_t`, is diagonal; and that diagonal.

    No multiply-add may be fused: `b_t` stays symmetric to the bit, and both of a pair turn alike.
    """
    o_i = tl.arange(0, COLUMNS)[:, None]
    o_j = tl.arange(0, COLUMNS)[None, :]
    b_t = (b_t + tl.trans(b_t)) * 0.5
    b_t = tl.gather(b_t, o_j + 0 * o_i, 1)
    b_turn = tl.where(o_i == o_j, 1.0, 0.0).to(tl.float64)
    for step in range(SWEEPS * (COLUMNS - 1)):
        mate = 1 + step % (COLUMNS - 1)  # all pairs (i, i ^ mate) at once
        o_mate = (o_j ^ mate) + 0 * o_i
        b_right = tl.gather(b_t, o_mate, 1)
        b_across = tl.gather(tl.trans(b_right), o_mate, 1)
        b_below = tl.gather(b_across, o_mate, 1)
        # Where j is the mate of i, these are T_ii and T_jj. An angle of FP32 leaves 2^-24 of what
        # is to vanish; only its sine and cosine must fit.
        b_gap = (b_below - b_right).to(tl.float32)
        b_off = 2 * b_t.to(tl.float32)
        b_theta = tl.where(o_i < o_j, b_gap, -b_gap) / tl.where(b_off == 0, 1.0, b_off)
        b_tangent = 1.0 / (tl.abs(b_theta) + tl.sqrt(b_theta * b_theta + 1.0))
        b_tangent = tl.where(b_theta < 0, -b_tangent, b_tangent)
        b_tangent = tl.where(b_off == 0, 0.0, b_tangent)
        b_tangent = tl.where(o_i < o_j, b_tangent, -b_tangent)
        b_left = tl.gather(b_tangent, (o_i ^ mate) + 0 * o_j, 1)  # that of row i
        b_cos_i, b_sin_i = _rotation(b_left)
        b_cos_j, b_sin_j = _rotation(-tl.gather(tl.trans(b_left), o_mate, 1))
        b_own = b_cos_i * b_cos_j * b_t + b_sin_i * b_sin_j * b_across
        b_t = b_own - (b_cos_i * b_sin_j * b_right + b_sin_i * b_cos_j * b_below)
        b_turn = b_cos_j * b_turn - b_sin_j * tl.gather(b_turn, o_mate, 1)
    b_theta = tl.sum(tl.where(o_i == o_j, b_t, 0.0), 0)
    return tl.dot(b_v, b_turn, out_dtype=tl.float64), b_theta


@triton.jit
def _rotation(b_tangent):
    """FP64 cosine and sine for an FP32 tangent."""
    b_cosine = tl.rsqrt(b_tangent * b_tangent + 1.0).to(tl.float64)
    b_tangent = b_tangent.to(tl.float64)
    b_half = 0.5 * (b_tangent * b_tangent) + 0.5
    for _ in tl.static_range(2):  # Newton: right to 2^-22, then 2^-43, then FP64
        b_cosine *= 1.5 - b_half * (b_cosine * b_cosine)
    return b_cosine, b_tangent * b_cosine


@triton.jit
def _ranks(b_theta, COLUMNS: tl.constexpr):
    """The place of each value in descending order."""
    o_i = tl.arange(0, COLUMNS)[:, None]
    o_j = tl.arange(0, COLUMNS)[None, :]
    b_column = tl.sum(tl.where(o_i == o_j, b_theta[None, :], 0.0), 1)[:, None]
    is_before = (b_column > b_theta[None, :]) | ((b_column == b_theta[None, :]) & (o_i < o_j))
    return tl.sum(is_before.to(tl.int32), 0)


_strongest = Launch(_strongest_kernel, 8, enable_fp_fusion=False)
