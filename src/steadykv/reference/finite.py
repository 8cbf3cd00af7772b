"""Definition: FP32 rows of heads, NaN and Inf replaced by 0 and counted per head."""

import torch
from torch import Tensor

from .blocks import row_blocks

__all__ = ["head_rows"]


def head_rows(x: Tensor, first: int, last: int, wide: bool = True) -> tuple[Tensor, Tensor]:
    """See `steadykv.ops.finite`."""
    _, heads, tokens, width = x.shape
    rows = torch.empty(last - first, tokens, width, dtype=torch.float32, device=x.device)
    at = 0
    while at < len(rows):  # whole batch rows, cut at the ends
        row, head = divmod(first + at, heads)
        count = min(heads - head, len(rows) - at)
        rows[at : at + count] = x[row, head : head + count]
        at += count
    counts = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
    for head_of, count_of in zip(rows, counts, strict=True):
        # Whole masks, and the sum of one, which torch takes of a 64-bit copy, would be three x.
        for block in row_blocks(tokens, 4 * width, x.device):
            bad = ~head_of[block].isfinite()
            count_of += torch.count_nonzero(bad)
            head_of[block].masked_fill_(bad, 0)
    return rows, counts
