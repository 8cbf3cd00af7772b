"""Where one layer stands: its open chunk, what is committed, what waits, where its window starts.

Positions only, no tensor: `LayerCache` asks here what to cut, to pack and to release.
"""

from __future__ import annotations

from collections.abc import Sequence

from steadykv.cache.policy import Piece, SpanPolicy, TokenRange

__all__ = ["Progress"]


class Progress:
    """Positions of one layer; all are token ids.

    open: the open chunk. end: of the newest committed chunk. chunks: how many were committed.
    waiting: committed pieces that are still to be packed. window_start: see `SpanPolicy.attended`.
    """

    def __init__(self, policy: SpanPolicy) -> None:
        self.policy = policy
        self.clear()

    def clear(self) -> None:
        """Start over at token 0."""
        self.open: TokenRange | None = None
        self.end = 0
        self.chunks = 0
        self.window_start = 0
        self.waiting: list[Piece] = []
        self._pieces: list[Piece] = []  # committed ones that have not left, and the newest
        self._last_tokens = 0  # length of the newest committed chunk

    # --- asking -----------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """Where the open chunk ends, or, without one, the newest committed chunk."""
        return self.end if self.open is None else self.open[1]

    @property
    def attended(self) -> list[TokenRange]:
        """Attended ranges in read order."""
        return list(self.policy.attended(self.newest, self.window_start))

    @property
    def current_group(self) -> int:
        """Group of the open chunk's last piece, or of the next chunk's first one."""
        return self._place(self.open or (self.end, self.end + 1))[-1].group

    @property
    def needed_groups(self) -> set[int]:
        """Groups that are still to be packed."""
        return {piece.group for piece in self.waiting} | {self.current_group}

    def shortest_chunk(self, start: int, end: int) -> int:
        """The shorter of the chunk [start, end) and the one before; 0 where that is not known."""
        before = self._last_tokens
        if self.open is not None and start == self.open[1]:
            before = self.open[1] - self.open[0]
        return min(before, end - start) if end > self.policy.sink_tokens else 0

    def first_in_window(self, end: int) -> int:
        """Where the window starts once the newest chunk ends at `end`.

        It never moves back past what was released: a shorter rewrite of the open chunk must not ask
        for tokens that are gone. All of the open chunk is still held.
        """
        start = self.window_start
        held = start if self.open is None else min(start, self.open[0])
        return max(held, self.policy.window_start(end))

    def leaving(self, first: int) -> tuple[list[Piece], list[Piece]]:
        """Waiting pieces that a window from `first` on loses, and those that it keeps."""
        lost = [p for p in self.waiting if self.policy.has_left(p.start, p.end, first)]
        return lost, [piece for piece in self.waiting if piece not in lost]

    def can_truncate(self, start: int) -> bool:
        """Whether a chunk starts at `start`, or would."""
        return start in {0, self.end, *(piece.end for piece in self._pieces)}

    def reason(self, token: int) -> str:
        """Why a committed token still waits to be packed."""
        piece = next(piece for piece in self.waiting if piece.start <= token < piece.end)
        group = [other for other in self.waiting if other.group == piece.group]
        return self.policy.reason(piece, group, self.chunks - 1)

    # --- changing ---------------------------------------------------------------------------

    def commit(self, packs: bool) -> Sequence[Piece]:
        """Close the open chunk; its pieces, which wait to be packed if `packs`."""
        assert self.open is not None
        start, self.end = self.open
        pieces = self._place(self.open)
        if packs:
            self.waiting += [piece for piece in pieces if not piece.kept_dense]
        self._pieces += pieces
        self._last_tokens, self.open = self.end - start, None
        self.chunks += 1
        return pieces

    def slide(self, first: int) -> None:
        """Let the window start at `first`."""
        self.window_start = first
        self._pieces = [
            piece
            for piece in self._pieces
            if piece is self._pieces[-1] or not self.policy.has_left(piece.start, piece.end, first)
        ]

    def packed(self, group: Sequence[Piece]) -> None:
        """These pieces wait no longer."""
        self.waiting = [piece for piece in self.waiting if piece not in group]

    def truncate(self, start: int) -> None:
        """Forget chunks from `start` on."""
        self._pieces = [piece for piece in self._pieces if piece.end <= start]
        self.waiting = [piece for piece in self.waiting if piece.end <= start]
        self.chunks = self._pieces[-1].chunk + 1 if self._pieces else 0
        self.open, self.end = None, start
        self.window_start = min(self.window_start, start)

    def _place(self, chunk: TokenRange) -> tuple[Piece, ...]:
        return self.policy.place(*chunk, self.chunks, self._pieces[-1] if self._pieces else None)
