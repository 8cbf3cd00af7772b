"""Definition: k-means, BF16 assignment, FP32 means in a fixed order (Quant VideoGen)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .blocks import FP16_MAX, gather_rows, row_blocks, to_bfloat16, tree_sum

__all__ = [
    "assign",
    "assign_centroids",
    "centroid_values",
    "cluster_means",
    "gather_rows",
    "kmeans",
    "quantize_centroids",
    "to_bfloat16",
]

E4M3_MAX = 448.0


def kmeans(
    x: Tensor, centroids: Tensor, iterations: int, with_ids: bool = True, rounded: bool = True
) -> tuple[Tensor | None, Tensor]:
    """See `steadykv.ops.kmeans`."""
    tokens = x.to(torch.bfloat16).float()
    means = centroids.float()
    for _ in range(iterations):
        means = cluster_means(x, assign(tokens, to_bfloat16(means)), means)
    if not rounded:
        return None, means
    final = to_bfloat16(means)
    # The last means moved the centroids, so ids are taken once more: stored ids and centroids
    # agree.
    return (assign(tokens, final) if with_ids else None), final


def assign_centroids(x: Tensor, centroids: Tensor) -> Tensor:
    """See `steadykv.ops.kmeans`."""
    return assign(x.to(torch.bfloat16).float(), to_bfloat16(centroids))


def quantize_centroids(means: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.kmeans`."""
    wanted = means.abs().amax(-1) / E4M3_MAX
    scale = wanted.clamp(max=FP16_MAX).to(torch.float16)
    divisor = torch.where(scale == 0, torch.inf, scale.float())
    # A scale that was rounded down leaves its largest entry a little above the last code.
    codes = (means / divisor[..., None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return {"centroids": codes, "centroid_scale": scale}, (wanted > FP16_MAX).sum(-1)


def centroid_values(tensors: Mapping[str, Tensor]) -> Tensor:
    """See `steadykv.ops.kmeans`."""
    if "centroid_scale" not in tensors:
        return tensors["centroids"]
    return tensors["centroids"].float().mul_(tensors["centroid_scale"][..., None])


def assign(tokens: Tensor, centroids: Tensor) -> Tensor:
    """argmin_j |mu_j|^2 - 2 x·mu_j, lowest j on ties: int64 [N, S].

    tokens: FP32 [N, S, D], rounded to BF16. centroids: BF16 [N, C, D].
    """
    mu = centroids.float()
    norms = tree_sum(mu * mu)
    heads, rows, _ = tokens.shape
    ids = torch.empty(heads, rows, dtype=torch.int64, device=tokens.device)
    for head in range(heads):
        for block in row_blocks(rows, 4 * mu.shape[1], tokens.device):
            distance = torch.addmm(norms[head], tokens[head, block], mu[head].T, alpha=-2)
            torch.argmin(distance, -1, out=ids[head, block])
    return ids


def cluster_means(x: Tensor, ids: Tensor, previous: Tensor) -> Tensor:
    """FP32 means of the members, added in token order; empty clusters keep `previous` [N, C, D]."""
    heads, clusters, width = previous.shape
    flat = (ids + clusters * torch.arange(heads, device=ids.device)[:, None]).view(-1)
    rows = x.reshape(-1, width)
    counts = flat.new_zeros(heads * clusters).scatter_add_(0, flat, torch.ones_like(flat))
    if x.device.type == "cpu":
        sums = x.new_zeros(heads * clusters, width).index_add_(0, flat, rows)
    else:
        # index_add_ uses float atomics here; sorted members and one loop a segment give the order
        # of the CPU.
        order = torch.sort(flat, stable=True).indices
        sums = torch.segment_reduce(rows[order], "sum", lengths=counts, axis=0, unsafe=True)
    means = (sums / counts.clamp(min=1)[:, None]).view(heads, clusters, width)
    return torch.where(counts.view(heads, clusters, 1) > 0, means, previous)
