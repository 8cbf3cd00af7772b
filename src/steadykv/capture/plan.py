"""What a recording will hold, known from positions alone: spans, queries, bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from steadykv.cache.policy import Piece, SpanPolicy, TokenRange
from steadykv.config import CachePolicy
from steadykv.errors import ConfigError

__all__ = ["PlannedSpan", "check_policy", "plan_spans", "predicted_nbytes"]

_NAME_NBYTES = 192  # an entry of the safetensors table, measured: 110 to 150
_PLACE_NBYTES = 8 + 4 + 1  # query_token, query_step, query_clean


@dataclass(frozen=True)
class PlannedSpan:
    """Tokens [start, end) that are packed together, made of whole or cut `chunks`.

    candidates: query tokens of all later passes in which the whole span is attended.
    """

    index: int
    start: int
    end: int
    chunks: tuple[TokenRange, ...]
    candidates: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


def check_policy(policy: CachePolicy) -> None:
    """Raise ConfigError for a policy that keeps tokens dense: a capture holds every span."""
    for name in ("sink_keep", "recent_keep"):
        if getattr(policy, name):
            raise ConfigError(
                f"policy.{name} is {getattr(policy, name)}: expected 0; a span is captured when it "
                "is complete"
            )


def plan_spans(
    policy: CachePolicy, frame_tokens: int, chunks: Sequence[TokenRange], passes: Sequence[int]
) -> list[PlannedSpan]:
    """The spans that the given chunks make up, and the queries that meet each of them.

    passes: how often each chunk is evaluated, its commit pass included. Raises ConfigError for a
    policy that keeps tokens dense or whose spans never fit its window.
    """
    check_policy(policy)
    rule = SpanPolicy(policy, frame_tokens)
    longest = min((rule.longest_span(end - start) for start, end in chunks), default=0)
    if longest and policy.span_chunks > longest:
        raise ConfigError(
            f"span_chunks is {policy.span_chunks}: expected at most {longest} with a window of "
            f"{policy.window_frames} frames, because chunks leave it before their span is complete"
        )
    complete: list[tuple[int, tuple[Piece, ...]]] = []
    waiting: list[Piece] = []
    last: Piece | None = None
    for number, (start, end) in enumerate(chunks):
        pieces = rule.place(start, end, number, last)
        last = pieces[-1]
        waiting += pieces
        for group in rule.ready(waiting, number):
            complete.append((number, group))
            waiting = [piece for piece in waiting if piece not in group]
    planned = []
    for number, group in complete:
        first, stop = group[0].start, group[-1].end
        candidates = sum(
            (end - start) * count
            for (start, end), count in list(zip(chunks, passes, strict=True))[number + 1 :]
            if any(low <= first and stop <= high for low, high in rule.attended(end))
        )
        parts = tuple((piece.start, piece.end) for piece in group)
        planned.append(PlannedSpan(group[0].group, first, stop, parts, candidates))
    return planned


def predicted_nbytes(
    spans: Sequence[PlannedSpan],
    *,
    batch: int,
    layers: int,
    heads: int,
    query_heads: int,
    head_dim: int,
    queries: int,
    element_nbytes: int,
    query_nbytes: int,
    has_rope: bool,
    header: dict[str, object],
) -> int:
    """Upper bound of a capture's file size, a few percent above it.

    layers, heads, query_heads: how many are kept. queries: most of them a span and layer.
    element_nbytes, query_nbytes: of a number of k and v, and of q. has_rope: whether cosines and
    sines are stored as well. header: what describes the file, without its spans.
    """
    total = len(json.dumps(header)) + 2048
    for span in spans:
        row = batch * span.tokens * head_dim
        count = min(queries, span.candidates)
        layer = 2 * heads * row * element_nbytes
        layer += batch * heads * (4 * head_dim**2 + 8)
        layer += count * (batch * query_heads * head_dim * query_nbytes + _PLACE_NBYTES)
        total += layers * (layer + 8 * _NAME_NBYTES)
        total += 4 * span.tokens * head_dim + _NAME_NBYTES if has_rope else 0
        total += 256 + 48 * len(span.chunks)  # the span's entry in the header
    return total
