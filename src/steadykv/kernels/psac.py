"""PSAC: the key error is made, projected and judged in registers; only coefficients are written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import psac as reference
from .eigen import can_iterate, strongest
from .launch import Launch, blocks, kind_of, on_device, power_of_two
from .numbers import e4m3_value, nearest
from .residual import as_pairs, number_pairs

__all__ = ["compensate", "compensate_clustered", "query_subspace"]

MAX_RANK = 32  # columns of the basis that a tile of projections holds
# Channels of one product. The matrix units take eight of a row from four threads, two each: threads
# with eight channels side by side have what they need without an exchange.
CHUNK = 32
BLOCK_S, WARPS = 32, 1  # tokens of a program; fewer warps than wgmma needs, which takes other tiles
METRIC_WARPS = 4

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
    to 0. Allocates FP32 [N, 3·r, D] and [N, r, r].
    """
    heads, tokens, width = x.shape
    rank, group_size = basis.shape[-1], min(group_size, width)
    is_rare = grid not in ("affine_zero", "affine_min_fp8") or bits > 4
    if is_rare or rank > MAX_RANK:
        return reference.compensate_clustered(
            x.float(), centroids, ids, tensors, grid, bits, group_size, basis, moment, retain
        )
    codes = torch.empty(heads, tokens, rank, dtype=torch.int8, device=x.device)
    scales = torch.empty(heads, tokens, dtype=torch.float16, device=x.device)
    lost = torch.zeros(heads, dtype=torch.int64, device=x.device)
    if not tokens or not heads:
        return codes, scales, lost
    columns, chunks = max(8, power_of_two(rank)), power_of_two(blocks(width, CHUNK))
    weights = torch.empty(heads, 3, columns, chunks * CHUNK, dtype=torch.float32, device=x.device)
    quadratic = torch.empty(heads, columns, columns, dtype=torch.float32, device=x.device)
    has_zero = grid == "affine_zero"
    scale = tensors["scale_codes"] if has_zero else tensors["scale"].view(torch.uint8)
    offset = tensors["zeros"] if has_zero else tensors["minimum"].view(torch.uint8)
    packed, row = tensors["codes"], tensors["codes"].shape[2]
    if bits != 3 and width % 8 == 0 and not packed.data_ptr() % bits:
        packed = packed.view(torch.int16 if bits == 2 else torch.int32)
    inputs = (as_pairs(x), as_pairs(centroids.contiguous()), ids.contiguous(), packed, scale)
    base = tensors["scale_base"] if has_zero else scale
    metric = (moment.contiguous(), basis.contiguous())
    shape = (width, rank, columns, chunks * CHUNK)
    coding = (
        width, centroids.shape[1], row, bits, group_size, blocks(width, group_size), rank, columns,
        chunks, has_zero, retain == "always", BLOCK_S,
    )  # fmt: skip
    with on_device(x):
        _metric(
            kind_of(*metric, constants=shape), (heads, 1, 1), *metric, weights, quadratic, *shape
        )
        _compensate(
            kind_of(*inputs, base, offset, constants=coding), (blocks(tokens, BLOCK_S), heads, 1),
            *inputs, base, offset, weights, quadratic, codes, scales, lost, tokens,
            offset.shape[1] if has_zero else 0, *coding,
        )  # fmt: skip
    return codes, scales, lost


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
    """U^T, and U^T M as two TF32 numbers whose sum it is, and U^T M U, of one head."""
    BLOCK_I: tl.constexpr = 16
    i_n = tl.program_id(0).to(tl.int64)
    o_d, o_r = tl.arange(0, BLOCK_D), tl.arange(0, COLUMNS)
    p_basis += i_n * WIDTH * RANK
    m_u = (o_d < WIDTH)[:, None] & (o_r < RANK)[None, :]
    u = tl.load(p_basis + o_d[:, None] * RANK + o_r[None, :], mask=m_u, other=0.0).to(tl.float32)
    quadratic = tl.zeros([COLUMNS, COLUMNS], tl.float32)
    for first in range(0, BLOCK_D, BLOCK_I):
        o_i = first + tl.arange(0, BLOCK_I)
        m_i = (o_i < WIDTH)[:, None]
        p_row = p_moment + i_n * WIDTH * WIDTH + o_i[:, None] * WIDTH + o_d[None, :]
        m = tl.load(p_row, mask=m_i & (o_d < WIDTH)[None, :], other=0.0)
        seen = tl.dot(m, u, input_precision="ieee")
        p_part = p_basis + o_i[:, None] * RANK + o_r[None, :]
        part = tl.load(p_part, mask=m_i & (o_r < RANK)[None, :], other=0.0).to(tl.float32)
        quadratic = tl.dot(tl.trans(part), seen, quadratic, input_precision="ieee")
        p_out = p_weights + (i_n * 3 * COLUMNS + o_r[None, :]) * BLOCK_D + o_i[:, None]
        high = _high(seen)
        tl.store(p_out, part)
        tl.store(p_out + COLUMNS * BLOCK_D, high)
        tl.store(p_out + 2 * COLUMNS * BLOCK_D, seen - high)
    at = (i_n * COLUMNS + o_r[:, None]) * COLUMNS + o_r[None, :]
    tl.store(p_quadratic + at, quadratic)


