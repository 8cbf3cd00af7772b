"""Device functions: two BF16 numbers in one register, the first in the lower half."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["cut", "fused_pairs", "halves", "rounded_pair"]


@triton.jit
def cut(bits, mask, number, INTERPRET: tl.constexpr):
    """(bits & mask) | number, in one instruction: of two constants ptxas makes two."""
    if INTERPRET:
        value = (bits & mask) | number
    else:
        value = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [bits, mask, number],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return value


@triton.jit
def fused_pairs(a, b, c, INTERPRET: tl.constexpr):
    """a·b + c, rounded once, of pairs in int32. Interpreted, sums are rounded to FP32 before."""
    if INTERPRET:
        a_even, a_odd = halves(a)
        b_even, b_odd = halves(b)
        c_even, c_odd = halves(c)
        value = rounded_pair(a_even * b_even + c_even, a_odd * b_odd + c_odd, True)
    else:
        value = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return value


@triton.jit
def halves(pair):
    """FP32 of both numbers."""
    even = (pair << 16).to(tl.float32, bitcast=True)
    odd = (pair & -65536).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def rounded_pair(even, odd, INTERPRET: tl.constexpr):
    """Two FP32 numbers, halves to even; no NaN."""
    if INTERPRET:
        low, high = even.to(tl.int32, bitcast=True), odd.to(tl.int32, bitcast=True)
        low = (low + 0x7FFF + ((low >> 16) & 1)) >> 16
        high = high + 0x7FFF + ((high >> 16) & 1)
        value = (low & 0xFFFF) | (high & -65536)
    else:
        value = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [odd, even],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return value
