"""Device functions: the number formats of the payloads, exact on every device."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "e4m3_byte",
    "e4m3_encode",
    "e4m3_rounded",
    "e4m3_value",
    "finite",
    "floor_of",
    "nearest",
    "scaled_floor",
]


@triton.jit
def nearest(x):
    """The nearest integer, halves to even, of FP32 |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0  # 1.5·2^23: what is left of a step of 1 is rounded off


@triton.jit
def floor_of(x, INTERPRET: tl.constexpr):
    """The integer below FP32 |x| < 2^22: a sum that is rounded down, where `floor` converts."""
    return scaled_floor(x, 1.0, INTERPRET)


@triton.jit
def scaled_floor(x, factor, INTERPRET: tl.constexpr):
    """floor(x·factor), |x·factor| < 2^22; the product is not rounded, interpreted to FP32."""
    if INTERPRET:
        value = tl.floor(x * factor)
    else:
        value = tl.inline_asm_elementwise(
            "fma.rm.f32 $0, $1, $2, 0f4B400000;", "=f,f,f", [x, factor],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        value -= 12582912.0
    return value


@triton.jit
def finite(x):
    """0 in place of NaN and infinity."""
    return tl.where(x - x == 0, x, 0.0)


@triton.jit
def e4m3_value(byte):
    """FP32 of an E4M3 number, given as uint8; it has no NaN."""
    # Sign, exponent and mantissa are the upper bits of an FP32 number 2^120 times too small.
    bits = (byte.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def e4m3_encode(x):
    """The E4M3 byte of FP32 0 <= x <= 448, nearest, halves to even."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    tiny = nearest(x * 512.0).to(tl.int32)  # below 2^-6 the step is 2^-9
    return tl.where(x < 0.015625, tiny, normal).to(tl.uint8)


@triton.jit
def e4m3_rounded(x):
    """The E4M3 number nearest to FP32 0 <= x <= 448, halves to even, as FP32."""
    # 2^20 times the power of two in x, 2^-6 at least: what is left of a step is rounded off.
    power = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    large = (power + (20 << 23)).to(tl.float32, bitcast=True)
    return (x + large) - large


@triton.jit
def e4m3_byte(value):
    """The byte of an E4M3 number >= 0, given as FP32; see `e4m3_value`."""
    bits = (value * 7.52316384526264e-37).to(tl.int32, bitcast=True)
    return (bits >> 20).to(tl.uint8)
