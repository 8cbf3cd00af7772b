"""Definition: M = E[q q^T] as a running mean (QuantWM eq. 6), and channel weights (eq. 9)."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import tree_sum

__all__ = ["accumulate_moment", "channel_weight", "merge_moment"]


def accumulate_moment(moment: Tensor, count: Tensor, queries: Tensor) -> None:
    """See `steadykv.ops.query_moment`."""
    batch, heads, width, _ = moment.shape
    mean = torch.empty_like(moment)
    for row in range(batch):  # one product shape whatever the batch
        q = queries[row].float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        q = q.reshape(heads, -1, width)
        torch.bmm(q.transpose(1, 2), q, out=mean[row])
    added = queries.shape[1] // heads * queries.shape[2]
    mean /= added
    merge_moment(moment, count, mean, torch.full_like(count, added))


def merge_moment(moment: Tensor, count: Tensor, other: Tensor, other_count: Tensor) -> None:
    """See `steadykv.ops.query_moment`."""
    share = other_count.float() / (count + other_count).clamp(min=1).float()
    moment += (other - moment) * share[..., None, None]
    count += other_count


def channel_weight(moment: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """See `steadykv.ops.query_moment`."""
    energy = moment.diagonal(dim1=-2, dim2=-1)
    mean = tree_sum(energy) / energy.shape[-1]
    active = (count > 0) & (mean > 0) & mean.isfinite()
    return torch.where(active[:, None], energy / mean[:, None], 1.0), active.to(torch.uint8)
