"""Definition: PSAC, the query eigenbasis and the key error in it (QuantWM, App. D)."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import FP16_MAX, head_matmul, tree_sum

__all__ = ["compensate", "query_basis"]

CODE_MAX = 127


def query_basis(moment: Tensor, count: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `steadykv.ops.psac`."""
    finite = moment.isfinite().all(-1).all(-1)
    vectors = _eigenvectors(torch.where(finite[:, None, None], moment, 0).double())
    top = vectors[..., -rank:].flip(-1).float()  # eigh ascends
    solved = finite & top.isfinite().all(-1).all(-1)
    active = solved & (count > 0)
    largest = top.gather(1, top.abs().argmax(1, keepdim=True))
    basis = torch.where(largest < 0, -top, top)
    basis = torch.where(active[:, None, None], basis, 0).to(torch.bfloat16)
    return basis, active.to(torch.uint8), (~solved & (count > 0)).to(torch.uint8)


def compensate(
    error: Tensor, basis: Tensor, moment: Tensor, retain: str
) -> tuple[Tensor, Tensor, Tensor]:
    """See `steadykv.ops.psac`."""
    u = basis.float()
    wanted = head_matmul(error, u)
    peak = wanted.abs().amax(-1, keepdim=True) / CODE_MAX
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


def _eigenvectors(moment: Tensor) -> Tensor:
    """Columns by ascending eigenvalue, FP64 [N, D, D]; NaN where the solver did not converge."""
    try:
        return torch.linalg.eigh(moment)[1]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if moment.shape[0] == 1:
            return torch.full_like(moment, torch.nan)
        return torch.cat([_eigenvectors(head) for head in moment.split(1)])
