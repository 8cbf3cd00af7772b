"""Contract: the running second moment of queries."""

from __future__ import annotations

from torch import Tensor

from ..errors import ShapeError
from .dispatch import resolve

__all__ = ["accumulate_moment", "channel_weight", "merge_moment"]


def accumulate_moment(
    moment: Tensor, count: Tensor, queries: Tensor, *, backend: str | None = None
) -> None:
    """Folds queries into the running mean of q q^T, in place.

    moment: FP32 [B, H, D, D]. count: int64 [B, H]. queries: float [B, Hq, S, D], Hq a multiple of
    H; query head i feeds KV head floor(i·H / Hq). NaN and Inf count as 0. Allocates an FP32 copy of
    one batch row of queries. QuantWM (arXiv 2609.26425) eq. 6. Raises ShapeError.
    """
    batch, heads, width, _ = moment.shape
    shape = tuple(queries.shape)
    if len(shape) != 4 or shape[0] != batch or shape[3] != width or shape[1] % heads:
        raise ShapeError(
            f"queries are {shape}: expected [{batch}, a multiple of {heads}, any, {width}]"
        )
    if shape[1] and shape[2]:
        resolve("query_moment", moment.device, backend).accumulate_moment(moment, count, queries)


def merge_moment(
    moment: Tensor, count: Tensor, other: Tensor, other_count: Tensor, *, backend: str | None = None
) -> None:
    """Folds the mean [B, H, D, D] of `other_count` [B, H] more queries into the first, in place."""
    module = resolve("query_moment", moment.device, backend)
    module.merge_moment(moment, count, other, other_count)


def channel_weight(
    moment: Tensor, count: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Weight of each key channel: w_c = M_cc / mean_c M_cc.

    moment: FP32 [N, D, D], count: int64 [N]. Returns FP32 [N, D] and uint8 [N], whether the weights
    are in use; they are all 1 for a head without queries, with a zero trace or with a moment that
    is not finite. QuantWM (arXiv 2609.26425) eq. 9.
    """
    module = resolve("query_moment", moment.device, backend)
    return module.channel_weight(moment, count)
