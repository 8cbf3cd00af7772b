"""Definition: NaN and Inf become 0 and are counted per head."""

import torch
from torch import Tensor

from .blocks import row_blocks

__all__ = ["replace_nonfinite"]


def replace_nonfinite(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `steadykv.ops.finite`."""
    rows, width = x.shape[-2:]
    clean = x.clone(memory_format=torch.contiguous_format)
    counts = torch.zeros(x.shape[:-2], dtype=torch.int64, device=x.device)
    heads = clean.view(counts.numel(), rows, width)
    for head, count in zip(heads, counts.view(-1), strict=True):
        # Whole masks, and the sum of one, which torch takes of a 64-bit copy, would be three x.
        for block in row_blocks(rows, 4 * width, x.device):
            bad = ~head[block].isfinite()
            count += torch.count_nonzero(bad)
            head[block].masked_fill_(bad, 0)
    return clean, counts
