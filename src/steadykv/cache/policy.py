"""Which tokens are attended, which are packed together, and when: pure functions of positions.

Nothing here holds a tensor. `LayerCache` asks a `SpanPolicy` where to cut a committed chunk, which
groups of pieces are ready to become spans, and which segments have left the window.
Positions are absolute token ids that never move; all lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from steadykv.config import CachePolicy

__all__ = ["Piece", "SpanPolicy", "TokenRange"]

TokenRange = tuple[int, int]  # [start, end)


@dataclass(frozen=True)
class Piece:
    """A committed chunk, or the part of one on one side of a border.

    group: pieces with equal numbers are packed together (one codebook). slot: position in it.
    kept_dense: True for `sink_keep` pieces, which never become part of a span.
    """

    start: int
    end: int
    chunk: int
    group: int
    slot: int
    kept_dense: bool = False

    @property
    def tokens(self) -> int:
        return self.end - self.start


class SpanPolicy:
    """`CachePolicy` in tokens: window, borders, grouping of chunks into spans.

    A span never crosses the end of the sink or of `sink_keep`: a packed span is freed only when
    all of its tokens left the window, so a span across the sink's end could never be freed.
    """

    def __init__(self, policy: CachePolicy, frame_tokens: int) -> None:
        self.policy = policy
        self.sink_tokens = policy.sink_frames * frame_tokens
        self.kept_tokens = policy.sink_keep * frame_tokens
        self.window_tokens = (
            None if policy.window_frames is None else policy.window_frames * frame_tokens
        )
        self.borders: tuple[int, ...] = tuple(sorted({self.sink_tokens, self.kept_tokens} - {0}))

    # --- the window -------------------------------------------------------------------------

    def window_start(self, end: int) -> int:
        """First attended token behind the sink when the newest chunk ends at `end`.

        The window counts the sink and the newest chunk: of `end` tokens the first `sink_tokens`
        and the newest `window_tokens - sink_tokens` are attended.
        """
        if self.window_tokens is None:
            return 0
        return max(0, end - (self.window_tokens - self.sink_tokens))

    def attended(self, end: int, window_start: int | None = None) -> tuple[TokenRange, ...]:
        """Attended ranges in read order: sink, then window; one range where they touch."""
        first = self.window_start(end) if window_start is None else window_start
        sink_end = min(self.sink_tokens, end)
        if first <= sink_end:
            return ((0, end),) if end > 0 else ()
        ranges = ((0, sink_end), (min(first, end), end))
        return tuple((start, stop) for start, stop in ranges if stop > start)

    def has_left(self, start: int, end: int, window_start: int) -> bool:
        """Whether all of [start, end) is outside the window, so that its memory can go."""
        return start >= self.sink_tokens and end <= window_start

    def longest_span(self, chunk_tokens: int) -> int:
        """Chunks of this length that a span can have before its first leaves unpacked; 0: any.

        A span is packed when its last chunk is committed. Writing that one must leave a part of the
        first inside the window: (span - 1) · chunk < window - sink.
        """
        if self.window_tokens is None:
            return 0
        return 1 + (self.window_tokens - self.sink_tokens - 1) // chunk_tokens

    # --- spans ------------------------------------------------------------------------------

    def place(self, start: int, end: int, chunk: int, last: Piece | None) -> tuple[Piece, ...]:
        """Cut the chunk [start, end) at the borders and number the groups, going on from `last`."""
        cuts = [start, *(border for border in self.borders if start < border < end), end]
        pieces: list[Piece] = []
        for piece_start, piece_end in pairwise(cuts):
            kept = piece_end <= self.kept_tokens
            if last is None:
                group, slot = 0, 0
            elif kept or self.is_complete(last):
                group, slot = last.group + 1, 0
            else:
                group, slot = last.group, last.slot + 1
            last = Piece(piece_start, piece_end, chunk, group, slot, kept)
            pieces.append(last)
        return tuple(pieces)

    def is_complete(self, last: Piece) -> bool:
        """Whether the group that ends with piece `last` takes no further piece."""
        return (
            last.kept_dense or last.slot + 1 >= self.policy.span_chunks or last.end in self.borders
        )

    def ready(self, waiting: Iterable[Piece], newest_chunk: int) -> list[tuple[Piece, ...]]:
        """Complete groups, oldest first, that no `recent_keep` chunk belongs to."""
        limit = newest_chunk - self.policy.recent_keep
        groups = (tuple(pieces) for _, pieces in groupby(waiting, key=lambda piece: piece.group))
        return [
            group for group in groups if self.is_complete(group[-1]) and group[-1].chunk <= limit
        ]

    def loses_a_span(self, lost: Sequence[Piece], kept: Sequence[Piece]) -> bool:
        """Whether the pieces that leave the window are all that was left of a complete group."""
        return (
            bool(lost)
            and self.is_complete(lost[-1])
            and all(piece.group != lost[-1].group for piece in kept)
        )

    def reason(self, piece: Piece, group: Sequence[Piece], newest_chunk: int) -> str:
        """Why a committed piece is still dense, in words for `status()`."""
        if piece.kept_dense:
            return f"sink_keep: the first {self.policy.sink_keep} frames stay dense"
        recent = piece.chunk > newest_chunk - self.policy.recent_keep
        if recent:
            return f"recent_keep: the newest {self.policy.recent_keep} committed chunks stay dense"
        if self.is_complete(group[-1]):
            return "waits for its span: a chunk of it is among the recent_keep chunks"
        count = f"{group[-1].slot + 1} of {self.policy.span_chunks}"
        return f"waits for its span: {count} chunks committed"
