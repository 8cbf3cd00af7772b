"""The key/value cache of one layer: open chunk, committed segments, window, query statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from steadykv.cache.attention import attend
from steadykv.cache.checks import (
    Geometry,
    calibration_of,
    check_finite,
    check_position,
    check_span,
    checked_token,
    resolve_device,
)
from steadykv.cache.isolation import isolated
from steadykv.cache.ledger import LayerLedger, MemoryMeter
from steadykv.cache.packing import pack_span
from steadykv.cache.policy import Piece, SpanPolicy, TokenRange
from steadykv.cache.progress import Progress
from steadykv.cache.query_stats import QueryStats
from steadykv.cache.reading import read, read_tensor
from steadykv.cache.segments import Segment, TensorStore, nbytes_of
from steadykv.cache.status import LayerStatus, layer_ledger, layer_status
from steadykv.codecs import Calibration, SpanKey
from steadykv.config import CacheConfig, CodecConfig
from steadykv.errors import ConfigError, PositionError, ShapeError
from steadykv.ops import copy_finite, count_nonfinite

__all__ = ["LayerCache"]


class LayerCache:
    """Keys and values of one layer, of one guidance branch.

    num_heads: key/value heads H. head_dim: D. frame_tokens: tokens of one frame.
    layer: number of this layer; it seeds the codecs. layout: "BSHD" or "BHSD", of every tensor that
    comes in or goes out. dtype: of the dense tokens. debug: raise on non-finite input (syncs).
    calibration: for codecs with levels="calibrated". meter: shared by the layers of one cache.

    Positions are absolute token ids, starting at 0. The batch size is fixed by the first write.
    Writing, observing and reading never sync the host. What comes in is copied, and what goes out
    is never touched again.

    batch: B, or None before the first write. encoded_tokens: tokens encoded since the last reset.
    nonfinite_count: int64 [] on the device: NaN and Inf replaced by 0 since the last reset.
    dropped_dense_tokens: tokens that left the window while they waited for their span.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        frame_tokens: int,
        config: CacheConfig,
        *,
        layer: int = 0,
        layout: str = "BSHD",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        debug: bool = False,
        calibration: Calibration | None = None,
        meter: MemoryMeter | None = None,
    ) -> None:
        if not isinstance(config, CacheConfig):
            raise ConfigError(
                f"config is {config!r}: expected a CacheConfig; preset(name) makes one, and "
                "CacheConfig(keys, values) joins two codecs"
            )
        place = resolve_device(device)
        self.geometry = Geometry(num_heads, head_dim, frame_tokens, layout, dtype, place)
        self.config = config
        self.policy = SpanPolicy(config.policy, frame_tokens)
        self.progress = Progress(self.policy)
        self.layer = layer
        # A host may build its caches under inference mode, whose tensors none outside may change.
        with torch.inference_mode(False):
            self.calibration = calibration_of(calibration, config, layer, self.geometry)
        self.debug = debug
        self.meter = MemoryMeter() if meter is None else meter
        self.keys = TensorStore("key", self.geometry.token_dim)
        self.values = TensorStore("value", self.geometry.token_dim)
        self.stats: QueryStats | None = None
        if config.keys.needs_queries:
            self.stats = QueryStats(num_heads, config.keys.first_span == "own")
        self._held_nbytes = 0
        with torch.inference_mode(False):
            self._forget()
        self._account()

    def _forget(self) -> None:
        self.keys.clear()
        self.values.clear()
        if self.stats is not None:
            self.stats.reset()
        self.batch: int | None = None
        self.encoded_tokens = 0
        self.dropped_dense_tokens = 0
        self.nonfinite_count = torch.zeros((), dtype=torch.int64, device=self.geometry.device)
        self.progress.clear()

    # --- what a host calls ------------------------------------------------------------------

    @isolated
    def write(self, k: Tensor, v: Tensor, start: int, *, observed: bool = False) -> None:
        """Store the chunk [start, start + S): k, v [B, S, H, D] (or [B, H, S, D]).

        start: that of the open chunk overwrites it, also with another length; its end commits it
        and opens the next one. NaN and Inf are stored as 0 and counted. observed: the queries of
        this pass were observed already, for hosts that store after they attended.
        Allocates K and V of a new chunk, and without kernels for a moment a byte per number of K.
        Raises PositionError for any other start, ShapeError, ConfigError for a policy whose spans
        turn out not to fit into the window, and NonFiniteError in debug mode; then nothing of it
        was stored. If anything else stops it, the open chunk is gone: write it again.
        """
        self.geometry.check("k", k, self.batch)
        self.geometry.check("v", v, self.batch)
        if k.shape != v.shape:
            raise ShapeError(f"k is {tuple(k.shape)}, v is {tuple(v.shape)}: expected equal shapes")
        start = check_position(start, self.layer, self.progress.open, self.progress.end)
        if self.debug:
            check_finite(self.layer, k=k, v=v)
        end = start + k.shape[self.geometry.token_dim]
        if self._packs:
            chunk = self.progress.shortest_chunk(start, end)
            check_span(self.policy, self.geometry.frame_tokens, chunk)
        if self.progress.open is not None and start == self.progress.open[1]:
            self.commit()
        self._slide(self.progress.first_in_window(end))
        self.progress.open = None
        try:
            for store, tensor in ((self.keys, k), (self.values, v)):
                self._fill(store, tensor, start, end)
        except BaseException:  # where memory runs out between the two: half a chunk is none
            for store, _ in self._sides():
                store.drop_where(lambda s: s.role == "open")
            raise
        self.batch, self.progress.open = k.shape[0], (start, end)
        if self.stats is not None and not observed:
            self.stats.begin_pass()
        self._account(transient=k.numel())

    @isolated
    def commit(self) -> None:
        """Make the open chunk history and pack every span that is complete; idempotent.

        Allocates, for one tensor at a time, the joined source of a span of several chunks, the
        codec's workspace and the payload. Dense tokens are released as soon as they are packed.
        """
        if self.progress.open is None:
            return
        start, end = self.progress.open
        pieces = self.progress.commit(self._packs)
        for store, codec in self._sides():
            self._append_pieces(store, codec, store.take_last(), pieces)
        # A chunk that is cut at a border is copied, one tensor at a time.
        self._account((len(pieces) > 1) * self.geometry.nbytes(self.batch or 1, end - start))
        if self.stats is not None:
            self.stats.end_chunk(pieces[-1].group)
        self._settle_queries()
        for group in self.policy.ready(self.progress.waiting, self.progress.chunks - 1):
            self._pack(group)
            self._settle_queries()

    @isolated
    def observe_queries(self, q: Tensor) -> None:
        """Add the queries of a pass to the statistics: q [B, S, n·H, D] (or [B, n·H, S, D]).

        The n query heads of a KV head are pooled. Queries are expected in the frame of the cached
        keys: after RoPE if those are. To be called after `write`; without an open chunk they count
        for the next one. Where the key codec uses no queries they are only checked.
        Allocates what `QueryStats.observe` says. Raises ShapeError; NonFiniteError in debug mode.
        """
        self.geometry.check("q", q, self.batch, queries=True)
        if self.debug:
            check_finite(self.layer, q=q)
        if self.stats is None:
            return
        heads_first = self.keys.heads_first(q)
        count_nonfinite(heads_first, self.nonfinite_count)
        self.stats.observe(heads_first, self.progress.current_group)
        self._account(self.stats.workspace_nbytes(heads_first))

    def read(self, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Attended keys and values, dense, in the cache's dtype and layout, ordered as `spans()`.

        Every token is written once: dense segments are copied and packed ones decoded into fresh
        memory [B, T, H, D] (or [B, H, T, D]), or into `out` = (k, v), whose token dimension may be
        longer than T; then views of its front are returned.
        Raises ShapeError if `out` does not fit. Before any write T is 0 (and B is 1).
        """
        return read(self, out)

    def read_tensor(
        self, name: str, ranges: Sequence[TokenRange], out: Tensor | None = None
    ) -> Tensor:
        """Keys (`name` "key") or values ("value") of token ranges, in the order given, dense.

        For hosts that name the tokens they read, and read one tensor after the other. Memory as for
        `read`: fresh [B, T, H, D] (or [B, H, T, D]), or the front of `out`.
        Raises PositionError for tokens that are not held (see `held`), ShapeError, ConfigError.
        """
        return read_tensor(self, name, ranges, out)

    def attend(
        self,
        q: Tensor,
        *,
        scale: float | None = None,
        bias: Tensor | None = None,
        memory: str = "default",
    ) -> Tensor:
        """softmax(scale·q·K^T + bias)·V of what `read` returns, without the dense window.

        q: [B, S, n·H, D] (or [B, n·H, S, D]), as are the result and its dtype. scale: 1/sqrt(D) by
        default. bias: one number for each token of `spans()`, [T] or [B, H, T]. All tokens are
        visible. `ops.attend` has the error. Allocates beside the result 128 MiB, or for memory
        "small" 32 MiB, where a head's queries fit in it, and what decoding takes.
        Raises PositionError before the first write, ShapeError, ConfigError; NonFiniteError in
        debug mode.
        """
        return attend(self, q, scale, bias, memory)

    def spans(self) -> list[TokenRange]:
        """Token ranges that `read()` returns, in its order: the sink, then the window."""
        return self.progress.attended

    def status(self) -> LayerStatus:
        """Packed and dense tokens, and why the dense ones are dense."""
        return layer_status(self)

    def ledger(self) -> LayerLedger:
        """Bytes by part, and what bits per element and compression are made of."""
        return layer_ledger(self)

    @property
    def nbytes(self) -> int:
        """Bytes of everything this layer keeps between two calls."""
        state = sum(s.nbytes for s in (self.stats, self.calibration) if s is not None)
        return self.keys.nbytes + self.values.nbytes + state + nbytes_of(self.nonfinite_count)

    @isolated
    def reset(self) -> None:
        """Forget all tokens, statistics and counters, as if newly built; the peak is kept."""
        self._forget()
        self._account()

    @isolated
    def evict(self, end: int) -> None:
        """Release committed tokens before `end`, but for the sink: the window starts there.

        A packed span is freed when all of its tokens have left. Nothing comes back. Without
        effect where the window has moved further already. Raises PositionError for no int.
        """
        end = checked_token("evict before", end, self.layer)
        self._slide(max(self.progress.window_start, min(end, self.progress.end)))

    @isolated
    def truncate(self, start: int) -> None:
        """Forget the tokens from `start` on, for a host that writes them again; keeps statistics.

        start: 0, or where a committed chunk ended and no packed span goes on; else PositionError.
        Queries that were waiting for a span join the statistics.
        """
        start = checked_token("truncate", start, self.layer)
        crossed = any(s.start < start < s.end for store, _ in self._sides() for s in store.segments)
        if crossed or not self.progress.can_truncate(start):
            raise PositionError(
                f"layer {self.layer}: truncate at token {start}: expected 0 or the end of a chunk "
                "that no packed span crosses; span_chunks=1 packs every chunk by itself"
            )
        for store, _ in self._sides():
            store.drop_where(lambda s: s.start >= start)
        self.progress.truncate(start)
        if self.stats is not None:
            for group in self.stats.pending_groups:
                self.stats.settle(group)
        self._account()

    def held(self) -> list[TokenRange]:
        """Token ranges that are in memory, joined where they touch: what `read_tensor` can read."""
        found: list[TokenRange] = []
        for segment in self.keys.segments:
            if found and found[-1][1] == segment.start:
                found[-1] = (found[-1][0], segment.end)
            else:
                found.append((segment.start, segment.end))
        return found

    def waiting_reason(self, token: int) -> str:
        """Why a committed token still waits to be packed."""
        return self.progress.reason(token)

    # --- steps ------------------------------------------------------------------------------

    @property
    def _packs(self) -> bool:
        return not (self.config.keys.is_dense and self.config.values.is_dense)

    def _sides(self) -> Iterator[tuple[TensorStore, CodecConfig]]:
        yield self.keys, self.config.keys
        yield self.values, self.config.values

    def _fill(self, store: TensorStore, tensor: Tensor, start: int, end: int) -> None:
        """Copy one tensor into the open segment; its memory is reused where the length is equal."""
        segment = store.open_segment()
        if segment is not None and segment.end != end:
            store.take_last()
            segment = None
        if segment is None:
            memory = self.geometry.empty(tensor.shape[0], end - start)
            segment = Segment(start, end, memory, role="open")
            store.append(segment)
        copy_finite(
            store.heads_first(tensor), store.heads_first(segment.tensor), self.nonfinite_count
        )

    def _append_pieces(
        self, store: TensorStore, codec: CodecConfig, chunk: Segment, pieces: Sequence[Piece]
    ) -> None:
        """Append the committed chunk, cut into its pieces."""
        for piece in pieces:
            rows = chunk.tensor
            if len(pieces) > 1:
                # A view would keep the whole chunk alive.
                rows = rows.narrow(store.token_dim, piece.start - chunk.start, piece.tokens)
                rows = rows.clone(memory_format=torch.contiguous_format)
            reason = ""
            if codec.is_dense:
                reason = f"{store.name}s: method {codec.method}"
            elif piece.kept_dense:
                reason = self.policy.reason(piece, (piece,), self.progress.chunks - 1)
            role = "dense" if reason else "waiting"
            store.append(Segment(piece.start, piece.end, rows, role, reason))

    def _pack(self, group: tuple[Piece, ...]) -> None:
        """Encode a complete group, keys first: their dense tokens are gone before the values."""
        start, end, span = group[0].start, group[-1].end, group[0].group
        moment = None if self.stats is None else self.stats.for_encoding(span)
        was_encoded = False
        for store, codec in self._sides():
            if codec.is_dense:
                continue
            was_encoded |= pack_span(
                store,
                codec,
                start,
                end,
                span_key=SpanKey(self.layer, store.name, span),
                stats=moment if store is self.keys else None,
                calibration=self.calibration,
                meter=self.meter,
            )
            store.fade(self.config.policy.refined_spans)
            self._account()
        self.progress.packed(group)
        self.encoded_tokens += (end - start) * was_encoded

    def _slide(self, first: int) -> None:
        """Release what lies before `first`, behind the sink."""
        if first == self.progress.window_start:
            return
        lost, kept = self.progress.leaving(first)
        if not self.encoded_tokens and self.policy.loses_a_span(lost, kept):
            policy = self.config.policy
            raise ConfigError(
                f"recent_keep={policy.recent_keep} with span_chunks={policy.span_chunks} fills the "
                f"window of {policy.window_frames} frames: chunks leave it before they are packed; "
                "lower recent_keep or widen window_frames"
            )
        self.progress.packed(lost)
        self.dropped_dense_tokens += sum(piece.tokens for piece in lost)
        self.progress.slide(first)
        for store, _ in self._sides():
            store.drop_where(
                lambda s: s.role != "open" and self.policy.has_left(s.start, s.end, first)
            )
        self._account()
        self._settle_queries()

    def _settle_queries(self) -> None:
        """Fold into M the queries of every group that nothing waits for any more."""
        if self.stats is None:
            return
        needed = self.progress.needed_groups
        for group in self.stats.pending_groups:
            if group not in needed:
                self.stats.settle(group)
                self._account(self.stats.fold_nbytes)

    def _account(self, transient: int = 0) -> None:
        """Tell the meter what is held now, and what a step allocated beside it."""
        held = self.nbytes
        self.meter.hold(held - self._held_nbytes)
        self._held_nbytes = held
        self.meter.transient(transient)
