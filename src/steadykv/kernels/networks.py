"""Device functions: sorting networks between the registers of a thread.

A list is a tuple of tensors, ascending element by element.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["joined", "least_in_lanes", "merged", "sortable", "unsorted"]


@triton.jit
def least_in_lanes(
    x,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The `COUNT` least numbers that each of four lanes has of a row of [ROWS, WIDTH].

    The columns of a lane are 2·lane and 2·lane + 1 of every eight. COUNT: a power of two; with
    fewer columns the list is shorter and ends in the largest int32. STEPS: log2(WIDTH / 4).
    """
    values = (x,)
    for step in tl.static_range(STEPS):
        values = _folded(
            values,
            (1 << step) if (1 << step) < COUNT else COUNT,
            COUNT,
            ROWS,
            WIDTH >> (step + 1),
            step + 1 == STEPS,
        )
    for _ in tl.static_range(COUNT - (1 << STEPS)):
        values = values + (tl.full([ROWS, 4], 0x7FFFFFFF, tl.int32),)
    return values


@triton.jit
def _folded(
    values,
    LENGTH: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    """Lists of one half of the columns merged with those of the other: of neighbours at last."""
    one, other = (), ()
    for i in tl.static_range(LENGTH):
        if IS_LAST:
            b_pair = tl.reshape(values[i], (ROWS, HALF, 2))
        else:
            b_pair = tl.permute(tl.reshape(values[i], (ROWS, 2, HALF)), (0, 2, 1))
        b_one, b_other = tl.split(b_pair)
        one, other = one + (b_one,), other + (b_other,)
    return merged(one, other, LENGTH, COUNT)


@triton.jit
def merged(one, other, LENGTH: tl.constexpr, COUNT: tl.constexpr):
    """The least `COUNT` of two lists of `LENGTH`, or all of them."""
    low, high = (), ()
    for i in tl.static_range(LENGTH):
        low = low + (tl.minimum(one[i], other[LENGTH - 1 - i]),)
        if 2 * LENGTH <= COUNT:
            high = high + (tl.maximum(one[i], other[LENGTH - 1 - i]),)
    low = _ascending(low, LENGTH)
    if 2 * LENGTH <= COUNT:
        low = low + _ascending(high, LENGTH)
    return low


@triton.jit
def _ascending(values, COUNT: tl.constexpr):
    """A bitonic list of at most eight, sorted."""
    for stage in tl.static_range(1, 4):
        if COUNT >> stage > 0:
            old, values = values, ()
            for i in tl.static_range(COUNT):
                if i & (COUNT >> stage):
                    values = values + (tl.maximum(old[i], old[i ^ (COUNT >> stage)]),)
                else:
                    values = values + (tl.minimum(old[i], old[i ^ (COUNT >> stage)]),)
    return values


@triton.jit
def joined(values, COUNT: tl.constexpr):
    """[ROWS, 4, ...]: a list as a tensor, its places in the last dimensions in order."""
    for stage in tl.static_range(1, 4):
        if COUNT >> stage > 0:
            old, values = values, ()
            for i in tl.static_range(COUNT >> stage):
                values = values + (tl.join(old[i], old[i + (COUNT >> stage)]),)
    return values[0]


@triton.jit
def sortable(x):
    """An int32 that is in the order of FP32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unsorted(key):
    """The FP32 number of a `sortable` key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
