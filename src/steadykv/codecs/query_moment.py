"""The query statistics of one layer: M = E[q q^T] for each batch row and key/value head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..errors import ShapeError

__all__ = ["QueryMoment"]


@dataclass
class QueryMoment:
    """Running mean of q q^T and the number of queries in it; updated in place (stable addresses).

    moment: FP32 [B, H, D, D]. count: int64 [B, H].
    has_queries: whether any count is above 0, kept on the host so that encoding need not ask the
    device; None makes `QueryMoment` look once, when it is built.
    """

    moment: Tensor
    count: Tensor
    has_queries: bool | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.moment.shape)
        if len(shape) != 4 or shape[2] != shape[3] or tuple(self.count.shape) != shape[:2]:
            raise ShapeError(
                f"moment is {shape}, count {tuple(self.count.shape)}: "
                "expected [B, H, D, D] and [B, H]"
            )
        if self.moment.dtype != torch.float32 or self.count.dtype != torch.int64:
            raise ShapeError(
                f"moment is {self.moment.dtype}, count {self.count.dtype}: "
                "expected float32 and int64"
            )
        if self.has_queries is None:
            self.has_queries = bool((self.count > 0).any())

    @classmethod
    def empty(
        cls, batch: int, heads: int, head_dim: int, device: torch.device | str = "cpu"
    ) -> QueryMoment:
        """No queries yet. Allocates 4·D² + 8 bytes a head."""
        moment = torch.zeros(batch, heads, head_dim, head_dim, dtype=torch.float32, device=device)
        return cls(moment, torch.zeros(batch, heads, dtype=torch.int64, device=device), False)

    def update(self, queries: Tensor) -> None:
        """Folds in queries [B, Hq, S, D]; query head i feeds head floor(i·H / Hq). No host sync."""
        with ops.full_precision(self.moment.device):
            ops.accumulate_moment(self.moment, self.count, queries)
        self.has_queries = self.has_queries or queries.shape[1] * queries.shape[2] > 0

    def fold(self, pending: QueryMoment) -> None:
        """Folds in another mean, weighted by its count."""
        with ops.full_precision(self.moment.device):
            ops.merge_moment(self.moment, self.count, pending.moment, pending.count)
        self.has_queries = self.has_queries or pending.has_queries

    def reset(self) -> None:
        """Forgets every query, in place."""
        self.moment.zero_()
        self.count.zero_()
        self.has_queries = False

    @property
    def nbytes(self) -> int:
        """Bytes of the state; reported beside the payload, not in it."""
        return sum(t.numel() * t.element_size() for t in (self.moment, self.count))