@triton.jit
def _high(value):
    """The upper bits, which are a TF32 number; the rest is exact, and one up to 2^-20."""
    return (value.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


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
    ROW: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Coefficients of BLOCK_S tokens of one head, whose error is made 32 channels at a time."""
    i_n = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_S
    row = i_n * tokens + first
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < tokens - first
    o_row = tl.minimum(o_s, tokens - 1 - first)  # the last token again where there is none
    X_UNIT: tl.constexpr = 2 if p_x.dtype.element_ty == tl.int32 else 1
    MU_UNIT: tl.constexpr = 2 if p_mu.dtype.element_ty == tl.int32 else 1
    CODE_UNIT: tl.constexpr = p_codes.dtype.element_ty.primitive_bitwidth // 8
    p_x += row * (WIDTH // X_UNIT)
    p_mu += i_n * (CLUSTERS * WIDTH // MU_UNIT)
    p_codes += row * (ROW // CODE_UNIT)
    p_scale += row * GROUPS
    # A whole number of bytes: BLOCK_S is a multiple of 8.
    skipped = first.to(tl.int64) * GROUPS * BITS // 8
    p_offset += i_n * offset_nbytes + skipped if HAS_ZERO else row * GROUPS
    last = offset_nbytes - 1 - skipped
    b_base = tl.load(p_base + i_n).to(tl.float32)
    o_id = tl.load(p_ids + row + o_row).to(tl.int32)
    p_weights += i_n * (3 * COLUMNS * CHUNKS * 32)
    IS_PADDED: tl.constexpr = CHUNKS * 32 != WIDTH
    b_wanted = tl.zeros([BLOCK_S, COLUMNS], tl.float32)
    b_linear = tl.zeros([BLOCK_S, COLUMNS], tl.float32)
    for i_c in tl.static_range(CHUNKS):
        # Word `lane` of the chunk; see residual.py. Products take channels in the order in which
        # threads have them.
        words = 4 * i_c + tl.arange(0, 4)[:, None, None, None]
        x_even, x_odd = number_pairs(p_x, o_row, words, WIDTH, IS_PADDED)
        mu_even, mu_odd = number_pairs(p_mu, o_id, words, WIDTH, IS_PADDED)
        b_even = _value(
            p_codes, p_scale, p_offset, b_base, o_row, words, last, 0,
            WIDTH, ROW, BITS, GROUP, GROUPS, HAS_ZERO,
        )  # fmt: skip
        b_odd = _value(
            p_codes, p_scale, p_offset, b_base, o_row, words, last, 1,
            WIDTH, ROW, BITS, GROUP, GROUPS, HAS_ZERO,
        )  # fmt: skip
        b_even, b_odd = x_even - (mu_even + b_even), x_odd - (mu_odd + b_odd)
        b_error = tl.reshape(tl.join(b_even, b_odd), [4, BLOCK_S, 8])
        b_error = tl.reshape(tl.permute(b_error, [1, 0, 2]), [BLOCK_S, 32])
        b_high = _high(b_error)
        b_low = b_error - b_high
        u = _weights(p_weights, i_c, 0, COLUMNS, CHUNKS)
        b_wanted = tl.dot(b_low, u, b_wanted, input_precision="tf32")
        b_wanted = tl.dot(b_high, u, b_wanted, input_precision="tf32")
        if not KEEP_ALL:
            seen = _weights(p_weights, i_c, 1, COLUMNS, CHUNKS)
            b_linear = tl.dot(b_high, seen, b_linear, input_precision="tf32")
            b_linear = tl.dot(b_low, seen, b_linear, input_precision="tf32")
            rest = _weights(p_weights, i_c, 2, COLUMNS, CHUNKS)
            b_linear = tl.dot(b_high, rest, b_linear, input_precision="tf32")

    b_wanted = tl.where(b_wanted == b_wanted, b_wanted, 0.0)  # NaN of sums beyond FP32
    b_peak = tl.div_rn(tl.max(tl.abs(b_wanted), 1), 127.0)
    b_alpha = tl.minimum(b_peak, 65504.0).to(tl.float16)
    b_step = b_alpha.to(tl.float32)
    b_divisor = tl.where(b_step == 0, float("inf"), b_step)
    b_coef = tl.div_rn(b_wanted, tl.broadcast_to(b_divisor[:, None], [BLOCK_S, COLUMNS]))
    b_coef = nearest(tl.minimum(tl.maximum(b_coef, -127.0), 127.0))
    o_r = tl.arange(0, COLUMNS)
    if not KEEP_ALL:
        WIDE: tl.constexpr = 16 if COLUMNS < 16 else COLUMNS  # what a product has to add up
        b_stored = b_step[:, None] * b_coef
        b_left = b_stored
        if WIDE > COLUMNS:
            b_left = tl.reshape(tl.join(b_stored, tl.zeros_like(b_stored)), [BLOCK_S, WIDE])
        o_q = tl.arange(0, WIDE) * COLUMNS // WIDE
        b_quadratic = tl.load(p_quadratic + (i_n * COLUMNS + o_q[:, None]) * COLUMNS + o_r[None, :])
        b_seen = tl.dot(b_left, b_quadratic, input_precision="tf32x3")
        is_kept = 2 * tl.sum(b_stored * b_linear, 1) - tl.sum(b_stored * b_seen, 1) > 0
        b_coef = tl.where(is_kept[:, None], b_coef, 0.0)
        b_step = tl.where(is_kept, b_step, 0.0)
    tl.store(
        p_coef_codes + row * RANK + o_s[:, None] * RANK + o_r[None, :],
        b_coef.to(tl.int8),
        mask=m_s[:, None] & (o_r < RANK)[None, :],
    )
    tl.store(p_coef_scales + row + o_s, b_step.to(tl.float16), mask=m_s)
    lost = tl.sum(((b_peak > 65504.0) & m_s).to(tl.int32), 0)
    if lost > 0:
        tl.atomic_add(p_lost + i_n, lost.to(tl.int64), sem="relaxed")


@triton.jit
def _weights(p_weights, i_c, i_part, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    """Part `i_part` of the weights of a chunk, FP32 [32, COLUMNS]."""
    o_lane, o_r = tl.arange(0, 4), tl.arange(0, COLUMNS)
    at = ((i_part * COLUMNS + o_r) * (32 * CHUNKS) + 32 * i_c)[None, :, None, None]
    at += (8 * o_lane)[:, None, None, None] + (4 * tl.arange(0, 2))[None, None, :, None]
    w = tl.load(p_weights + at + tl.arange(0, 4)[None, None, None, :])
    return tl.reshape(tl.permute(tl.reshape(w, [4, COLUMNS, 8]), [0, 2, 1]), [32, COLUMNS])


@triton.jit
def _value(
    p_codes,
    p_scale,
    p_offset,
    base,
    rows,
    words,
    last,
    ODD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """The rounded residual of the even or odd channels of words, FP32."""
    UNIT: tl.constexpr = p_codes.dtype.element_ty.primitive_bitwidth // 8
    words, o_row = words[:, :, :, :, None], rows[None, None, :, None, None]
    channel = 8 * words + (2 * tl.arange(0, 4) + ODD)[None, None, None, None, :]
    if UNIT > 1:
        mask = (8 * words < WIDTH) & (o_row >= 0)
        # One word a thread, as the channels are laid out: longer runs would have to be exchanged.
        at = tl.max_contiguous(o_row * (ROW // UNIT) + words, [1, 1, 1, 1, 1])
        word = tl.load(p_codes + at, mask=mask, other=0).to(tl.int32)
        # Codes stay where they are, as numbers times a power of two beside 2^23; the upper half of
        # four bits is shifted down.
        HALF: tl.constexpr = 8 // BITS  # pairs below 2^16
        o_i = tl.arange(0, 4)
        place = (o_i % HALF * 2 + ODD) * BITS
        below = (o_i // HALF * 16)[None, None, None, None, :]
        kept = (((1 << BITS) - 1) << place) | 0x4B000000
        number = ((word >> below) | 0x4B000000) & kept[None, None, None, None, :]
        number = number.to(tl.float32, bitcast=True)
        to_one = ((127 - place) << 23).to(tl.float32, bitcast=True)[None, None, None, None, :]
        beside = ((150 - place) << 23).to(tl.float32, bitcast=True)[None, None, None, None, :]
    else:
        mask = (channel < WIDTH) & (o_row >= 0)
        number = _code_at(p_codes + o_row * ROW, channel * BITS, mask, ROW - 1, BITS)
        number, to_one, beside = number.to(tl.float32), 1.0, 0.0
    if GROUP % 8 == 0:
        o_channel = 8 * words
    else:
        o_channel = channel
    mask = (o_channel < WIDTH) & (o_row >= 0)
    o_group = o_row * GROUPS + o_channel // GROUP
    scale = tl.load(p_scale + o_group, mask=mask, other=0)
    if HAS_ZERO:
        zero = _small(_code_at(p_offset, o_group * BITS, mask, last, BITS))
        value = (number * to_one - (beside + zero)) * (base * _small(scale.to(tl.int32)))
    else:
        minimum = e4m3_value(tl.load(p_offset + o_group, mask=mask, other=0))
        value = (number * to_one - beside) * e4m3_value(scale) + minimum
    return value


@triton.jit
def _small(number):
    """FP32 of int32 0 <= n < 2^23, faster than by conversion."""
    return (number | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _code_at(p_row, o_bit, mask, last, BITS: tl.constexpr):
    """The codes that begin at the bits `o_bit` of a stream whose last byte is `last`, as int32."""
    o_byte = o_bit // 8
    word = tl.load(p_row + o_byte, mask=mask, other=0).to(tl.int32)
    if 8 % BITS != 0:  # a code may reach into the next byte
        high = tl.load(p_row + o_byte + 1, mask=mask & (o_byte < last), other=0)
        word |= high.to(tl.int32) << 8
    return (word >> (o_bit % 8)) & ((1 << BITS) - 1)


_metric = Launch(_metric_kernel, METRIC_WARPS)
_compensate = Launch(_compensate_kernel, WARPS)
