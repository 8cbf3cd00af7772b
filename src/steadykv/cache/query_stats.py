"""Query statistics of one layer: the moment M, and the accumulators that wait to join it.

M = E[q q^T] per batch row and KV head is what a query-aware codec weighs key errors with (QuantWM,
arXiv 2609.26425, eq. 6). A span is not encoded with its own queries: those of a chunk whose span
is not encoded yet are pending, and join M when that span is settled, which is when it was encoded,
is kept dense for good, or has left the window.
"""

from __future__ import annotations

from torch import Tensor

from steadykv.codecs import QueryMoment

__all__ = ["QueryStats"]


class QueryStats:
    """M and pending accumulators, each FP32 [B, H, D, D] with a count int64 [B, H].

    heads: KV heads H. own_first_span: also keep the queries of commit passes alone, for a first
    span that is encoded with its own statistics instead of none (methods.md decision 6).
    """

    def __init__(self, heads: int, own_first_span: bool = False) -> None:
        self.heads = heads
        self.own_first_span = own_first_span
        self.reset()

    def reset(self) -> None:
        """Forget every query."""
        self._moment: QueryMoment | None = None
        self._pending: dict[int, QueryMoment] = {}
        self._own: dict[int, QueryMoment] = {}
        self._pass: QueryMoment | None = None

    def observe(self, queries: Tensor, group: int) -> None:
        """Add queries [B, Hq, S, D] of a chunk that will be packed with `group`.

        Allocates an accumulator for a new group, and `workspace_nbytes` for a moment.
        """
        if group not in self._pending:
            self._pending[group] = self._empty(queries)
        self._pending[group].update(queries)
        if self.own_first_span and self._moment is None:
            if self._pass is None:
                self._pass = self._empty(queries)
            self._pass.update(queries)

    def begin_pass(self) -> None:
        """The open chunk was written: what was seen of it before was not its commit pass."""
        self._pass = None

    def end_chunk(self, group: int) -> None:
        """The open chunk was committed: its last pass was the commit pass."""
        if self._pass is not None:
            self._own[group] = _joined(self._own.get(group), self._pass)
            self._pass = None

    def settle(self, group: int) -> None:
        """Fold the pending queries of `group` into M."""
        pending = self._pending.pop(group, None)
        if pending is not None:
            self._moment = _joined(self._moment, pending)
            self._own, self._pass = {}, None

    def for_encoding(self, group: int) -> QueryMoment | None:
        """What the span `group` is to be encoded with; None is a cold start. Not a copy."""
        return self._own.get(group) if self._moment is None else self._moment

    @property
    def has_history(self) -> bool:
        """Whether M exists; before, `for_encoding` gives a first span's own queries or None."""
        return self._moment is not None

    @property
    def pending_groups(self) -> tuple[int, ...]:
        """Groups whose queries are not in M yet, oldest first."""
        return tuple(sorted(self._pending))

    @property
    def nbytes(self) -> int:
        """Bytes of every accumulator."""
        held = (self._moment, self._pass, *self._pending.values(), *self._own.values())
        return sum(moment.nbytes for moment in held if moment is not None)

    @property
    def fold_nbytes(self) -> int:
        """Upper bound of what folding one moment into another allocates."""
        held = (self._moment, *self._pending.values())
        return 2 * max((moment.nbytes for moment in held if moment is not None), default=0)

    def workspace_nbytes(self, queries: Tensor) -> int:
        """Upper bound of what `observe` allocates besides a new accumulator."""
        row = 4 * queries.shape[1] * queries.shape[2] * queries.shape[3]
        # The mean of these queries and its folding in; one batch row in FP32, finite, heads pooled.
        return 2 * self.fold_nbytes + 3 * row

    def _empty(self, queries: Tensor) -> QueryMoment:
        batch, dim = queries.shape[0], queries.shape[3]
        return QueryMoment.empty(batch, self.heads, dim, queries.device)


def _joined(moment: QueryMoment | None, other: QueryMoment) -> QueryMoment:
    """`moment` with `other` folded in; `other` itself, taken over, where there is none."""
    if moment is None:
        return other
    moment.fold(other)
    return moment
