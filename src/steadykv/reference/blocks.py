"""Shared by the reference ops: blocks, limits; sums and products blind to the batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "FP16_MAX",
    "Decoder",
    "Heads",
    "Tokens",
    "divided",
    "gather_rows",
    "head_groups",
    "head_matmul",
    "row_blocks",
    "to_bfloat16",
    "tree_sum",
]

FP16_MAX = 65504.0
BF16_MAX = torch.finfo(torch.bfloat16).max

# Bytes of a temporary. On the CPU it should stay in the second-level cache: 1 MiB to 8 MiB are
# equally fast for the [rows, C, D] differences of QSAC on an EPYC core, 32 MiB takes half as long
# again. On a GPU, large enough to fill it.
CPU_BLOCK_BYTES = 4 << 20
GPU_BLOCK_BYTES = 64 << 20


def row_blocks(rows: int, bytes_per_row: int, device: torch.device) -> Iterator[slice]:
    """Consecutive slices of `rows` whose temporaries fit a block (one row at least)."""
    budget = CPU_BLOCK_BYTES if device.type == "cpu" else GPU_BLOCK_BYTES
    step = max(1, budget // bytes_per_row)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def divided(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once. CUDA multiplies by the reciprocal of a number of the host."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last axis, second half folded onto the first: one order on every device."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        folded = x[..., :half].clone()
        folded[..., : x.shape[-1] - half] += x[..., half:]
        x = folded
    return x[..., 0]


def head_matmul(a: Tensor, b: Tensor) -> Tensor:
    """FP32 [N, I, K] times [N, K, J], one head at a time."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for head in range(a.shape[0]):
        torch.mm(a[head], b[head], out=out[head])
    return out


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """table[n, ids[n, s]]: [N, C, D] and int64 [N, S] give [N, S, D]."""
    heads, rows, width = table.shape
    flat = ids + rows * torch.arange(heads, device=ids.device)[:, None]
    return table.reshape(-1, width).index_select(0, flat.reshape(-1)).view(*ids.shape, width)


def to_bfloat16(x: Tensor) -> Tensor:
    """Rounds to BF16 without ever reaching infinity."""
    return x.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)


class Heads(NamedTuple):
    """KV heads that are worked on together: `heads` of each of `rows` rows of the batch."""

    row: int
    rows: int
    head: int
    heads: int

    def of(self, x: Tensor, group: int = 1) -> Tensor:
        """Their part of x [B, H·group, ...], a view."""
        x = x.narrow(0, self.row, self.rows)
        return x.narrow(1, self.head * group, self.heads * group)


Decoder = Callable[[Heads | None, Tensor, int, int], None]
"""(part, out, start, end): tokens of some heads of one payload, all without a part, into `out`."""


class Tokens(NamedTuple):
    """Keys and values that can be had dense, a few heads and tokens at a time.

    load(part, start, end, k_room, v_room): of the tokens start..end, [rows, heads, end - start, D]
    in `dtype`: the rooms, filled, or other tensors. length: T, above 0. heads: H.
    can_split: whether `load` takes less than all heads. segments: how many the tokens lie in, which
    is what loading costs the host.
    """

    load: Callable[[Heads, int, int, Tensor, Tensor], tuple[Tensor, Tensor]]
    length: int
    heads: int
    dtype: torch.dtype
    can_split: bool = True
    segments: int = 1


def head_groups(batch: int, heads: int, size: int) -> Iterator[Heads]:
    """All heads, `size` at a time: whole rows of the batch, or parts of one row."""
    if size >= heads:
        rows = size // heads
        for row in range(0, batch, rows):
            yield Heads(row, min(rows, batch - row), 0, heads)
        return
    for row in range(batch):
        for head in range(0, heads, size):
            yield Heads(row, 1, head, min(size, heads - head))
