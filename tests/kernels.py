"""Where kernels are tested: on the GPU if there is one, else interpreted on the CPU."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def clustered_tokens(
    heads: int, tokens: int, width: int, clusters: int = 9, seed: int = 0
) -> torch.Tensor:
    """BF16 [N, S, D] around a few means, as neighbouring frames are, with some large channels."""
    generator = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(heads, clusters, width, generator=generator)
    chosen = torch.randint(0, clusters, (heads, tokens), generator=generator)
    noise = torch.randn(heads, tokens, width, generator=generator)
    x = means.gather(1, chosen[..., None].expand(-1, -1, width)) + 0.5 * noise
    x[..., :: max(1, width // 5)] *= 4
    return x.bfloat16().to(DEVICE)


def start_centroids(x: torch.Tensor, count: int, seed: int = 1) -> torch.Tensor:
    """BF16 [N, C, D]: tokens of each head, the same places in all."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(x.shape[1], generator=generator)[:count]
    return x[:, chosen.to(x.device)].bfloat16()


def nearest_gap(x: torch.Tensor, centroids: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """By how much the chosen centroid's score is above the least one: FP64 [N, S].

    The score |mu|^2 - 2 x·mu of BF16 numbers, in FP64.
    """
    mu, tokens = centroids.double(), x.bfloat16().double()
    scores = (mu * mu).sum(-1)[:, None] - 2 * tokens @ mu.mT
    return scores.gather(2, ids.long()[..., None])[..., 0] - scores.amin(-1)


def score_bound(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """What FP32 sums may add to a difference of two scores: FP64 [N, 1].

    Two dot products and two norms of D terms, each off by at most D·2^-24 times its absolute sum.
    """
    mu, tokens = centroids.double(), x.bfloat16().double()
    size = (mu * mu).sum(-1).amax(-1) + 2 * tokens.norm(dim=-1).amax(-1) * mu.norm(dim=-1).amax(-1)
    return (2 * x.shape[-1] * 2.0**-24 * size)[:, None]
