"""Definition: QSAC (QuantWM eq. 10-14), with the diagonal metric or the full one (table 10)."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import row_blocks, tree_sum
from .psac import eigenpairs

__all__ = ["query_metric", "select_centroids"]


def query_metric(moment: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """See `steadykv.ops.qsac`."""
    values, vectors, solved = eigenpairs(moment)
    values = values.clamp(min=0)  # of a moment, only rounding takes one below zero
    mean = tree_sum(values) / values.shape[-1]  # the trace is the sum of the diagonal, too
    active = solved & (count > 0) & (mean > 0)
    root = vectors * (values / mean[:, None]).sqrt()[:, None]
    eye = torch.eye(moment.shape[-1], device=moment.device, dtype=torch.float32)
    return torch.where(active[:, None, None], root.float(), eye), active.to(torch.uint8)


def select_centroids(
    x: Tensor,
    centroids: Tensor,
    weight: Tensor | None,
    candidates: int,
    group_size: int,
    metric: Tensor | None = None,
    include_zero: bool = True,
) -> Tensor:
    """See `steadykv.ops.qsac`."""
    heads, rows, width = x.shape
    clusters = centroids.shape[1]
    candidates = min(candidates, clusters)
    ones = x.new_ones(width)
    ids = torch.empty(heads, rows, dtype=torch.int64, device=x.device)
    for head in range(heads):
        tokens, mu = x[head], centroids[head].float()
        w = None if weight is None else weight[head]
        seen, seen_mu, seen_w = tokens, mu, w
        if metric is not None:  # (k - mu)^T M (k - mu) = |k^T W - mu^T W|^2
            seen, seen_mu, seen_w = tokens @ metric[head], mu @ metric[head], None
        for block in row_blocks(rows, 4 * clusters * width, x.device):
            near = _nearest(seen[block], seen_mu, seen_w, candidates)
            residual = tokens[block, None] - mu[near]
            score = _range_score(residual, ones if w is None else w, group_size, include_zero)
            ids[head, block] = near.gather(1, score.argmin(-1, keepdim=True))[:, 0]
    return ids


def _nearest(tokens: Tensor, mu: Tensor, w: Tensor | None, candidates: int) -> Tensor:
    """Eq. 10: the least d_Q = sum_c w_c (k_c - mu_jc)^2, nearest first: int64 [rows, m]."""
    square = (tokens[:, None] - mu).square_()
    distance = (square if w is None else square.mul_(w)).sum(-1)
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
        low, high = part.amin(-1), part.amax(-1)
        span = high.clamp_(min=0) - low.clamp_(max=0) if include_zero else high - low
        score += tree_sum(weights) * (span * span)
    return score
