"""Feedback rounding: one thread keeps its tokens, and channels go by in order.

A program works on a tile of tokens. Its residuals are turned into rows of one channel each, in the
order of rounding, in a scratch that its loads find in a cache. Blocks of channels are then taken
into registers, moved by every error made before, and rounded one channel after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import feedback_rounding as reference
from ..reference.blocks import FP16_MAX
from .factor import MAX_WIDTH, factors
from .launch import blocks, on_device, processors
from .numbers import nearest

__all__ = ["feedback_factor", "feedback_quantize"]

RESIDUAL_MAX = tl.constexpr(reference.RESIDUAL_MAX)
BLOCK_S = 128  # four tokens a lane of one warp
PROGRAMS = 12  # warps of MAXNREG registers that fit a multiprocessor
MAXNREG = 168  # all that the loop over channels needs; left alone, the compiler takes 255


def feedback_factor(
    moment: Tensor, count: Tensor, vectors: Tensor, values: Tensor, damping: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `steadykv.ops.feedback_rounding`."""
    if moment.shape[-1] > MAX_WIDTH:  # FP64 [D, D] would not fit the registers
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
    """See `steadykv.ops.feedback_rounding`.

    Every operation is that of the reference, in its order and unfused: the same bits. Allocates
    what it returns and, for each of the at most 12 programs a multiprocessor, 5·D + 8·G bytes for
    each of 128 tokens.
    """
    heads, tokens, width = x.shape
    device, group_size = x.device, min(group_size, width)
    groups = blocks(width, group_size)
    top = 2**bits - 1
    x, factor = x.contiguous(), factor.contiguous()
    back = torch.empty_like(order)
    places = torch.arange(width, device=device).expand(heads, width)
    back.scatter_(1, order, places)
    tiles = blocks(tokens, BLOCK_S)
    span = torch.empty(heads, tiles, dtype=torch.float32, device=device)
    row = -(-width * bits // 8)
    codes = torch.empty(heads, tokens, row, dtype=torch.uint8, device=device)
    scale_codes = torch.empty(heads, tokens, groups, dtype=torch.uint8, device=device)
    zeros = torch.empty(heads, -(-tokens * groups * bits // 8), dtype=torch.uint8, device=device)
    programs = min(heads * tiles, PROGRAMS * processors(device))
    rows = 16 * blocks(width, 16)
    rest = torch.empty(programs, rows, BLOCK_S, dtype=torch.float32, device=device)
    steps = torch.empty(programs, rows, BLOCK_S, dtype=torch.uint8, device=device)
    grid = torch.empty(programs, groups, 2, BLOCK_S, dtype=torch.float32, device=device)
    with on_device(x):
        _span_kernel[(tiles, heads)](
            x,
            span,
            tokens,
            WIDTH=width,
            GROUP=group_size,
            GROUPS=groups,
            INCLUDE_ZERO=include_zero,
            BLOCK_S=BLOCK_S,
            num_warps=8,
        )
        wanted = span.amax(1) / top / 255
        base = wanted.clamp(max=FP16_MAX).to(torch.float16)
        _round_kernel[(programs,)](
            x,
            order.contiguous(),
            back,
            factor,
            base,
            rest,
            steps,
            grid,
            codes,
            scale_codes,
            zeros,
            tokens,
            tiles,
            heads * tiles,
            zeros.shape[1],
            WIDTH=width,
            BITS=bits,
            GROUP=group_size,
            GROUPS=groups,
            INCLUDE_ZERO=include_zero,
            BLOCK_S=BLOCK_S,
            num_warps=1,
            maxnreg=MAXNREG,
            enable_fp_fusion=False,
        )
    tensors = {"codes": codes, "scale_codes": scale_codes, "scale_base": base, "zeros": zeros}
    return tensors, (wanted > FP16_MAX).to(torch.int64)


@triton.jit
def _range(b_x, m_c, b_low, b_high):
    """The range so far, with the channels `m_c` of [tokens, channels]."""
    b_low = tl.minimum(b_low, tl.min(tl.where(m_c, b_x, float("inf")), 1))
    b_high = tl.maximum(b_high, tl.max(tl.where(m_c, b_x, -float("inf")), 1))
    return b_low, b_high


@triton.jit
def _empty_range(INCLUDE_ZERO: tl.constexpr, BLOCK_S: tl.constexpr):
    b_low = tl.full([BLOCK_S], 0.0 if INCLUDE_ZERO else float("inf"), tl.float32)
    return b_low, -b_low


@triton.jit(do_not_specialize=["tokens"])
def _span_kernel(
    p_x,
    p_span,
    tokens,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The widest range of a group among BLOCK_S tokens of one head."""
    i_n = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK_S
    o_s = tl.arange(0, BLOCK_S)
    m_s = first + o_s < tokens
    p_x += (i_n * tokens + first) * WIDTH
    b_span = tl.zeros([BLOCK_S], tl.float32)
    for i_g in range(GROUPS):
        b_low, b_high = _empty_range(INCLUDE_ZERO, BLOCK_S)
        for skip in range(0, GROUP, 32):
            o_m = skip + tl.arange(0, 32)
            o_c = i_g * GROUP + o_m
            m_c = ((o_m < GROUP) & (o_c < WIDTH))[None, :]
            b_x = tl.load(
                p_x + o_s[:, None] * WIDTH + o_c[None, :], mask=m_s[:, None] & m_c, other=0.0
            )
            b_low, b_high = _range(b_x.to(tl.float32), m_c, b_low, b_high)
        b_span = tl.maximum(b_span, b_high - b_low)
    at = p_span + i_n * tl.num_programs(0) + tl.program_id(0)
    tl.store(at, tl.max(tl.where(m_s, b_span, 0.0), 0))


@triton.jit(do_not_specialize=["tokens", "tiles", "all_tiles", "zeros_nbytes"])
def _round_kernel(
    p_x,
    p_order,
    p_back,
    p_factor,
    p_base,
    p_rest,
    p_steps,
    p_grid,
    p_codes,
    p_scale_codes,
    p_zeros,
    tokens,
    tiles,
    all_tiles,
    zeros_nbytes,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    INCLUDE_ZERO: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Tiles of BLOCK_S tokens of one head, one after the other, in a scratch of the program."""
    BLOCKS: tl.constexpr = (WIDTH + 15) // 16
    o_s = tl.arange(0, BLOCK_S)
    p_rest += tl.program_id(0).to(tl.int64) * (16 * BLOCKS * BLOCK_S)
    p_steps += tl.program_id(0).to(tl.int64) * (16 * BLOCKS * BLOCK_S)
    p_grid += tl.program_id(0).to(tl.int64) * (GROUPS * 2 * BLOCK_S)
    for tile in range(tl.program_id(0), all_tiles, tl.num_programs(0)):
        i_n = (tile // tiles).to(tl.int64)
        first = (tile % tiles).to(tl.int64) * BLOCK_S
        row = i_n * tokens + first
        m_s = first + o_s < tokens
        base = tl.load(p_base + i_n).to(tl.float32)
        p_head_back = p_back + i_n * WIDTH
        p_tile = p_x + row * WIDTH
        for i_g in range(GROUPS):
            b_low, b_high = _empty_range(INCLUDE_ZERO, BLOCK_S)
            for skip in range(0, GROUP, 16):
                o_m = skip + tl.arange(0, 16)
                o_c = i_g * GROUP + o_m
                m_c = (o_m < GROUP) & (o_c < WIDTH)
                o_at = o_s[:, None] * WIDTH + o_c[None, :]
                b_x = tl.load(p_tile + o_at, mask=m_s[:, None] & m_c[None, :], other=0.0)
                b_x = b_x.to(tl.float32)
                b_low, b_high = _range(b_x, m_c[None, :], b_low, b_high)
                o_i = tl.load(p_head_back + o_c, mask=m_c, other=0).to(tl.int32)
                b_x = tl.minimum(tl.maximum(b_x, -RESIDUAL_MAX), RESIDUAL_MAX)
                tl.store(p_rest + o_i[None, :] * BLOCK_S + o_s[:, None], b_x, mask=m_c[None, :])
            b_code, b_scale, b_zero = _group_grid(b_low, b_high, base, BITS)
            p_code = p_scale_codes + (row + o_s) * GROUPS + i_g
            tl.store(p_code, b_code.to(tl.uint8), mask=m_s)
            tl.store(p_grid + 2 * i_g * BLOCK_S + o_s, b_scale)
            tl.store(p_grid + (2 * i_g + 1) * BLOCK_S + o_s, b_zero)
        tl.debug_barrier()
        for i_block in range(BLOCKS):
            _round_block(
                p_rest,
                p_steps,
                p_grid,
                p_order + i_n * WIDTH,
                p_factor + i_n * WIDTH * WIDTH,
                i_block * 16,
                WIDTH,
                BITS,
                GROUP,
                BLOCK_S,
            )
            tl.debug_barrier()
        _store_codes(p_codes + row * ((WIDTH * BITS + 7) // 8), p_steps, p_head_back, m_s,
                     WIDTH, BITS, BLOCK_S)  # fmt: skip
        skipped = first * GROUPS * BITS // 8  # a whole number: BLOCK_S is a multiple of 8
        p_tile_zeros = p_zeros + i_n * zeros_nbytes + skipped
        count = tl.minimum(tokens - first, BLOCK_S).to(tl.int32)
        _store_zeros(p_tile_zeros, p_grid, count, zeros_nbytes - skipped, GROUPS, BITS, BLOCK_S)
        tl.debug_barrier()


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
    p_order,
    p_factor,
    first,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Rounds 16 channels from `first` on in the order; their residuals give way to the errors."""
    TOP: tl.constexpr = (1 << BITS) - 1
    o_s = tl.arange(0, BLOCK_S)
    o_k = tl.arange(0, 16)
    o_i = first + o_k
    m_i = o_i < WIDTH
    o_at = o_i[:, None] * BLOCK_S + o_s[None, :]
    b_rest = tl.load(p_rest + o_at, mask=m_i[:, None], other=0.0)
    for i in range(first):
        b_error = tl.load(p_rest + i * BLOCK_S + o_s)
        b_factor = tl.load(p_factor + i * WIDTH + o_i[:, None], mask=m_i[:, None], other=0.0)
        b_rest -= b_factor * b_error[None, :]
    for k in tl.static_range(16):
        i = first + k
        group = (tl.load(p_order + i, mask=i < WIDTH, other=0) // GROUP).to(tl.int32)
        b_scale = tl.load(p_grid + 2 * group * BLOCK_S + o_s)
        b_zero = tl.load(p_grid + (2 * group + 1) * BLOCK_S + o_s)
        b_x = _channel(b_rest, o_k, k)
        b_code = tl.div_rn(b_x, tl.where(b_scale == 0, float("inf"), b_scale))
        b_code = nearest(tl.minimum(tl.maximum(b_code, -64.0), 64.0)) + b_zero
        b_code = tl.minimum(tl.maximum(b_code, 0.0), TOP * 1.0)
        b_error = b_x - (b_code - b_zero) * b_scale
        diagonal = tl.load(p_factor + i * WIDTH + i, mask=i < WIDTH, other=1.0)
        b_error = tl.div_rn(b_error, tl.zeros_like(b_error) + diagonal)
        is_later = (o_k > k)[:, None]
        b_factor = tl.load(p_factor + i * WIDTH + o_i[:, None], mask=m_i[:, None], other=0.0)
        b_rest = tl.where(is_later, b_rest - b_factor * b_error[None, :], b_rest)
        tl.store(p_rest + i * BLOCK_S + o_s, b_error)
        tl.store(p_steps + i * BLOCK_S + o_s, b_code.to(tl.uint8))


@triton.jit
def _channel(b_rest, o_k, k):
    """Row k of [16, tokens], by its bits: for the compiler a mere choice of registers."""
    b_bits = tl.where((o_k == k)[:, None], b_rest.to(tl.int32, bitcast=True), 0)
    return tl.xor_sum(b_bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def _store_codes(
    p_codes,
    p_steps,
    p_back,
    m_s,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The codes of a tile as bit streams of a token, its channels in their own order again."""
    ROW: tl.constexpr = (WIDTH * BITS + 7) // 8
    TERMS: tl.constexpr = 8 // BITS if 8 % BITS == 0 else 8 // BITS + 2
    o_s = tl.arange(0, BLOCK_S)
    # Eight bytes: tiles of the shape of the residuals, but of bytes, would lay those out too, with
    # sixteen tokens a lane and channels across lanes.
    for skip in range(0, ROW, 8):
        o_b = skip + tl.arange(0, 8)
        b_bytes = tl.zeros([8, BLOCK_S], tl.int32)
        for term in tl.static_range(TERMS):
            o_c = 8 * o_b // BITS + term
            m_c = o_c < WIDTH
            o_i = tl.load(p_back + o_c, mask=m_c, other=0).to(tl.int32)
            b_codes = tl.load(
                p_steps + o_i[:, None] * BLOCK_S + o_s[None, :], mask=m_c[:, None], other=0
            )
            b_bytes |= _placed(b_codes.to(tl.int32), (o_c * BITS - 8 * o_b)[:, None])
        tl.store(
            p_codes + o_s[None, :] * ROW + o_b[:, None],
            b_bytes.to(tl.uint8),
            mask=m_s[None, :] & (o_b < ROW)[:, None],
        )


@triton.jit
def _store_zeros(
    p_zeros,
    p_grid,
    count,
    nbytes,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The zero points of the `count` tokens of a tile as one bit stream of at most `nbytes`."""
    TERMS: tl.constexpr = 8 // BITS if 8 % BITS == 0 else 8 // BITS + 2
    for skip in range(0, BLOCK_S * GROUPS * BITS // 8, 32):
        o_b = skip + tl.arange(0, 32)
        b_bytes = tl.zeros([32], tl.int32)
        for term in tl.static_range(TERMS):
            o_z = 8 * o_b // BITS + term
            o_s, o_g = o_z // GROUPS, o_z % GROUPS
            b_zero = tl.load(p_grid + (2 * o_g + 1) * BLOCK_S + o_s, mask=o_s < count, other=0.0)
            b_bytes |= _placed(b_zero.to(tl.int32), o_z * BITS - 8 * o_b)
        mask = (o_b < BLOCK_S * GROUPS * BITS // 8) & (o_b < nbytes)
        tl.store(p_zeros + o_b, b_bytes.to(tl.uint8), mask=mask)


@triton.jit
def _placed(b_code, o_bit):
    """A code at the bit `o_bit` of a byte; what reaches out of it is lost."""
    up, down = tl.maximum(o_bit, 0), tl.maximum(-o_bit, 0)
    return ((b_code << up) >> down) & 255
