"""Kernels: the residual of clustered tokens onto a grid, without the residual in memory.

`symmetric` (E4M3 scales) and `affine_zero` of 2 and 4 bits, with groups that are powers of two; the
other forms are computed by the reference from the residual.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.group_quantize import group_dequantize
from ..reference.group_quantize import group_quantize as _group_quantize
from ..reference.group_quantize import refine_clustered as _refine_clustered
from ..reference.pack import pack
from .codes import above, clipped, divisor, rounded, store_codes, threshold
from .kmeans import subtract_centroids
from .launch import Launch, blocks, interpreted, kind_of, on_device, power_of_two
from .numbers import e4m3_byte, e4m3_rounded
from .residual import LANES, as_pairs, residual_pairs, word_places

__all__ = ["group_dequantize", "group_quantize", "quantize_clustered", "refine_clustered"]

TILE = 2048  # numbers of one warp
WARPS = 1  # of one program
FP16_MAX = tl.constexpr(65504.0)
FP32_MAX = tl.constexpr(3.4028234663852886e38)


def group_quantize(
    x: Tensor, *options: object, **named: object
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.group_quantize`; without clusters there is no kernel."""
    return _group_quantize(x.float(), *options, **named)  # type: ignore[arg-type]


def quantize_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    packing: str = "bits",
    include_zero: bool = True,
    scale_search: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.group_quantize`.

    Grid `affine_zero` allocates FP32 [N, S, 2·G] besides, G rounded up to a power of two.
    """
    heads, tokens, width = x.shape
    padded = power_of_two(width)
    size = min(group_size, padded)
    has_kernel = size & (size - 1) == 0 and size >= 8 and include_zero and not scale_search
    if not has_kernel or grid not in ("symmetric", "affine_zero"):
        residual = subtract_centroids(x, centroids, ids)
        return _group_quantize(
            residual,
            grid,
            bits,
            group_size,
            packing=packing,
            include_zero=include_zero,
            scale_search=scale_search,
        )
    groups = blocks(width, size)
    # Whole words of codes; trits, 3 bits, and rows that end within a word are packed afterwards.
    in_words = bits in (2, 4) and packing == "bits" and width % 8 == 0
    row = width * bits // 8 if in_words else width
    codes = torch.empty(heads, tokens, row, dtype=torch.uint8, device=x.device)
    scales = torch.empty(heads, tokens, groups, dtype=torch.uint8, device=x.device)
    # Of values that saturate; for an affine grid the bits of the widest range. Not two rows of one
    # tensor: what is kept would keep the other.
    counts = torch.zeros(heads, dtype=torch.int64, device=x.device)
    words = codes.view(torch.int16) if in_words else codes
    block = WARPS * max(4, TILE // padded)
    grid_size = (blocks(tokens, block), heads, 1)
    inputs = (as_pairs(x), as_pairs(centroids.contiguous()), ids.contiguous())
    shape = (centroids.shape[1], width, size, groups, padded // size, min(LANES, size // 8), block)
    coding = (2**bits, bits if in_words else 8, interpreted())
    kind = kind_of(*inputs, constants=(*shape, *coding))
    if grid == "symmetric":
        with on_device(x):
            _symmetric(
                kind, grid_size, *inputs, words, scales, counts, tokens, *shape, *coding
            )  # fmt: skip
        if not in_words:
            codes = pack(codes, bits, packing)
        return {"codes": codes, "scale": scales.view(torch.float8_e4m3fn)}, counts
    # Zero points of a tile fill bytes.
    has_zero_bytes = groups & (groups - 1) == 0 and bits in (2, 4)
    nbytes = blocks(tokens * groups * bits, 8) if has_zero_bytes else tokens * groups
    zeros = torch.empty(heads, nbytes, dtype=torch.uint8, device=x.device)
    base = torch.empty(heads, dtype=torch.float16, device=x.device)
    saturated = torch.empty_like(counts)
    ends = torch.empty(2, heads, tokens, padded // size, dtype=torch.float32, device=x.device)
    with on_device(x):
        _ranges(kind, grid_size, *inputs, ends, counts, tokens, *shape)
        _affine(
            kind, grid_size, *inputs, ends, counts, saturated, words, scales, base, zeros,
            tokens, nbytes,
            *shape, *coding, bits if has_zero_bytes else 8,
        )  # fmt: skip
    if not in_words:
        codes = pack(codes, bits, packing)
    if not has_zero_bytes:
        zeros = pack(zeros, bits)
    tensors = {"codes": codes, "scale_codes": scales, "scale_base": base, "zeros": zeros}
    return tensors, saturated


def refine_clustered(x: Tensor, *given: Any) -> Tensor:
    """See `steadykv.ops.group_quantize`; there is no kernel yet."""
    return _refine_clustered(x.float(), *given)


@triton.jit
def _residual(
    p_x,
    p_mu,
    p_ids,
    tokens,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    ALL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """Of this program's tokens, the last one again in place of those that do not exist.

    Then the head, the first of them, and the row that it has among those of all heads. BACKWARDS:
    what the kernel before this one read last, and the cache may have, comes first.
    """
    UNIT: tl.constexpr = 2 if p_x.dtype.element_ty == tl.int32 else 1
    MU_UNIT: tl.constexpr = 2 if p_mu.dtype.element_ty == tl.int32 else 1
    head, tile = tl.program_id(1), tl.program_id(0)
    if BACKWARDS:
        head, tile = tl.num_programs(1) - 1 - head, tl.num_programs(0) - 1 - tile
    head, first = head.to(tl.int64), tile * TOKENS
    row = head * tokens + first
    o_token = tl.minimum(tl.arange(0, TOKENS), tokens - 1 - first)
    even, odd = residual_pairs(
        p_x + row * (WIDTH // UNIT),
        p_mu + head * (CLUSTERS * WIDTH // MU_UNIT),
        p_ids + row,
        o_token,
        word_places(SIZE // 8, ALL, LANES),
        WIDTH,
        ALL * SIZE != WIDTH,
    )
    return even, odd, head, first, row


@triton.jit
def _over_group(value):
    """The largest of each group, [GROUPS, TOKENS]."""
    return tl.max(tl.max(tl.max(value, 4), 3), 0)


@triton.jit(do_not_specialize=["tokens"])
def _symmetric_kernel(
    p_x,
    p_mu,
    p_ids,
    p_codes,
    p_scales,
    p_counts,
    tokens,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    LEVELS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    even, odd, head, first, row = _residual(
        p_x, p_mu, p_ids, tokens, CLUSTERS, WIDTH, SIZE, ALL, LANES, TOKENS, False
    )
    TOP: tl.constexpr = LEVELS // 2 - 1
    peak = _over_group(tl.maximum(tl.abs(even), tl.abs(odd)))
    wanted = peak if TOP == 1 else tl.div_rn(peak, tl.full([1, 1], TOP * 1.0, tl.float32))
    step = e4m3_rounded(tl.minimum(tl.maximum(wanted, 0.001953125), 448.0))
    o_token, o_group = tl.arange(0, TOKENS), tl.arange(0, ALL)
    m_token = o_token < tokens - first
    mask = (o_group < GROUPS)[:, None] & m_token[None, :]
    at = o_group[:, None] + (o_token * GROUPS)[None, :]
    tl.store(p_scales + row * GROUPS + at, e4m3_byte(step), mask=mask)
    lost = tl.sum(((wanted > 448.0) & mask).to(tl.int32))
    if lost > 0:
        tl.atomic_add(p_counts + head, lost.to(tl.int64), sem="relaxed")
    if TOP == 1:  # one half is even's: 0
        half = (step * 0.5)[None, :, :, None, None]
        even = above(even, half, INTERPRET) - above(-even, half, INTERPRET)
        odd = above(odd, half, INTERPRET) - above(-odd, half, INTERPRET)
    else:
        inverse = tl.div_rn(tl.full([1, 1], 1.0, tl.float32), step)[None, :, :, None, None]
        step = step[None, :, :, None, None]
        even = tl.minimum(tl.maximum(rounded(even, step, inverse), -TOP), TOP)
        odd = tl.minimum(tl.maximum(rounded(odd, step, inverse), -TOP), TOP)
    store_codes(p_codes, row, even, odd, TOP, m_token, WIDTH, SIZE, ALL, LANES, TOKENS, CODE_BITS)


@triton.jit(do_not_specialize=["tokens"])
def _ranges_kernel(
    p_x,
    p_mu,
    p_ids,
    p_ends,
    p_widest,
    tokens,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The ends of every group, with 0 inside, and the bits of the widest range of the head."""
    even, odd, head, first, row = _residual(
        p_x, p_mu, p_ids, tokens, CLUSTERS, WIDTH, SIZE, ALL, LANES, TOKENS, False
    )
    high = tl.maximum(_over_group(tl.maximum(even, odd)), 0.0)
    low = -tl.maximum(_over_group(-tl.minimum(even, odd)), 0.0)
    o_token, o_group = tl.arange(0, TOKENS), tl.arange(0, ALL)
    at = o_group[:, None] + (o_token * ALL)[None, :]
    mask = (o_token < tokens - first)[None, :] & (o_group >= 0)[:, None]
    p_low = p_ends + row * ALL
    tl.store(p_low + at, low, mask=mask)
    tl.store(p_low + tl.num_programs(1).to(tl.int64) * tokens * ALL + at, high, mask=mask)
    widest = tl.max(high - low).to(tl.int32, bitcast=True)  # ordered as the numbers, which are >= 0
    tl.atomic_max(p_widest + head, widest.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["tokens", "zero_nbytes"])
def _affine_kernel(
    p_x,
    p_mu,
    p_ids,
    p_ends,
    p_widest,
    p_counts,
    p_codes,
    p_scales,
    p_base,
    p_zeros,
    tokens,
    zero_nbytes,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    LEVELS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    INTERPRET: tl.constexpr,
    ZERO_BITS: tl.constexpr,
):
    even, odd, head, first, row = _residual(
        p_x, p_mu, p_ids, tokens, CLUSTERS, WIDTH, SIZE, ALL, LANES, TOKENS, True
    )
    top = tl.load(p_widest + head).to(tl.int32).to(tl.float32, bitcast=True)
    # The FP16 base of a head is 1/255 of its widest step.
    top = tl.minimum(top, FP32_MAX)  # or 0 times it would be NaN: a range may leave FP32
    wanted = tl.div_rn(tl.div_rn(top, top * 0 + (LEVELS - 1.0)), top * 0 + 255.0)
    base = tl.minimum(wanted, FP16_MAX).to(tl.float16)
    if first == 0:
        tl.store(p_base + head, base)
        tl.store(p_counts + head, (wanted > FP16_MAX).to(tl.int64))
    # One group after the other: a thread has another one than where numbers are.
    o_flat = tl.arange(0, TOKENS * ALL)
    o_token, o_group = o_flat // ALL, o_flat % ALL
    m_flat = o_token < tokens - first
    p_low = p_ends + row * ALL
    p_high = p_low + tl.num_programs(1).to(tl.int64) * tokens * ALL
    low = tl.load(p_low + o_flat, mask=m_flat, other=0.0)
    high = tl.load(p_high + o_flat, mask=m_flat, other=0.0)
    nothing = tl.zeros([TOKENS * ALL], tl.float32)
    unit = base.to(tl.float32) + nothing
    wanted = tl.div_rn(high - low, nothing + (LEVELS - 1.0))
    count = tl.minimum(tl.maximum(clipped(tl.div_rn(wanted, divisor(unit))), 1.0), 255.0)
    step = divisor(unit * count)
    zero = tl.minimum(tl.maximum(clipped(tl.div_rn(-low, step)), 0.0), LEVELS - 1.0)
    m_group = m_flat & (o_group < GROUPS)
    tl.store(p_scales + row * GROUPS + o_token * GROUPS + o_group, count.to(tl.uint8), mask=m_group)
    p_zeros += head * zero_nbytes
    if ZERO_BITS == 8:
        at = (first + o_token) * GROUPS + o_group
        tl.store(p_zeros + at, zero.to(tl.uint8), mask=m_group)
    else:
        PER_BYTE: tl.constexpr = 8 // ZERO_BITS
        COUNT: tl.constexpr = TOKENS * ALL // PER_BYTE
        shift = (tl.arange(0, PER_BYTE) * ZERO_BITS)[None, :]
        code = tl.reshape(tl.where(m_group, zero, 0.0).to(tl.int32), [COUNT, PER_BYTE])
        at = first * ALL // PER_BYTE + tl.arange(0, COUNT)
        packed = tl.sum(code << shift, 1).to(tl.uint8)
        tl.store(p_zeros + at, packed, mask=at < zero_nbytes)
    if LEVELS == 4:
        limit = _of_groups(threshold(1.0 - zero, step), TOKENS, ALL)
        even_code = above(even, limit, INTERPRET)
        odd_code = above(odd, limit, INTERPRET)
        for level in tl.static_range(2, LEVELS):
            limit = _of_groups(threshold(level - zero, step), TOKENS, ALL)
            even_code += above(even, limit, INTERPRET)
            odd_code += above(odd, limit, INTERPRET)
    else:
        inverse = _of_groups(tl.div_rn(nothing + 1.0, step), TOKENS, ALL)
        step = _of_groups(step, TOKENS, ALL)
        zero = _of_groups(zero, TOKENS, ALL)
        even_code = rounded(even, step, inverse) + zero
        odd_code = rounded(odd, step, inverse) + zero
        even_code = tl.minimum(tl.maximum(even_code, 0.0), LEVELS - 1.0)
        odd_code = tl.minimum(tl.maximum(odd_code, 0.0), LEVELS - 1.0)
    m_token = tl.arange(0, TOKENS) < tokens - first
    store_codes(
        p_codes, row, even_code, odd_code, 0, m_token, WIDTH, SIZE, ALL, LANES, TOKENS, CODE_BITS
    )


@triton.jit
def _of_groups(value, TOKENS: tl.constexpr, ALL: tl.constexpr):
    """[TOKENS·ALL] as a tile of residuals has it."""
    return tl.trans(tl.reshape(value, [TOKENS, ALL]))[None, :, :, None, None]


_symmetric = Launch(_symmetric_kernel, WARPS)
_ranges, _affine = Launch(_ranges_kernel, WARPS), Launch(_affine_kernel, WARPS)
