"""PSAC: the key error is made, projected and judged in registers; only coefficients are written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import psac as reference
from .eigen import can_iterate, strongest
from .launch import blocks, on_device, tile_width
from .numbers import e4m3_value, nearest

__all__ = ["compensate", "compensate_clustered", "query_subspace"]

MAX_RANK = 32  # columns of the basis that a tile of projections holds
MAX_GROUP = 128  # channels whose errors a tile holds
BLOCK_S = 64  # what one warpgroup multiplies at a time

# Errors that exist as a tensor come from no codec's hot path.
compensate = reference.compensate


def query_subspace(
    moment: Tensor, count: Tensor, rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `steadykv.ops.psac`; the host waits only where the solver's limits send it to `eigh`.

    For moments that are positive semidefinite up to rounding; where eigenvalues are equal, or below
    1e-6 of the trace, the vectors are others than those of `eigh`, as good.
    """
    if can_iterate(moment, rank):
        return strongest(moment, count, rank)
    return reference.query_subspace(moment, count, rank)


def compensate_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    tensors: Mapping[str, Tensor],
    grid: str,
    bits: int,
    group_size: int,
    basis: Tensor,
    moment: Tensor,
    retain: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `steadykv.ops.psac`.

    The error is that of the reference, bit for bit. Its products with U and M·U are split into
    three TF32 products each: off by less than 2^-18·sum |e_c u_c| and what FP32 sums differ by, so
    a code may differ where c/alpha is that close to a half, and a row where its gain is that close
    to 0. Allocates FP32 [N, D, 2·r] and [N, r, r].
    """
    heads, tokens, width = x.shape
    rank, group_size = basis.shape[-1], min(group_size, width)
    is_rare = grid not in ("affine_zero", "affine_min_fp8") or bits > 4
    if is_rare or rank > MAX_RANK or group_size > MAX_GROUP:
        return reference.compensate_clustered(
            x.float(), centroids, ids, tensors, grid, bits, group_size, basis, moment, retain
        )
    codes = torch.empty(heads, tokens, rank, dtype=torch.int8, device=x.device)
    scales = torch.empty(heads, tokens, dtype=torch.float16, device=x.device)
    if not tokens or not heads:
        return codes, scales, torch.zeros(heads, dtype=torch.int64, device=x.device)
    columns = tile_width(rank)
    weights = torch.empty(heads, width, 2 * columns, dtype=torch.float32, device=x.device)
    quadratic = torch.empty(heads, columns, columns, dtype=torch.float32, device=x.device)
    groups = blocks(width, group_size)
    has_zero = grid == "affine_zero"
    scale = tensors["scale_codes"] if has_zero else tensors["scale"].view(torch.uint8)
    offset = tensors["zeros"] if has_zero else tensors["minimum"].view(torch.uint8)
    base = tensors["scale_base"] if has_zero else scale
    lost = torch.empty(heads, blocks(tokens, BLOCK_S), dtype=torch.int32, device=x.device)
    with on_device(x):
        _metric_kernel[(heads,)](
            moment.contiguous(),
            basis.contiguous(),
            weights,
            quadratic,
            WIDTH=width,
            RANK=rank,
            COLUMNS=columns,
            BLOCK_D=tile_width(width),
            num_warps=4,
        )
        _compensate_kernel[(lost.shape[1], heads)](
            x,
            centroids.contiguous(),
            ids,
            tensors["codes"],
            scale,
            base,
            offset,
            weights,
            quadratic,
            codes,
            scales,
            lost,
            tokens,
            offset.shape[1] if has_zero else 0,
            WIDTH=width,
            CLUSTERS=centroids.shape[1],
            BITS=bits,
            GROUP=group_size,
            GROUPS=groups,
            RANK=rank,
            COLUMNS=columns,
            HAS_ZERO=has_zero,
            KEEP_ALL=retain == "always",
            BLOCK_S=BLOCK_S,
            BLOCK_G=tile_width(group_size),
            num_warps=4,
        )
    return codes, scales, lost.sum(1)


@triton.jit
def _metric_kernel(
    p_moment,
    p_basis,
    p_weights,
    p_quadratic,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """U beside M·U, and U^T M U, of one head."""
    BLOCK_I: tl.constexpr = 16
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    o_r = tl.arange(0, COLUMNS)
    m_r = o_r < RANK
    p_basis += i_n * WIDTH * RANK
    u = tl.load(
        p_basis + o_d[:, None] * RANK + o_r,
        mask=(o_d < WIDTH)[:, None] & m_r,
        other=0.0,
    ).to(tl.float32)
    quadratic = tl.zeros([COLUMNS, COLUMNS], tl.float32)
    for first in range(0, WIDTH, BLOCK_I):
        o_i = first + tl.arange(0, BLOCK_I)
        m_i = (o_i < WIDTH)[:, None]
        m = tl.load(
            p_moment + i_n * WIDTH * WIDTH + o_i[:, None] * WIDTH + o_d,
            mask=m_i & (o_d < WIDTH),
            other=0.0,
        )
        seen = tl.dot(m, u, input_precision="ieee")
        part = tl.load(p_basis + o_i[:, None] * RANK + o_r, mask=m_i & m_r, other=0.0)
        part = part.to(tl.float32)
        quadratic = tl.dot(tl.trans(part), seen, quadratic, input_precision="ieee")
        p_row = p_weights + (i_n * WIDTH + o_i[:, None]) * (2 * COLUMNS) + o_r
        tl.store(p_row, part, mask=m_i)
        tl.store(p_row + COLUMNS, seen, mask=m_i)
    o_q = tl.arange(0, COLUMNS)
    tl.store(p_quadratic + (i_n * COLUMNS + o_q[:, None]) * COLUMNS + o_r, quadratic)


@triton.jit(do_not_specialize=["tokens", "offset_nbytes"])
def _compensate_kernel(
    p_x,
    p_mu,
    p_ids,
    p_codes,
    p_scale,
    p_base,
    p_offset,
    p_weights,
    p_quadratic,
    p_coef_codes,
    p_coef_scales,
    p_lost,
    tokens,
    offset_nbytes,
    WIDTH: tl.constexpr,
    CLUSTERS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Coefficients of BLOCK_S tokens of one head, whose error is made one group at a time."""
    ROW: tl.constexpr = (WIDTH * BITS + 7) // 8
    i_n = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK_S
    row = i_n * tokens + first
    o_s = tl.arange(0, BLOCK_S)
    o_g = tl.arange(0, BLOCK_G)
    o_r = tl.arange(0, COLUMNS)
    m_s = first + o_s < tokens

    p_x += row * WIDTH
    p_codes += row * ROW
    p_scale += row * GROUPS
    o_id = tl.load(p_ids + row + o_s, mask=m_s, other=0)
    p_mu += i_n * CLUSTERS * WIDTH
    p_weights += i_n * WIDTH * (2 * COLUMNS)
    b_base = tl.load(p_base + i_n).to(tl.float32)
    skipped = first * GROUPS * BITS // 8  # a whole number: BLOCK_S is a multiple of 8
    last = offset_nbytes - 1 - skipped
    p_offset += i_n * offset_nbytes + skipped if HAS_ZERO else row * GROUPS
    b_wanted = tl.zeros([BLOCK_S, COLUMNS], tl.float32)
    b_linear = tl.zeros([BLOCK_S, COLUMNS], tl.float32)
    for i_g in tl.static_range(GROUPS):
        o_c = i_g * GROUP + o_g
        m_c = (o_g < GROUP) & (o_c < WIDTH)
        mask = m_s[:, None] & m_c[None, :]
        o_at = o_s[:, None] * WIDTH + o_c[None, :]
        b_x = tl.load(p_x + o_at, mask=mask, other=0.0).to(tl.float32)
        o_mu = o_id[:, None] * WIDTH + o_c[None, :]
        b_mu = tl.load(p_mu + o_mu, mask=mask, other=0.0).to(tl.float32)
        b_codes = _codes(p_codes, o_s, m_s, i_g * GROUP, m_c, ROW, BITS, GROUP, BLOCK_G)
        o_group = o_s * GROUPS + i_g
        b_scale = tl.load(p_scale + o_group, mask=m_s, other=0)
        if HAS_ZERO:
            b_zero = _code_at(p_offset, o_group * BITS, m_s, last, BITS)
            b_scale = b_base * b_scale.to(tl.float32)
            b_value = (b_codes - b_zero[:, None]).to(tl.float32) * b_scale[:, None]
        else:
            b_scale = e4m3_value(b_scale)
            b_minimum = e4m3_value(tl.load(p_offset + o_group, mask=m_s, other=0))
            b_value = b_codes.to(tl.float32) * b_scale[:, None] + b_minimum[:, None]
        b_error = tl.where(mask, b_x - (b_mu + b_value), 0.0)
        p_u = p_weights + o_c[:, None] * (2 * COLUMNS) + o_r[None, :]
        b_u = tl.load(p_u, mask=m_c[:, None], other=0.0)
        b_wanted = tl.dot(b_error, b_u, b_wanted, input_precision="tf32x3")
        if not KEEP_ALL:
            b_seen = tl.load(p_u + COLUMNS, mask=m_c[:, None], other=0.0)
            b_linear = tl.dot(b_error, b_seen, b_linear, input_precision="tf32x3")

    b_wanted = tl.where(b_wanted == b_wanted, b_wanted, 0.0)  # NaN of sums beyond FP32
    b_peak = tl.div_rn(tl.max(tl.abs(b_wanted), 1), 127.0)
    is_lost = (b_peak > 65504.0) & m_s
    b_alpha = tl.minimum(b_peak, 65504.0).to(tl.float16)
    b_step = b_alpha.to(tl.float32)
    b_divisor = tl.where(b_step == 0, float("inf"), b_step)
    b_coef = tl.div_rn(b_wanted, tl.broadcast_to(b_divisor[:, None], [BLOCK_S, COLUMNS]))
    b_coef = nearest(tl.minimum(tl.maximum(b_coef, -127.0), 127.0))
    if not KEEP_ALL:
        o_q = tl.arange(0, COLUMNS)
        b_quadratic = tl.load(p_quadratic + (i_n * COLUMNS + o_q[:, None]) * COLUMNS + o_r[None, :])
        b_stored = b_step[:, None] * b_coef
        b_seen = tl.dot(b_stored, b_quadratic, input_precision="tf32x3")
        is_kept = 2 * tl.sum(b_stored * b_linear, 1) - tl.sum(b_stored * b_seen, 1) > 0
        b_coef = tl.where(is_kept[:, None], b_coef, 0.0)
        b_step = tl.where(is_kept, b_step, 0.0)
    tl.store(
        p_coef_codes + row * RANK + o_s[:, None] * RANK + o_r[None, :],
        b_coef.to(tl.int8),
        mask=m_s[:, None] & (o_r < RANK)[None, :],
    )
    tl.store(p_coef_scales + row + o_s, b_step.to(tl.float16), mask=m_s)
    lost = tl.sum(is_lost.to(tl.int32), 0)
    tl.store(p_lost + i_n * tl.num_programs(0) + tl.program_id(0), lost)


