"""Which heads and tokens `attend` works on at a time, within a budget of bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ..reference.blocks import Tokens
from .launch import processors

__all__ = ["ROUND_TOKENS", "Plan", "plan", "plan_for"]

# What a plan's time is estimated by. Of an H200 with 132 multiprocessors: the rate of the vendor's
# attention (4.34 ms for 32 heads, 4,680 queries, 34,320 keys) and of a copy; rows of a block of it.
# Of the host, roughly: the vendor's attention and a merge of a piece, and each load of it.
FLOPS = 606e12 / 132
BLOCK_ROWS = 128
BYTES = 4.2e12 / 132
PASS_SECONDS = 100e-6
LOAD_SECONDS = 35e-6
OVERLAP = 0.8  # of what the last blocks of a pass leave idle, another lane takes so much

BLOCK_BYTES = 1 << 20  # by so much the allocator's blocks may be larger than what was asked for

LEAST_TOKENS = 256  # of a piece
ROUND_TOKENS = 128  # a piece is a multiple of it, so that few shapes occur


class Plan(NamedTuple):
    """KV heads of a pass, tokens of a piece, lanes side by side, and the bytes all that takes."""

    heads: int
    tokens: int
    lanes: int
    nbytes: int


def plan(
    shape: tuple[int, int, int, int], tokens: Tokens, device: torch.device, budget: int
) -> Plan:
    """The passes over queries of `shape` [B, n·H, S, D] that are estimated to be fastest."""
    lanes = 1 if device.type != "cuda" or torch.compiler.is_compiling() else 2
    budget -= min(BLOCK_BYTES, budget // 32)
    return plan_for(
        shape,
        tokens.length,
        tokens.heads,
        tokens.dtype.itemsize,
        processors(device),
        budget,
        lanes,
        tokens.can_split,
        tokens.segments,
    )


@lru_cache(maxsize=256)
def plan_for(
    shape: tuple[int, int, int, int],
    tokens: int,
    kv_heads: int,
    itemsize: int,
    multiprocessors: int,
    budget: int,
    most_lanes: int,
    can_split: bool = True,
    segments: int = 1,
) -> Plan:
    """`plan` for so many multiprocessors, of one, two, ... `most_lanes` lanes."""
    batch, query_heads, rows, width = shape
    group, every = query_heads // kv_heads, batch * kv_heads
    sizes = [*range(1, kv_heads + 1), *range(2 * kv_heads, every + 1, kv_heads)]
    head_scratch = 2 * width * itemsize  # of one token

    def outputs(heads: int, merges: bool) -> int:
        """One partial output and its log-sum-exp; merged ones also have low halves."""
        partial = heads * group * rows * (width * itemsize + 4)
        return 2 * partial if merges else partial

    best, least = None, 0.0
    for lanes in range(1, most_lanes + 1):
        for heads in sizes if can_split else [every]:
            passes = -(-every // heads)
            if lanes > passes:
                continue
            room = budget // lanes
            length = (room - outputs(heads, False)) // (heads * head_scratch)
            if length < tokens:
                length = (room - outputs(heads, True)) // (heads * head_scratch)
                pieces = -(-tokens // max(1, length - ROUND_TOKENS))
                length = -(-tokens // (pieces * ROUND_TOKENS)) * ROUND_TOKENS
            length = min(length, tokens)
            if length < min(tokens, LEAST_TOKENS):
                continue
            pieces = -(-tokens // length)
            nbytes = lanes * (heads * head_scratch * length + outputs(heads, pieces > 1))
            if nbytes > budget:
                continue
            head_waves = -(-rows // BLOCK_ROWS) * group / multiprocessors
            filled, last = heads * head_waves, (every - (passes - 1) * heads) * head_waves
            waves = pieces * ((passes - 1) * -(-filled // 1) + -(-last // 1))
            if lanes > 1:
                packed = pieces * every * head_waves / min(1.0, lanes * filled)
                waves = OVERLAP * packed + (1 - OVERLAP) * waves + 0.5
            attention = waves * 4 * BLOCK_ROWS * length * width / FLOPS
            partial = passes * heads * group * rows * width * itemsize
            merging = partial * (2 + 5 * (pieces - 1)) / (BYTES * multiprocessors)
            loads = segments + 2 * (pieces - 1)  # a cut goes through keys and values
            host = passes * (pieces * PASS_SECONDS + loads * LOAD_SECONDS)
            # Of two plans as fast, the one that the host has less to do for.
            seconds = max(attention + merging, host) + 0.05 * host
            if best is None or seconds < least:
                best, least = Plan(heads, length, lanes, nbytes), seconds
    if best is not None:
        return best
    heads, length = (1 if can_split else every), min(tokens, LEAST_TOKENS)
    nbytes = heads * head_scratch * length + outputs(heads, length < tokens)
    return Plan(heads, length, 1, nbytes)
