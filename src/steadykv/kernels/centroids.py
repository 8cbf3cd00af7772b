"""Kernel: means in E4M3 with a power of two each, and what decoding makes of them."""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import e4m3_byte, e4m3_rounded

__all__ = ["eight_bits_kernel"]


@triton.jit
def eight_bits_kernel(
    p_means,
    p_codes,
    p_scale,
    p_values,
    p_lost,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """See `ops.quantize_centroids`; p_lost: int64 zeros, a number a head."""
    head = tl.program_id(1).to(tl.int64)
    cluster, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    known = cluster < CLUSTERS
    mask = known[:, None] & (channel < WIDTH)[None, :]
    place = (head * CLUSTERS + cluster)[:, None] * WIDTH + channel[None, :]
    mean = tl.load(p_means + place, mask=mask, other=0.0)
    peak = tl.max(tl.abs(mean), 1)
    bits = peak.to(tl.int32, bitcast=True)
    # 448 is 1.75·2^8: one more where the mantissa is above 1.75.
    exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -24), 15)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    near = e4m3_rounded(tl.minimum(tl.abs(mean) * inverse[:, None], 448.0))
    sign = mean.to(tl.int32, bitcast=True) & -2147483648
    code = e4m3_byte(near).to(tl.int32) | ((sign >> 24) & 0x80)
    value = (near * scale[:, None]).to(tl.int32, bitcast=True) | sign  # of zeros, too
    tl.store(p_codes + place, code.to(tl.uint8), mask=mask)
    tl.store(p_values + place, value.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=mask)
    tl.store(p_scale + head * CLUSTERS + cluster, scale.to(tl.float16), mask=known)
    lost = tl.sum(((peak > 14680064.0) & known).to(tl.int32), 0)  # 448·2^15
    if lost > 0:
        tl.atomic_add(p_lost + head, lost.to(tl.int64), sem="relaxed")
