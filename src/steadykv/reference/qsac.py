"""Definition: QSAC (QuantWM eq. 10-14)."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import row_blocks, tree_sum

__all__ = ["select_centroids"]


def select_centroids(
    x: Tensor,
    centroids: Tensor,
    weight: Tensor | None,
    candidates: int,
    group_size: int,
    include_zero: bool = True,
) -> Tensor:
    """See `steadykv.ops.qsac`."""
    heads, rows, width = x.shape
    clusters = centroids.shape[1]
    candidates = min(candidates, clusters)
    mu = centroids.float()
    weight = x.new_ones(heads, width) if weight is None else weight
    ids = torch.empty(heads, rows, dtype=torch.int64, device=x.device)
    for head in range(heads):
        for block in row_blocks(rows, 4 * clusters * width, x.device):
            tokens, w = x[head, block], weight[head]
            near = _nearest(tokens, mu[head], w, candidates)
            residual = tokens[:, None] - mu[head][near]
            best = _range_score(residual, w, group_size, include_zero).argmin(-1, keepdim=True)
            ids[head, block] = near.gather(1, best)[:, 0]
    return ids


def _nearest(tokens: Tensor, mu: Tensor, w: Tensor, candidates: int) -> Tensor:
    """Eq. 10: the least d_Q = sum_c w_c (k_c - mu_jc)^2, nearest first: int64 [rows, m]."""
    difference = tokens[:, None] - mu
    distance = difference.square_().mul_(w).sum(-1)
    # FP32 numbers above zero sort like their bits; the index below makes every key distinct, so
    # ties are settled.
    key = (distance.view(torch.int32).to(torch.int64) << 32) | torch.arange(
        mu.shape[0], device=mu.device
    )
    return key.topk(candidates, largest=False).values & 0xFFFFFFFF


def _range_score(residual: Tensor, w: Tensor, group_size: int, include_zero: bool) -> Tensor:
    """Eq. 12-14: sum_g (sum_{c in g} w_c) R_g^2, R_g the quantizer's own range, of [..., D]."""
    score = residual.new_zeros(residual.shape[:-1])
    for part, weights in zip(residual.split(group_size, -1), w.split(group_size), strict=True):
        high, low = part.amax(-1), part.amin(-1)
        if include_zero:
            high, low = high.clamp_(min=0), low.clamp_(max=0)
        span = high - low
        score += tree_sum(weights) * (span * span)
    return score
