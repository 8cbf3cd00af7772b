"""Definition: PSAC, the query eigenbasis and the key error in it (QuantWM, App. D)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .blocks import FP16_MAX, divided, head_matmul, tree_sum
from .group_quantize import group_dequantize
from .kmeans import subtract_centroids

__all__ = ["compensate", "compensate_clustered", "eigenpairs", "query_subspace"]

CODE_MAX = 127


def query_subspace(
    moment: Tensor, count: Tensor, rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `steadykv.ops.psac`."""
    values, vectors, solved = eigenpairs(moment)
    active = solved & (count > 0)
    top = vectors[..., -rank:].flip(-1).float()  # eigh ascends
    largest = top.gather(1, top.abs().argmax(1, keepdim=True))
    top = torch.where(largest < 0, -top, top)
    top = torch.where(active[:, None, None], top, 0)
    energies = torch.where(active[:, None], values[:, -rank:].flip(-1).float(), 0)
    return top, energies, active.to(torch.uint8), (~solved & (count > 0)).to(torch.uint8)


def eigenpairs(moment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending eigenvalues [N, D] and columns [N, D, D] in FP64; bool [N], whether they exist."""
    finite = moment.isfinite().all(-1).all(-1)
    values, vectors = _eigh(torch.where(finite[:, None, None], moment, 0).double())
    return values, vectors, finite & vectors.isfinite().all(-1).all(-1)


def compensate(
    error: Tensor, basis: Tensor, moment: Tensor, retain: str
) -> tuple[Tensor, Tensor, Tensor]:
    """See `steadykv.ops.psac`."""
    u = basis.float()
    wanted = head_matmul(error, u).nan_to_num_(0.0, torch.inf, -torch.inf)  # of sums beyond FP32
    peak = divided(wanted.abs().amax(-1, keepdim=True), CODE_MAX)
    saturated = (peak > FP16_MAX).sum((-2, -1))
    alpha = peak.clamp(max=FP16_MAX).to(torch.float16)
    divisor = torch.where(alpha == 0, torch.inf, alpha.float())
    codes = (wanted / divisor).round_().clamp_(-CODE_MAX, CODE_MAX)
    if retain == "row":
        stored = alpha.float() * codes
        seen = head_matmul(moment, u)
        linear = head_matmul(error, seen)
        quadratic = head_matmul(stored, head_matmul(u.transpose(1, 2), seen))
        gain = 2 * tree_sum(stored * linear) - tree_sum(stored * quadratic)
        kept = (gain > 0)[..., None]
        codes, alpha = torch.where(kept, codes, 0), torch.where(kept, alpha, 0)
    return codes.to(torch.int8), alpha[..., 0], saturated


def compensate_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    tensors: Mapping[str, Tensor],
    grid: str,
    bits: int,
    group_size: int,
    basis: Tensor,
    moment: Tensor,
    retain: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `steadykv.ops.psac`."""
    _, tokens, width = x.shape
    rounded = group_dequantize(tensors, grid, bits, group_size, width, 0, tokens)
    error = subtract_centroids(x, centroids, ids, rounded)
    return compensate(error, basis, moment, retain)


def _eigh(moment: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh` of FP64 [N, D, D]; NaN where the solver did not converge."""
    try:
        values, vectors = torch.linalg.eigh(moment)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if moment.shape[0] == 1:
            return torch.full_like(moment[..., 0], torch.nan), torch.full_like(moment, torch.nan)
        parts = [_eigh(head) for head in moment.split(1)]
        values, vectors = (torch.cat(part) for part in zip(*parts, strict=True))
    return values, vectors
