"""Definition: NaN and Inf become 0 and are counted per head."""

from torch import Tensor

__all__ = ["replace_nonfinite"]


def replace_nonfinite(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `steadykv.ops.finite`."""
    bad = ~x.isfinite()
    return x.masked_fill(bad, 0), bad.sum((-2, -1))
