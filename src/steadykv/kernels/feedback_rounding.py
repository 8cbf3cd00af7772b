"""Feedback rounding: one thread keeps its tokens, and channels go by in order.

Residuals have been turned into rows of one channel of a tile of tokens. A warp takes blocks of
channels into registers, moves them by every error made before, and rounds one channel after the
other; the errors take the place of the residuals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import feedback_rounding as reference
from ..reference.blocks import FP16_MAX as _FP16_MAX
from .factor import MAX_WIDTH, factors
from .feedback_tiles import plan_kernel, turn_kernel
from .launch import Launch, blocks, interpreted, kind_of, on_device, power_of_two
from .numbers import nearest
from .streams import store_codes, store_zeros

__all__ = ["feedback_factor", "feedback_quantize", "feedback_quantize_clustered"]

FP16_MAX = tl.constexpr(_FP16_MAX)
MAGIC = tl.constexpr(12582912.0)  # 1.5·2^23: added to a number, it leaves the nearest integer
BLOCK_S = 128  # four tokens a lane of one warp
CHANNELS = 16  # of a block: their residuals are four registers each
MAXNREG = 128  # sixteen warps a multiprocessor: faster than 12 of 168, and 8 of 255
TURN_WARPS = 8


def feedback_factor(
    moment: Tensor, count: Tensor, vectors: Tensor, values: Tensor, damping: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `steadykv.ops.feedback_rounding`."""
    if moment.shape[-1] > MAX_WIDTH:  # FP64 [D, D] would not fit a first-level cache
        return reference.feedback_factor(moment, count, vectors, values, damping)
    return factors(moment, count, vectors, values, damping)