@triton.jit
def _codes(
    p_codes,
    o_s,
    m_s,
    first,
    m_c,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """The codes of the channels from `first` on, int32 [tokens, BLOCK_G]."""
    PER_BYTE: tl.constexpr = 8 // BITS
    if 8 % BITS == 0 and GROUP % PER_BYTE == 0:  # every group begins with a byte of its own
        o_b = tl.arange(0, BLOCK_G // PER_BYTE)
        at = first // PER_BYTE + o_b
        mask = m_s[:, None] & ((o_b < GROUP // PER_BYTE) & (at < ROW))[None, :]
        b_bytes = tl.load(p_codes + o_s[:, None] * ROW + at[None, :], mask=mask, other=0)
        o_bit = (tl.arange(0, PER_BYTE) * BITS)[None, None, :]
        b_codes = (b_bytes.to(tl.int32)[:, :, None] >> o_bit) & ((1 << BITS) - 1)
        b_codes = tl.reshape(b_codes, [o_s.shape[0], BLOCK_G])
    else:
        o_bit = (first + tl.arange(0, BLOCK_G)) * BITS
        mask = m_s[:, None] & m_c[None, :]
        b_codes = _code_at(p_codes + o_s[:, None] * ROW, o_bit[None, :], mask, ROW - 1, BITS)
    return b_codes


@triton.jit
def _code_at(p_row, o_bit, mask, last, BITS: tl.constexpr):
    """The codes that begin at the bits `o_bit` of a stream whose last byte is `last`, as int32."""
    o_byte = o_bit // 8
    word = tl.load(p_row + o_byte, mask=mask, other=0).to(tl.int32)
    if 8 % BITS != 0:  # a code may reach into the next byte
        high = tl.load(p_row + o_byte + 1, mask=mask & (o_byte < last), other=0)
        word |= high.to(tl.int32) << 8
    return (word >> (o_bit % 8)) & ((1 << BITS) - 1)
