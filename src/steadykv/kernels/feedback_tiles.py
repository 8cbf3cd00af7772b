"""Feedback rounding, what comes before it: tiles of residuals, channel by channel in the order."""

from __future__ import annotations

import triton
import triton.language as tl

from ..reference import feedback_rounding as reference

__all__ = ["plan_kernel", "turn_kernel"]

RESIDUAL_MAX = tl.constexpr(reference.RESIDUAL_MAX)


@triton.jit
def plan_kernel(
    p_order,
    p_factor,
    p_back,
    p_group,
    p_plan,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The place of each channel in the order; and of each place F_ii, its reciprocal, the group."""
    i_n = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, BLOCK_D)
    mask = o_i < WIDTH
    o_c = tl.load(p_order + i_n * WIDTH + o_i, mask=mask, other=0).to(tl.int32)
    tl.store(p_back + i_n * WIDTH + o_c, o_i, mask=mask)
    b_own = tl.load(p_factor + i_n * WIDTH * WIDTH + o_i * (WIDTH + 1), mask=mask, other=1.0)
    b_high = tl.div_rn(tl.full([BLOCK_D], 1.0, tl.float32), b_own)
    # Twice FP32: 1 - F_ii / F_ii as rounded is a number of FP64.
    b_low = 1.0 - b_own.to(tl.float64) * b_high.to(tl.float64)
    b_low = (b_low / b_own.to(tl.float64)).to(tl.float32)
    tl.store(p_group + i_n * WIDTH + o_i, o_c // GROUP, mask=mask)
    p_plan += (i_n * WIDTH + o_i) * 3
    tl.store(p_plan, b_own, mask=mask)
    tl.store(p_plan + 1, b_high, mask=mask)
    tl.store(p_plan + 2, b_low, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def turn_kernel(
    p_x,
    p_mu,
    p_ids,
    p_back,
    p_rest,
    p_grid,
    p_span,
    tokens,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The residuals of BLOCK_S tokens, turned; the ends of their groups, and the widest of these.

    Tokens beyond the last one are zeros.
    """
    i_n = tl.program_id(1).to(tl.int64)
    place = i_n * tl.num_programs(0) + tl.program_id(0)
    first = tl.program_id(0) * BLOCK_S
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < tokens - first
    p_x += (i_n * tokens + first) * WIDTH
    p_rest += place * (WIDTH * BLOCK_S)
    p_grid += place * (GROUPS * 3 * BLOCK_S)
    if p_ids is not None:
        o_id = tl.load(p_ids + i_n * tokens + first + o_s, mask=m_s, other=0).to(tl.int32)
        p_mu += i_n * CLUSTERS * WIDTH
    b_span = tl.zeros([BLOCK_S], tl.float32)
    for i_g in range(GROUPS):
        b_low = tl.full([BLOCK_S], 0.0 if INCLUDE_ZERO else float("inf"), tl.float32)
        b_high = -b_low
        for skip in range(0, GROUP, CHUNK):
            o_m = skip + tl.arange(0, CHUNK)
            o_c = i_g * GROUP + o_m
            m_c = (o_m < GROUP) & (o_c < WIDTH)
            mask = m_s[:, None] & m_c[None, :]
            b_x = tl.load(p_x + o_s[:, None] * WIDTH + o_c[None, :], mask=mask, other=0.0)
            b_x = b_x.to(tl.float32)
            if p_ids is not None:
                at = o_id[:, None] * WIDTH + o_c[None, :]
                b_x -= tl.load(p_mu + at, mask=mask, other=0.0).to(tl.float32)
            b_low = tl.minimum(b_low, tl.min(tl.where(m_c[None, :], b_x, float("inf")), 1))
            b_high = tl.maximum(b_high, tl.max(tl.where(m_c[None, :], b_x, -float("inf")), 1))
            o_i = tl.load(p_back + i_n * WIDTH + o_c, mask=m_c, other=0)
            b_x = tl.minimum(tl.maximum(b_x, -RESIDUAL_MAX), RESIDUAL_MAX)
            tl.store(p_rest + o_i[None, :] * BLOCK_S + o_s[:, None], b_x, mask=m_c[None, :])
        tl.store(p_grid + 3 * i_g * BLOCK_S + o_s, b_low)
        tl.store(p_grid + (3 * i_g + 1) * BLOCK_S + o_s, b_high)
        b_span = tl.maximum(b_span, tl.where(m_s, b_high - b_low, 0.0))
    tl.store(p_span + place, tl.max(b_span, 0))