def feedback_quantize(
    x: Tensor,
    order: Tensor,
    factor: Tensor,
    bits: int,
    group_size: int,
    include_zero: bool = True,
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.feedback_rounding`."""
    return _quantize(x, None, None, order, factor, bits, group_size, include_zero)


def feedback_quantize_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    order: Tensor,
    factor: Tensor,
    bits: int,
    group_size: int,
    include_zero: bool = True,
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.feedback_rounding`."""
    centroids, ids = centroids.contiguous(), ids.contiguous()
    return _quantize(x, centroids, ids, order, factor, bits, group_size, include_zero)


def _quantize(
    x: Tensor,
    centroids: Tensor | None,
    ids: Tensor | None,
    order: Tensor,
    factor: Tensor,
    bits: int,
    group_size: int,
    include_zero: bool,
) -> tuple[dict[str, Tensor], Tensor]:
    """Every operation is that of the reference, rounded as there: the same bits.

    Allocates what it returns and, of each token in whole tiles, 5·D + 16·G bytes.
    """
    heads, tokens, width = x.shape
    device, group_size = x.device, min(group_size, width)
    groups, tiles = blocks(width, group_size), blocks(tokens, BLOCK_S)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    back = empty(heads, width, dtype=torch.int32)
    group = empty(heads, width, dtype=torch.int32)
    plan = empty(heads, width, 3, dtype=torch.float32)
    rest = empty(heads, tiles, width, BLOCK_S, dtype=torch.float32)
    grid = empty(heads, tiles, groups, 3, BLOCK_S, dtype=torch.float32)
    span = empty(heads, tiles, dtype=torch.float32)
    steps = empty(heads, tiles, width, BLOCK_S, dtype=torch.uint8)
    codes = empty(heads, tokens, blocks(width * bits, 8), dtype=torch.uint8)
    scale_codes = empty(heads, tokens, groups, dtype=torch.uint8)
    base = empty(heads, dtype=torch.float16)
    zeros = empty(heads, blocks(tokens * groups * bits, 8), dtype=torch.uint8)
    lost = empty(heads, dtype=torch.int64)
    x, order, factor = x.contiguous(), order.contiguous(), factor.contiguous()
    clusters = () if centroids is None or ids is None else (centroids, ids)
    of_plan = (width, group_size, power_of_two(width))
    of_turn = (
        0 if centroids is None else centroids.shape[1], width, group_size, groups, include_zero,
        min(64, power_of_two(group_size)), BLOCK_S,
    )  # fmt: skip
    of_round = (width, bits, groups, CHANNELS, BLOCK_S, interpreted())
    with on_device(x):
        _plan(
            kind_of(order, factor, constants=of_plan), (heads, 1, 1),
            order, factor, back, group, plan, *of_plan,
        )  # fmt: skip
        _turn(
            kind_of(x, *clusters, constants=of_turn), (tiles, heads, 1),
            x, centroids, ids, back, rest, grid, span, tokens, *of_turn,
        )  # fmt: skip
        _round(
            kind_of(factor, constants=of_round), (tiles, heads, 1),
            back, group, plan, factor, span, rest, grid, steps, codes, scale_codes, zeros, base,
            lost, tokens, zeros.shape[1], *of_round,
        )  # fmt: skip
    tensors = {"codes": codes, "scale_codes": scale_codes, "scale_base": base, "zeros": zeros}
    return tensors, lost


@triton.jit(do_not_specialize=["tokens", "zeros_nbytes"])
def _round_kernel(
    p_back,
    p_group,
    p_plan,
    p_factor,
    p_span,
    p_rest,
    p_grid,
    p_steps,
    p_codes,
    p_scale_codes,
    p_zeros,
    p_base,
    p_lost,
    tokens,
    zeros_nbytes,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i_n = tl.program_id(1).to(tl.int64)
    place = i_n * tl.num_programs(0) + tl.program_id(0)
    first = tl.program_id(0) * BLOCK_S
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < tokens - first
    base = _base(p_span + i_n * tl.num_programs(0), p_base + i_n, p_lost + i_n, BITS)
    p_rest += place * (WIDTH * BLOCK_S)
    p_steps += place * (WIDTH * BLOCK_S)
    p_grid += place * (GROUPS * 3 * BLOCK_S)
    row = i_n * tokens + first
    for i_g in range(GROUPS):
        p_own = p_grid + 3 * i_g * BLOCK_S + o_s
        b_code, b_scale, b_zero = _group_grid(tl.load(p_own), tl.load(p_own + BLOCK_S), base, BITS)
        tl.store(p_scale_codes + (row + o_s) * GROUPS + i_g, b_code.to(tl.uint8), mask=m_s)
        one = tl.full([BLOCK_S], 1.0, tl.float32)
        b_inverse = tl.div_rn(one, tl.where(b_scale == 0, float("inf"), b_scale))
        tl.store(p_own, b_scale)
        tl.store(p_own + BLOCK_S, b_inverse)
        tl.store(p_own + 2 * BLOCK_S, -b_zero + MAGIC)
    tl.debug_barrier()
    for i_block in range((WIDTH + CHANNELS - 1) // CHANNELS):
        _round_block(
            p_rest,
            p_steps,
            p_grid,
            p_group + i_n * WIDTH,
            p_plan + i_n * WIDTH * 3,
            p_factor + i_n * WIDTH * WIDTH,
            i_block * CHANNELS,
            WIDTH,
            BITS,
            CHANNELS,
            BLOCK_S,
            INTERPRET,
        )
        tl.debug_barrier()
    store_codes(p_codes + row * ((WIDTH * BITS + 7) // 8), p_steps, p_back + i_n * WIDTH, m_s,
                WIDTH, BITS, BLOCK_S)  # fmt: skip
    skipped = first.to(tl.int64) * GROUPS * BITS // 8  # whole: BLOCK_S is a multiple of 8
    count = tl.minimum(tokens - first, BLOCK_S)
    store_zeros(p_zeros + i_n * zeros_nbytes + skipped, p_grid, count, zeros_nbytes - skipped,
                MAGIC, GROUPS, BITS, BLOCK_S)  # fmt: skip


@triton.jit
def _base(p_span, p_base, p_lost, BITS: tl.constexpr):
    """The FP16 base of a head, as FP32; its first program writes it down, and if it saturated."""
    TOP: tl.constexpr = (1 << BITS) - 1
    b_span = tl.zeros([128], tl.float32)
    for skip in range(0, tl.num_programs(0), 128):
        o_t = skip + tl.arange(0, 128)
        b_span = tl.maximum(b_span, tl.load(p_span + o_t, mask=o_t < tl.num_programs(0), other=0.0))
    b_wanted = tl.full([1], 0.0, tl.float32) + tl.max(b_span, 0)
    b_wanted = tl.div_rn(b_wanted, tl.full([1], TOP, tl.float32))
    b_wanted = tl.div_rn(b_wanted, tl.full([1], 255.0, tl.float32))
    b_base = tl.minimum(b_wanted, FP16_MAX).to(tl.float16)
    if tl.program_id(0) == 0:
        o_one = tl.arange(0, 1)
        tl.store(p_base + o_one, b_base)
        tl.store(p_lost + o_one, (b_wanted > FP16_MAX).to(tl.int64))
    return tl.sum(b_base.to(tl.float32), 0)


@triton.jit
def _group_grid(b_low, b_high, base, BITS: tl.constexpr):
    """Scale code, scale and zero point of one group of each token."""
    TOP: tl.constexpr = (1 << BITS) - 1
    b_base = tl.zeros_like(b_low) + tl.where(base == 0, float("inf"), base)
    b_code = tl.div_rn(tl.div_rn(b_high - b_low, tl.zeros_like(b_low) + TOP), b_base)
    b_code = nearest(tl.minimum(tl.maximum(b_code, 1.0), 255.0))
    b_scale = base * b_code
    b_zero = tl.div_rn(-b_low, tl.where(b_scale == 0, float("inf"), b_scale))
    b_zero = nearest(tl.minimum(tl.maximum(b_zero, 0.0), TOP * 1.0))
    return b_code, b_scale, b_zero


@triton.jit
def _round_block(
    p_rest,
    p_steps,
    p_grid,
    p_group,
    p_plan,
    p_factor,
    first,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rounds a block of channels in the order; their residuals give way to the errors."""
    o_s = tl.arange(0, BLOCK_S)
    o_k = tl.arange(0, CHANNELS)
    m_k = (first + o_k < WIDTH) if WIDTH % CHANNELS else (o_k >= 0)
    p_own = p_rest + first * BLOCK_S
    p_column = p_factor + first
    b_rest = tl.load(p_own + o_k[:, None] * BLOCK_S + o_s[None, :], mask=m_k[:, None], other=0.0)
    # Two errors are loaded while those before them are used: in the end rows of the block.
    b_one, b_two = tl.load(p_rest + o_s), tl.load(p_rest + BLOCK_S + o_s)
    for _ in range(first // 2):
        b_error, b_other = b_one, b_two
        p_rest += 2 * BLOCK_S
        b_one, b_two = tl.load(p_rest + o_s), tl.load(p_rest + BLOCK_S + o_s)
        b_factor = tl.load(p_column + o_k[:, None], mask=m_k[:, None], other=0.0)
        b_rest -= b_factor * b_error[None, :]
        b_factor = tl.load(p_column + WIDTH + o_k[:, None], mask=m_k[:, None], other=0.0)
        b_rest -= b_factor * b_other[None, :]
        p_column += 2 * WIDTH
    p_steps += first * BLOCK_S
    p_group += first
    p_plan += first * 3
    for k in tl.static_range(CHANNELS):
        is_one = (first + k < WIDTH) if WIDTH % CHANNELS else True
        p_scale = p_grid + tl.load(p_group + k, mask=is_one, other=0) * (3 * BLOCK_S) + o_s
        b_scale, b_low = tl.load(p_scale), tl.load(p_scale + 2 * BLOCK_S)
        b_x = _channel(b_rest, o_k, k)
        b_code = _quotient(b_x, b_scale, tl.load(p_scale + BLOCK_S), INTERPRET) + MAGIC
        b_code = tl.minimum(tl.maximum(b_code, b_low), b_low + ((1 << BITS) - 1))
        b_error = b_x - (b_code - MAGIC) * b_scale  # the product is exact
        b_error = _over(b_error, p_plan + k * 3, is_one, INTERPRET)
        m_s = is_one & (o_s >= 0)
        tl.store(p_own + k * BLOCK_S + o_s, b_error, mask=m_s)
        b_step = b_code.to(tl.int32, bitcast=True) - b_low.to(tl.int32, bitcast=True)
        tl.store(p_steps + k * BLOCK_S + o_s, b_step.to(tl.uint8), mask=m_s)
        m_later = m_k & (o_k > k)
        p_row = p_column + k * WIDTH
        b_factor = tl.load(p_row + o_k[:, None], mask=m_later[:, None], other=0.0)
        b_moved = b_rest - b_factor * b_error[None, :]
        b_rest = tl.where((o_k > k)[:, None], b_moved, b_rest)


@triton.jit
def _quotient(b_x, b_scale, b_inverse, INTERPRET: tl.constexpr):
    """x / scale, on the right side of every half: 0 for a scale of 0, whose inverse is 0.

    A quotient of x and 19 bits is not closer than 2^-44 of it to where FP32 rounds to another side
    of a half; that of the inverse, corrected once, is off by less than 2^-46.
    """
    if INTERPRET:
        b_quotient = tl.div_rn(b_x, tl.where(b_scale == 0, float("inf"), b_scale))
        return tl.minimum(tl.maximum(b_quotient, -4194304.0), 4194304.0)
    b_quotient = b_x * b_inverse
    return tl.fma(tl.fma(-b_quotient, b_scale, b_x), b_inverse, b_quotient)


@triton.jit
def _over(b_x, p_plan, is_one, INTERPRET: tl.constexpr):
    """x / F_ii, rounded to nearest where |x| > 2^-100; errors below that meet no code.

    1 / F_ii as two FP32 numbers gives a quotient off by less than 1 ulp, which one correction with
    a reciprocal that is rounded to nearest makes exact (Markstein, 1990).
    """
    own = tl.load(p_plan, mask=is_one, other=1.0)
    b_own = tl.zeros_like(b_x) + own
    if INTERPRET:
        return tl.div_rn(b_x, b_own)
    b_high = tl.zeros_like(b_x) + tl.load(p_plan + 1, mask=is_one, other=1.0)
    b_quotient = tl.fma(b_x, b_high, b_x * tl.load(p_plan + 2, mask=is_one, other=0.0))
    return tl.fma(tl.fma(-b_quotient, b_own, b_x), b_high, b_quotient)


@triton.jit
def _channel(b_rest, o_k, k):
    """Row k of [channels, tokens], by its bits: for the compiler a mere choice of registers."""
    b_bits = tl.where((o_k == k)[:, None], b_rest.to(tl.int32, bitcast=True), 0)
    return tl.xor_sum(b_bits, 0).to(tl.float32, bitcast=True)


_plan = Launch(plan_kernel, 4)
_turn = Launch(turn_kernel, TURN_WARPS)
_round = Launch(_round_kernel, 1, maxnreg=MAXNREG, enable_fp_fusion=False)
