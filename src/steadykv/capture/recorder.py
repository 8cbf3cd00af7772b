"""A recording cache: stands around the cache that a host uses, and keeps what passes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from steadykv.cache.policy import Piece, SpanPolicy, TokenRange
from steadykv.cache.query_stats import QueryStats
from steadykv.capture.format import CapturedSpan
from steadykv.capture.plan import check_policy
from steadykv.capture.sample import QuerySample
from steadykv.capture.selection import Selection
from steadykv.config import CachePolicy
from steadykv.errors import ConfigError, PositionError, ShapeError

__all__ = ["RecordingCache", "RecordingLayer"]

Rotation = Callable[[int, int], Tensor]
"""(start, end) -> FP32 [2, S, D/2]: cosines and sines of the tokens in between."""

TOKEN_DIM = {"BSHD": 1, "BHSD": 2}


class LayerLike(Protocol):
    """What the recorder needs of one layer's cache."""

    def write(self, k: Tensor, v: Tensor, start: int) -> None: ...
    def observe_queries(self, q: Tensor) -> None: ...
    def read(self) -> tuple[Tensor, Tensor]: ...
    def spans(self) -> list[TokenRange]: ...


class CacheLike(Protocol):
    """What the recorder needs of a cache."""

    def __getitem__(self, layer: int) -> LayerLike: ...
    def commit(self) -> None: ...


class RecordingCache:
    """Hands every call on to `inner` and keeps keys, values, query statistics and later queries.

    inner: answers the host; a BF16 cache, so that the trajectory is the one without packing.
    selection: what is kept. num_layers, num_heads (key/value heads), frame_tokens: of the host.
    policy: span_chunks, window and sink, as a packing cache would have them. layout: of the host's
    tensors. rotation: of the host's rotary embedding if it stores keys before it; sampled queries
    are then kept after it, as attention uses them.

    An instrument: it copies what it keeps to the CPU and waits for the device. Layers that are not
    selected are the inner cache's own. Raises ConfigError.
    """

    def __init__(
        self,
        inner: CacheLike,
        selection: Selection,
        *,
        num_layers: int,
        num_heads: int,
        frame_tokens: int,
        policy: CachePolicy,
        layout: str = "BSHD",
        rotation: Rotation | None = None,
    ) -> None:
        if layout not in TOKEN_DIM:
            raise ConfigError(f"layout is {layout!r}: expected {' or '.join(TOKEN_DIM)}")
        check_policy(policy)
        self.inner, self._rotation = inner, rotation
        self.heads = selection.chosen("heads", num_heads)
        self._layers = {
            layer: RecordingLayer(
                inner[layer],
                layer,
                selection,
                heads=self.heads,
                num_heads=num_heads,
                policy=SpanPolicy(policy, frame_tokens),
                token_dim=TOKEN_DIM[layout],
                rotation=rotation,
            )
            for layer in selection.chosen("layers", num_layers)
        }

    def __getitem__(self, layer: int) -> LayerLike:
        return self._layers[layer] if layer in self._layers else self.inner[layer]

    def commit(self) -> None:
        """Commit the open chunk in the inner cache and in the recording."""
        self.inner.commit()
        for layer in self._layers.values():
            layer.commit()

    def captured(self) -> list[CapturedSpan]:
        """Every selected span that is complete, layer by layer, with the queries seen so far."""
        return [span for layer in self._layers.values() for span in layer.captured()]

    def rope(self) -> dict[int, Tensor]:
        """Span -> FP32 [2, S, D/2] on the CPU; empty where the host gave no `rotation`."""
        if self._rotation is None:
            return {}
        ranges = {span.index: (span.start, span.end) for span in self.captured()}
        return {index: self._rotation(*tokens).cpu() for index, tokens in ranges.items()}


@dataclass
class _Waiting:
    """A committed piece whose span is not complete: K and V [B, h, S, D] on the device."""

    piece: Piece
    k: Tensor
    v: Tensor


@dataclass
class _Kept:
    """A complete span; queries are still being sampled."""

    fields: dict[str, Any]
    sample: QuerySample = field(repr=False)

    @property
    def range(self) -> TokenRange:
        return self.fields["start"], self.fields["end"]


