"""Definition: k-means, BF16 assignment, FP32 means in a fixed order (Quant VideoGen)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .blocks import gather_rows, row_blocks, to_bfloat16, tree_sum

__all__ = [
    "assign",
    "assign_centroids",
    "centroid_values",
    "cluster_means",
    "gather_rows",
    "kmeans",
    "quantize_centroids",
    "refit_centroids",
    "subtract_centroids",
    "to_bfloat16",
]

E4M3_MAX = 448.0
SCALE_LEAST, SCALE_TOP = 2.0**-24, 2.0**15  # the powers of two that FP16 holds end here


def kmeans(
    x: Tensor,
    centroids: Tensor,
    iterations: int,
    with_ids: bool = True,
    rounded: bool = True,
    reseed_empty: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """See `steadykv.ops.kmeans`."""
    tokens = x.to(torch.bfloat16).float()
    means = centroids.float()
    for _ in range(iterations):
        mu = to_bfloat16(means)
        ids = assign(tokens, mu)
        means = cluster_means(x, ids, means)
        if reseed_empty:
            means = _reseed(x, ids, mu, means)
    if not rounded:
        return None, means
    final = to_bfloat16(means)
    # The last means moved the centroids, so ids are taken once more: stored ids and centroids
    # agree.
    return (assign(tokens, final) if with_ids else None), final


def assign_centroids(x: Tensor, centroids: Tensor) -> Tensor:
    """See `steadykv.ops.kmeans`."""
    return assign(x.to(torch.bfloat16).float(), to_bfloat16(centroids))


def quantize_centroids(means: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """See `steadykv.ops.kmeans`."""
    peak = means.abs().amax(-1)
    # m·2^e with m from 1/2 to 1, and 448 = 7/8·2^9.
    mantissa, exponent = torch.frexp(peak.clamp(E4M3_MAX * SCALE_LEAST, E4M3_MAX * SCALE_TOP))
    exponent = exponent - 9 + (mantissa > 0.875)
    scale = ((exponent + 127) << 23).view(torch.float32)  # 2^exponent; exp2 may round
    codes = (means / scale[..., None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    values = (codes.float() * scale[..., None]).to(torch.bfloat16)  # exact
    saturated = (peak > E4M3_MAX * SCALE_TOP).sum(-1)
    return {"centroids": codes, "centroid_scale": scale.to(torch.float16)}, values, saturated


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


def _reseed(x: Tensor, ids: Tensor, mu: Tensor, means: Tensor) -> Tensor:
    """The n-th empty cluster of a head takes its token that is n-th farthest from its centroid."""
    counts = means.new_zeros(means.shape[:2]).scatter_add_(1, ids, torch.ones_like(x[..., 0]))
    empty = counts == 0
    distance = _token_errors(x, mu, ids)
    farthest = distance.sort(stable=True, dim=1, descending=True).indices[:, : means.shape[1]]
    number = (empty.cumsum(1) - 1).clamp_(min=0)
    return torch.where(empty[..., None], gather_rows(x, farthest.gather(1, number)), means)


def refit_centroids(x: Tensor, residual: Tensor, ids: Tensor, centroids: Tensor) -> Tensor:
    """See `steadykv.ops.kmeans`."""
    heads = [slice(head, head + 1) for head in range(x.shape[0])]  # one copy of a head at a time
    means = [cluster_means(x[n] - residual[n], ids[n], centroids[n].float()) for n in heads]
    fitted = to_bfloat16(torch.cat(means))
    before, after = (tree_sum(_token_errors(x, mu, ids, residual)) for mu in (centroids, fitted))
    return torch.where((after < before)[:, None, None], fitted, centroids)


def subtract_centroids(
    x: Tensor, centroids: Tensor, ids: Tensor, rounded: Tensor | None = None
) -> Tensor:
    """See `steadykv.ops.kmeans`."""
    out = torch.empty_like(x) if rounded is None else rounded
    for at, value in _values(x, centroids, ids, rounded):
        torch.sub(x[at], value, out=out[at])
    return out


def _token_errors(
    x: Tensor, centroids: Tensor, ids: Tensor, residual: Tensor | None = None
) -> Tensor:
    """|x - (mu[id] + residual)|^2 of each token, FP32 [N, S], residual 0 by default."""
    errors = torch.empty_like(x[..., 0])
    for at, value in _values(x, centroids, ids, residual):
        errors[at] = tree_sum(value.sub_(x[at]).square_())
    return errors


def _values(
    x: Tensor, centroids: Tensor, ids: Tensor, residual: Tensor | None
) -> Iterator[tuple[tuple[int, slice], Tensor]]:
    """mu[id] + residual in row blocks: (head, rows) and FP32 [rows, D]."""
    heads, rows, width = x.shape
    for head in range(heads):
        table = centroids[head].float()  # a mixed sum would make an FP32 copy of all tokens
        for block in row_blocks(rows, 4 * width, x.device):
            value = table.index_select(0, ids[head, block])
            if residual is not None:
                value += residual[head, block]
            yield (head, block), value


def cluster_means(x: Tensor, ids: Tensor, previous: Tensor) -> Tensor:
    """See `steadykv.ops.kmeans`."""
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
