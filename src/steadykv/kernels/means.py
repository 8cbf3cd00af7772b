"""Kernels: the means of clusters, in parts of consecutive tokens that are added in order."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["counts_kernel", "divide_kernel", "sums_kernel"]

BF16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit(do_not_specialize=["tokens", "length"])
def sums_kernel(
    x,
    ids,
    sums,
    tokens,
    length,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    EXACT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Sums of a tile of clusters over `length` tokens: the one-hot ids times the tokens.

    EXACT: the tokens are FP32, and enter as three BF16 numbers whose sum they are.
    """
    head, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
    cluster = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, PADDED)
    total = tl.zeros([TILE, PADDED], tl.float32)
    for offset in range(0, length, TOKENS):
        token = part * length + offset + tl.arange(0, TOKENS)
        inside = token < tokens
        member = tl.load(ids + head * tokens + token, mask=inside, other=-1).to(tl.int32)
        row = (head * tokens + token)[:, None] * WIDTH
        mask = inside[:, None] & (channel < WIDTH)[None, :]
        value = tl.load(x + row + channel[None, :], mask=mask, other=0)
        chosen = cluster[:, None] == member[None, :]
        if INTERPRETED:
            total += tl.dot(chosen.to(tl.float32), value.to(tl.float32), input_precision="ieee")
        else:
            one_hot = chosen.to(tl.bfloat16)
            high = value.to(tl.bfloat16)
            total = tl.dot(one_hot, high, total)
            if EXACT:
                rest = value - high.to(tl.float32)
                middle = rest.to(tl.bfloat16)
                total = tl.dot(one_hot, middle, total)
                total = tl.dot(one_hot, (rest - middle.to(tl.float32)).to(tl.bfloat16), total)
    place = (head * tl.num_programs(1) + part) * CLUSTERS + cluster
    mask = (cluster < CLUSTERS)[:, None] & (channel < WIDTH)[None, :]
    tl.store(sums + place[:, None] * WIDTH + channel[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["tokens", "length"])
def counts_kernel(
    ids, counts, tokens, length, CLUSTERS: tl.constexpr, BINS: tl.constexpr, TOKENS: tl.constexpr
):
    """How many of `length` tokens each cluster has: FP32, exact below 2^24."""
    head, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    bin = tl.arange(0, BINS)
    count = tl.zeros([BINS], tl.int32)
    for offset in range(0, length, TOKENS):
        at = offset + tl.arange(0, TOKENS)
        token = part * length + at
        inside = (token < tokens) & (at < length)
        member = tl.load(ids + head * tokens + token, mask=inside, other=BINS - 1).to(tl.int32)
        count += tl.histogram(member, BINS)
    place = counts + (head * tl.num_programs(0) + part) * CLUSTERS + bin
    tl.store(place, count.to(tl.float32), mask=bin < CLUSTERS)


@triton.jit(do_not_specialize=["parts"])
def divide_kernel(
    previous,
    sums,
    counts,
    means,
    rounded,
    doubled,
    norms,
    parts,
    CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds the parts in order; mean, or the previous one of an empty cluster; BF16 and its norm."""
    head = tl.program_id(1).to(tl.int64)
    cluster = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED)
    known = cluster < CLUSTERS
    mask = known[:, None] & (channel < WIDTH)[None, :]
    place = (head * CLUSTERS + cluster)[:, None] * WIDTH + channel[None, :]
    mean = tl.load(previous + place, mask=mask, other=0).to(tl.float32)
    if parts > 0:
        total = tl.zeros([ROWS, PADDED], tl.float32)
        count = tl.zeros([ROWS], tl.float32)
        for part in range(parts):
            at = (head * parts + part) * CLUSTERS + cluster
            total += tl.load(sums + at[:, None] * WIDTH + channel[None, :], mask=mask, other=0)
            count += tl.load(counts + at, mask=known, other=0)
        mean = tl.where(count[:, None] > 0, tl.div_rn(total, tl.maximum(count, 1)[:, None]), mean)
    tl.store(means + place, mean, mask=mask)
    # Rounded by hand: the interpreter truncates what it stores as BF16.
    clipped = tl.minimum(tl.maximum(mean, -BF16_MAX), BF16_MAX)
    bits = clipped.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    near = bits.to(tl.float32, bitcast=True)
    tl.store(rounded + place, near.to(tl.bfloat16), mask=mask)
    tl.store(doubled + place, (near * -2.0).to(tl.bfloat16), mask=mask)  # exact, for scores
    tl.store(norms + head * CLUSTERS + cluster, tl.sum(near * near, 1), mask=known)
