"""One layer's cache without tensors: the same positions, cuts and statistics, counted in bytes.

`Progress` and `SpanPolicy` are the cache's own; what `LayerCache` keeps beside them is mirrored
here step by step, and a test holds the two to the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from steadykv.cache.checks import check_span
from steadykv.cache.policy import Piece, SpanPolicy
from steadykv.cache.progress import Progress
from steadykv.config import CacheConfig, CodecConfig
from steadykv.errors import ConfigError
from steadykv.planning.sizes import SpanSize, span_size

__all__ = ["Geometry", "Moment", "Replay"]

_COUNTER = 8  # int64, of non-finite numbers


@dataclass(frozen=True)
class Geometry:
    """B, H, D of a layer's keys and values, tokens of a latent frame, bytes of a dense number."""

    batch: int
    heads: int
    head_dim: int
    frame_tokens: int
    itemsize: int = 2

    def dense(self, tokens: int) -> int:
        """Bytes of so many dense tokens of one tensor."""
        return self.batch * self.heads * self.head_dim * self.itemsize * tokens

    @property
    def query_moment(self) -> int:
        """Bytes of one accumulator of query statistics."""
        return self.batch * self.heads * (4 * self.head_dim**2 + 8)


@dataclass(frozen=True)
class Moment:
    """What a layer holds at one moment, and the most that one call takes beside it.

    parts: bytes by ledger part. payload: bytes of the packed spans alone, without their flags.
    packed_tokens: how many tokens have a packed side, packed_sides: the sum of both sides.
    attended_tokens: what a read returns. encode: of packing. decode: of reading or attending.
    """

    parts: dict[str, int]
    payload: int
    packed_tokens: int
    packed_sides: int
    attended_tokens: int
    encode: int = 0
    decode: int = 0

    @property
    def resident(self) -> int:
        return sum(self.parts.values())


@dataclass(eq=False)
class _Segment:
    start: int
    end: int
    role: str  # "open", "waiting", "dense" or "packed"
    nbytes: int
    size: SpanSize | None = None


class _Store:
    """Keys or values of the layer."""

    def __init__(self, codec: CodecConfig) -> None:
        self.codec = codec
        self.segments: list[_Segment] = []
        self.parts: dict[str, int] = {}
        self.payload = self.packed_tokens = self.decode = 0
        self._newest: _Segment | None = None  # the packed span that the next one starts from
        self._newest_left = False

    def add(self, segment: _Segment) -> None:
        self.segments.append(segment)
        self._count(segment, 1)

    def pack(self, start: int, end: int, size: SpanSize) -> None:
        """Put a packed span in the place of waiting segments."""
        low, high = self._within(start, end)
        for segment in self.segments[low:high]:
            self._count(segment, -1)
        packed = _Segment(start, end, "packed", 0, size)
        self.segments[low:high] = [packed]
        self._count(packed, 1)
        self._newest, self._newest_left = packed, False

    def fade(self, newest: int, shape: Callable[[int], tuple[int, int, int, int]]) -> None:
        """Drop the refinement of all packed spans but the newest; shape: of so many tokens."""
        if not self.codec.refinement:
            return
        plain = replace(self.codec, refinement=0)
        packed = [segment for segment in self.segments if segment.size is not None]
        for segment in packed[: max(0, len(packed) - newest)]:
            self._count(segment, -1)
            segment.size = span_size(plain, shape(segment.end - segment.start), False)
            self._count(segment, 1)

    def keep_dense(self, start: int, end: int) -> None:
        """What packing would not make smaller stays as it is."""
        low, high = self._within(start, end)
        for segment in self.segments[low:high]:
            self._count(segment, -1)
            segment.role = "dense"
            self._count(segment, 1)

    def drop_where(self, has_left: Callable[[_Segment], bool]) -> None:
        """Release segments."""
        for segment in filter(has_left, self.segments):
            self._count(segment, -1)
            self._newest_left |= segment is self._newest
        self.segments = [segment for segment in self.segments if not has_left(segment)]

    def take_last(self) -> None:
        """Remove the newest segment."""
        self._count(self.segments.pop(), -1)

    def held(self) -> dict[str, int]:
        """Bytes by part, with what a next span starts from although its own span has left."""
        parts = dict(self.parts)
        if self._newest_left and self._newest is not None and self._newest.size is not None:
            for name, nbytes in self._newest.size.warm.items():
                parts[name] = parts.get(name, 0) + nbytes
        return parts

    def _within(self, start: int, end: int) -> tuple[int, int]:
        """Where the segments of a group stand; they are among the newest."""
        high = len(self.segments)
        while self.segments[high - 1].start >= end:
            high -= 1
        low = high
        while low and self.segments[low - 1].start >= start:
            low -= 1
        return low, high

    def _count(self, segment: _Segment, sign: int) -> None:
        size = segment.size
        found = {segment.role: segment.nbytes} if size is None else size.parts
        for name, nbytes in found.items():
            self.parts[name] = self.parts.get(name, 0) + sign * nbytes
        if size is not None:
            self.payload += sign * size.payload
            self.packed_tokens += sign * (segment.end - segment.start)
            if sign > 0:
                self.decode = max(self.decode, size.decode)


