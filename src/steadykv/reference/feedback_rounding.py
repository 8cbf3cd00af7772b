"""Definition: feedback rounding, which leaves PSAC the error that PSAC can store.

Rounding one channel makes an error; the channels after it are moved so that the query-weighted
error e^T H e grows least (the feedback of GPTQ, arXiv 2210.17323). H is the query moment without
the directions that PSAC corrects afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import row_blocks, tree_sum
from .group_quantize import affine_zero_grid, affine_zero_tensors
from .kmeans import subtract_centroids

__all__ = ["feedback_factor", "feedback_quantize", "feedback_quantize_clustered"]

# The grid ends below 65,504·255·15 = 2.5e8, so what lies beyond this limit saturates anyway; under
# it, neither an error over F_ii nor the sum of D of them leaves FP32.
RESIDUAL_MAX = 1e30


def feedback_factor(
    moment: Tensor, count: Tensor, vectors: Tensor, values: Tensor, damping: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `steadykv.ops.feedback_rounding`."""
    diagonal = moment.diagonal(dim1=-2, dim2=-1)
    wanted = (count > 0) & (diagonal != 0).any(-1)
    usable = wanted & moment.isfinite().all(-1).all(-1)
    eye = torch.eye(moment.shape[-1], dtype=torch.float64, device=moment.device)
    heads = [
        _factor(torch.where(on, m, eye), u.double(), energies.double(), damping * eye)
        for m, u, energies, on in zip(moment, vectors, values, usable, strict=True)
    ]
    orders, factors, solved = (torch.stack(part) for part in zip(*heads, strict=True))
    active = usable & solved
    order = torch.where(active[:, None], orders, torch.arange(len(eye), device=moment.device))
    factor = torch.where(active[:, None, None], factors, eye.float())
    return order, factor, active.to(torch.uint8), (wanted & ~active).to(torch.uint8)


def _factor(m: Tensor, u: Tensor, values: Tensor, ridge: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The order [D], F [D, D] and whether it exists, for one head in FP64."""
    h = m - (u * values) @ u.T + ridge * (tree_sum(m.diagonal()) / len(m))
    order = h.diagonal().argsort(descending=True, stable=True)
    inverse, singular = torch.linalg.inv_ex(h[order][:, order])
    factor, indefinite = torch.linalg.cholesky_ex(inverse, upper=True)  # F^T F = inv(H)
    # Only F_ij / F_ii counts: without this power of two F would have the size of 1 / sqrt(M).
    factor = (factor / (factor[0, 0] / torch.frexp(factor[0, 0]).mantissa)).float()
    return order, factor, (singular == 0) & (indefinite == 0) & factor.isfinite().all()


def feedback_quantize(
    x: Tensor,
    order: Tensor,
    factor: Tensor,
    bits: int,
    group_size: int,
    include_zero: bool = True,
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.feedback_rounding`."""
    heads, rows, width = x.shape
    top = 2**bits - 1
    grid = affine_zero_grid(x, bits, group_size, include_zero)
    back = order.argsort(1)
    group = (order // group_size)[:, None]
    codes = torch.empty_like(x, dtype=torch.uint8)
    for block in row_blocks(rows, 8 * heads * width, x.device):
        # Channels first and in order, [N, D, rows], so that one channel is a run of memory.
        rest = _channels_first(x[:, block], order).clamp_(-RESIDUAL_MAX, RESIDUAL_MAX)
        moved = torch.empty_like(rest)
        for i in range(width):
            scale, zero = (_of_group(t[:, block], group[..., i]) for t in (grid.scale, grid.zero))
            divisor = torch.where(scale == 0, torch.inf, scale)
            code = (rest[:, i] / divisor).round_().add_(zero).clamp_(0, top)
            error = rest[:, i] - (code - zero).mul_(scale)
            error.div_(factor[:, i, i, None])
            later = moved[:, i + 1 :]
            torch.mul(factor[:, i, i + 1 :, None], error[:, None], out=later)
            rest[:, i + 1 :] -= later
            rest[:, i] = code
        codes[:, block] = _channels_first(rest.to(torch.uint8).transpose(1, 2), back).mT
    return affine_zero_tensors(codes, grid, bits), grid.saturated


def feedback_quantize_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    order: Tensor,
    factor: Tensor,
    bits: int,
    group_size: int,
    include_zero: bool = True,
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.feedback_rounding`."""
    residual = subtract_centroids(x, centroids, ids)
    return feedback_quantize(residual, order, factor, bits, group_size, include_zero)


def _channels_first(x: Tensor, order: Tensor) -> Tensor:
    """[N, S, D] as a new [N, D, S], the channels of each head in the order [N, D]."""
    return x.mT.gather(1, order[..., None].expand(x.mT.shape))


def _of_group(x: Tensor, group: Tensor) -> Tensor:
    """One group [N, 1] of each head out of [N, S, G]: a new [N, S]."""
    return x.gather(2, group[..., None].expand(*x.shape[:2], 1))[..., 0]
