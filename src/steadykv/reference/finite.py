"""Definition: NaN and Inf become 0 and are counted per head."""

import torch
from torch import Tensor

from .blocks import row_blocks

__all__ = ["replace_nonfinite"]


def replace_nonfinite(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `steadykv.ops.finite`."""
    clean = x.clone(memory_format=torch.contiguous_format)
    counts = torch.zeros(x.shape[:-2], dtype=torch.int64, device=x.device)
    for head, count in zip(clean.flatten(0, -3), counts.view(-1), strict=True):
        # Whole masks and the sum of one, which torch takes of 64-bit copies, would be three x.
        for block in row_blocks(len(head), 4 * head.shape[1], x.device):
            bad = ~head[block].isfinite()
            count += torch.count_nonzero(bad)
            head[block].masked_fill_(bad, 0)
    return clean, counts