class Replay:
    """A layer that is written chunk by chunk. observes: whether a host shows it its queries."""

    def __init__(self, geometry: Geometry, config: CacheConfig, observes: bool = True) -> None:
        self.geometry, self.config = geometry, config
        self.policy = SpanPolicy(config.policy, geometry.frame_tokens)
        self.progress = Progress(self.policy)
        self.stores = (_Store(config.keys), _Store(config.values))
        self.stats = _Statistics(config.keys.first_span == "own")
        self.observes = observes and config.keys.needs_queries
        self.packs = not (config.keys.is_dense and config.values.is_dense)
        self._has_encoded = False

    def chunk(self, tokens: int) -> tuple[Moment, Moment]:
        """Write and commit a chunk behind the newest one: while it is open, and once packed.

        The first moment's `encode` is what packing takes beside what it holds.
        """
        start = self.progress.newest
        end = start + tokens
        if self.packs:
            shortest = self.progress.shortest_chunk(start, end)
            check_span(self.policy, self.geometry.frame_tokens, shortest)
        self._slide(self.progress.first_in_window(end))
        self.progress.open = (start, end)
        for store in self.stores:
            store.add(_Segment(start, end, "open", self.geometry.dense(tokens)))
        if self.observes:
            self.stats.observe(self.progress.current_group)
        before = self._moment()
        encode = self._commit(before.resident)
        return replace(before, encode=encode), self._moment()

    def has_history(self) -> None:
        """Queries of chunks before these were observed, by which spans are encoded."""
        if self.config.keys.needs_queries:
            self.stats.has_moment = True

    def more_queries(self) -> Moment:
        """What is held while passes that write nothing show their queries."""
        if self.observes:
            self.stats.observe(self.progress.current_group)
        return self._moment()

    def _commit(self, before: int) -> int:
        """Pack what is complete; the most that it takes beside what was held before."""
        pieces = self.progress.commit(self.packs)
        for store in self.stores:
            store.take_last()
            for piece in pieces:
                is_dense = store.codec.is_dense or piece.kept_dense
                role = "dense" if is_dense else "waiting"
                nbytes = self.geometry.dense(piece.tokens)
                store.add(_Segment(piece.start, piece.end, role, nbytes))
        self.stats.end_chunk(pieces[-1].group)
        self._settle()
        most = 0
        for group in self.policy.ready(self.progress.waiting, self.progress.chunks - 1):
            most = max(most, self._pack(group, before))
            self._settle()
        return most

    def _pack(self, group: Sequence[Piece], before: int) -> int:
        start, end = group[0].start, group[-1].end
        compensated = self.stats.can_compensate(group[0].group)
        geometry, most = self.geometry, 0

        def shape_of(tokens: int) -> tuple[int, int, int, int]:
            return geometry.batch, geometry.heads, tokens, geometry.head_dim

        shape = shape_of(end - start)
        for store in self.stores:
            if store.codec.is_dense:
                continue
            size = span_size(store.codec, shape, compensated and store is self.stores[0])
            if not size.is_packed:
                store.keep_dense(start, end)
                continue
            joined = geometry.dense(end - start) if len(group) > 1 else 0
            work = max(joined, size.encode + sum(size.parts.values()))
            most = max(most, self._moment().resident + work - before)
            store.pack(start, end, size)
            store.fade(self.config.policy.refined_spans, shape_of)
            self._has_encoded = True
        self.progress.packed(group)
        return most

    def _slide(self, first: int) -> None:
        if first == self.progress.window_start:
            return
        lost, kept = self.progress.leaving(first)
        if not self._has_encoded and self.policy.loses_a_span(lost, kept):
            policy = self.config.policy
            raise ConfigError(
                f"recent_keep={policy.recent_keep} with span_chunks={policy.span_chunks} fills the "
                f"window of {policy.window_frames} frames: expected chunks to be packed before "
                "they leave it; lower recent_keep or widen the window"
            )
        self.progress.packed(lost)
        self.progress.slide(first)
        for store in self.stores:
            store.drop_where(lambda s: self.policy.has_left(s.start, s.end, first))
        self._settle()

    def _settle(self) -> None:
        for group in self.stats.pending - self.progress.needed_groups:
            self.stats.settle(group)

    def _moment(self) -> Moment:
        parts = {
            "counters": _COUNTER,
            "query_moment": self.stats.count * self.geometry.query_moment,
        }
        for store in self.stores:
            for name, nbytes in store.held().items():
                parts[name] = parts.get(name, 0) + nbytes
        return Moment(
            parts={name: nbytes for name, nbytes in sorted(parts.items()) if nbytes},
            payload=sum(store.payload for store in self.stores),
            packed_tokens=max(store.packed_tokens for store in self.stores),
            packed_sides=sum(store.packed_tokens for store in self.stores),
            attended_tokens=sum(end - start for start, end in self.progress.attended),
            decode=max(store.decode for store in self.stores),
        )


class _Statistics:
    """Which accumulators of `QueryStats` exist."""

    def __init__(self, own_first_span: bool) -> None:
        self.own_first_span = own_first_span
        self.has_moment = self.has_pass = False
        self.pending: set[int] = set()
        self.own: set[int] = set()

    @property
    def count(self) -> int:
        return self.has_moment + self.has_pass + len(self.pending) + len(self.own)

    def observe(self, group: int) -> None:
        self.pending.add(group)
        self.has_pass |= self.own_first_span and not self.has_moment

    def end_chunk(self, group: int) -> None:
        if self.has_pass:
            self.own.add(group)
            self.has_pass = False

    def can_compensate(self, group: int) -> bool:
        return self.has_moment or group in self.own

    def settle(self, group: int) -> None:
        self.pending.discard(group)
        self.has_moment, self.own, self.has_pass = True, set(), False