class RecordingLayer:
    """One layer of a `RecordingCache`: write, observe_queries, read and spans, as the inner one."""

    def __init__(
        self,
        inner: LayerLike,
        layer: int,
        selection: Selection,
        *,
        heads: tuple[int, ...],
        num_heads: int,
        policy: SpanPolicy,
        token_dim: int,
        rotation: Rotation | None,
    ) -> None:
        self.inner, self.layer, self.selection = inner, layer, selection
        self.heads, self.num_heads, self.policy = heads, num_heads, policy
        self._token_dim, self._rotation = token_dim, rotation
        self._stats = QueryStats(len(heads), own_first_span=True)
        self._open: tuple[int, int, Tensor, Tensor] | None = None
        self._end = self._chunks = self._step = 0
        self._last: Piece | None = None
        self._waiting: list[_Waiting] = []
        self._kept: list[_Kept] = []
        self._clean: dict[int, int] = {}  # chunk -> number of its last pass
        self._met: list[_Kept] = []  # spans that the open chunk attends to as a whole

    # --- what a host calls ------------------------------------------------------------------

    def write(self, k: Tensor, v: Tensor, start: int) -> None:
        """Hand the chunk on, then keep a copy of the selected heads."""
        self.inner.write(k, v, start)
        with _own_tensors():
            is_same = self._open is not None and start == self._open[0]
            if self._open is not None and not is_same:
                self.commit()
            k, v = (
                self._select(x, self.num_heads).clone(memory_format=torch.contiguous_format)
                for x in (k, v)
            )
            self._step = self._step + 1 if is_same else 0
            self._open = start, start + k.shape[2], k, v
            self._stats.begin_pass()
            ranges = self.inner.spans()
            self._met = [
                kept
                for kept in self._kept
                if any(low <= kept.range[0] and kept.range[1] <= high for low, high in ranges)
            ]

    def observe_queries(self, q: Tensor) -> None:
        """Hand the queries on, add them to the statistics, and offer them to complete spans."""
        self.inner.observe_queries(q)
        if self._open is None:
            raise PositionError(
                f"layer {self.layer} has no open chunk; expected write() before observe_queries()"
            )
        with _own_tensors():
            start, end = self._open[:2]
            queries = self._select(q, q.shape[3 - self._token_dim])
            if queries.shape[2] != end - start:
                raise ShapeError(
                    f"q has {queries.shape[2]} tokens, expected the {end - start} of the open "
                    "chunk; observe all of its queries at once"
                )
            self._stats.observe(queries, self._current_group())
            if not self._met or not self.selection.queries:
                return
            rope = None if self._rotation is None else self._rotation(start, end)
            for kept in self._met:
                kept.sample.offer(queries, start, self._chunks, self._step, rope)

    def read(self, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The inner cache's keys and values."""
        return self.inner.read() if out is None else self.inner.read(out=out)  # type: ignore[call-arg]

    def spans(self) -> list[TokenRange]:
        """Token ranges that `read` returns, in its order."""
        return self.inner.spans()

    # --- recording --------------------------------------------------------------------------

    def commit(self) -> None:
        """The open chunk is history; keep every span that it completes. Idempotent.

        Follows `LayerCache.commit`, so that a span gets the statistics that a cache has for it.
        """
        if self._open is None:
            return
        with _own_tensors():
            start, end, k, v = self._open
            pieces = self.policy.place(start, end, self._chunks, self._last)
            for piece in pieces:
                rows = slice(piece.start - start, piece.end - start)
                self._waiting.append(_Waiting(piece, k[:, :, rows], v[:, :, rows]))
            self._clean[self._chunks] = self._step
            self._open, self._end, self._last = None, end, pieces[-1]
            self._chunks += 1
            self._stats.end_chunk(pieces[-1].group)
            self._settle()
            ready = self.policy.ready([w.piece for w in self._waiting], self._chunks - 1)
            for group in ready:
                self._keep(group)
                self._waiting = [w for w in self._waiting if w.piece not in group]
                self._settle()

    def captured(self) -> list[CapturedSpan]:
        """Every selected span that is complete, with the queries seen so far."""
        return [self._finished(kept) for kept in self._kept]

    def _keep(self, group: tuple[Piece, ...]) -> None:
        index = group[0].group
        if self.selection.spans is not None and index not in self.selection.spans:
            return
        moment, statistics = self._stats.for_encoding(index), "none"
        if moment is not None:
            statistics = "history" if self._stats.has_history else "own"
        parts = [w for w in self._waiting if w.piece in group]
        fields = {
            "layer": self.layer,
            "index": index,
            "start": group[0].start,
            "end": group[-1].end,
            "chunks": tuple((piece.start, piece.end) for piece in group),
            "k": torch.cat([w.k for w in parts], dim=2).cpu(),
            "v": torch.cat([w.v for w in parts], dim=2).cpu(),
            "statistics": statistics,
            # The statistics go on growing: a copy.
            "moment": None if moment is None else moment.moment.to("cpu", copy=True),
            "moment_count": None if moment is None else moment.count.to("cpu", copy=True),
        }
        name = f"{self.selection.seed}/{self.layer}/{index}"
        self._kept.append(_Kept(fields, QuerySample(self.selection.queries, name)))

    def _finished(self, kept: _Kept) -> CapturedSpan:
        sample = kept.sample
        token, chunk, step = sample.places.unbind(1)
        last = [self._clean.get(number, -1) for number in chunk.tolist()]
        return CapturedSpan(
            **kept.fields,
            q=sample.queries,
            query_token=token.contiguous(),
            query_step=step.int(),
            query_clean=step.eq(torch.tensor(last, dtype=step.dtype)).to(torch.uint8),
        )

    def _select(self, x: Tensor, heads: int) -> Tensor:
        """[B, h, S, D] of the kept key/value heads, or of the query heads that read them."""
        x = x if self._token_dim == 2 else x.transpose(1, 2)
        if len(self.heads) == self.num_heads:
            return x
        group = heads // self.num_heads
        chosen = [head * group + i for head in self.heads for i in range(group)]
        return x[:, chosen]

    def _current_group(self) -> int:
        """Group of the open chunk's last piece, or of the next chunk's first one."""
        start, end = (self._end, self._end + 1) if self._open is None else self._open[:2]
        return self.policy.place(start, end, self._chunks, self._last)[-1].group

    def _settle(self) -> None:
        """Fold into the statistics the queries of every group that nothing waits for any more."""
        needed = {waiting.piece.group for waiting in self._waiting} | {self._current_group()}
        for group in self._stats.pending_groups:
            if group not in needed:
                self._stats.settle(group)


@contextmanager
def _own_tensors() -> Iterator[None]:
    """Tensors that outlive the host's inference mode and carry no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield
