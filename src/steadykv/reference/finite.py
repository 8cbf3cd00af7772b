"""Definition: NaN and Inf replaced by 0 and counted."""

import torch
from torch import Tensor

from .blocks import row_blocks

__all__ = ["copy_finite", "count_nonfinite", "head_rows"]

# Bits are compared as integers, because that is vectorised where a comparison of bf16 is not.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXPONENT = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0 << 48,
}


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


def copy_finite(source: Tensor, target: Tensor, count: Tensor) -> None:
    """See `steadykv.ops.finite`."""
    torch.nan_to_num(source, nan=0.0, posinf=0.0, neginf=0.0, out=target)
    bits = _BITS[source.element_size()]
    count.add_(torch.count_nonzero(torch.ne(source.view(bits), target.view(bits))))


def count_nonfinite(x: Tensor, count: Tensor) -> None:
    """See `steadykv.ops.finite`; all exponent bits are set in exactly those numbers."""
    mask = _EXPONENT[x.dtype]
    exponents = torch.bitwise_and(x.view(_BITS[x.element_size()]), mask)
    count.add_(torch.count_nonzero(exponents.eq_(mask)))
