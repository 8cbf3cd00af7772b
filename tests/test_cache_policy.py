"""The span policy alone: window, borders, grouping, readiness. No tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadykv.cache.policy import Piece, SpanPolicy
from steadykv.config import CachePolicy

FRAME = 10


def policy(**fields) -> SpanPolicy:
    return SpanPolicy(CachePolicy(**fields), FRAME)


def run(spans: SpanPolicy, lengths: list[int]) -> tuple[list[Piece], list[tuple[int, int, int]]]:
    """Commit chunks one by one; returns all pieces, and (chunk, start, end) of each packing."""
    pieces: list[Piece] = []
    waiting: list[Piece] = []
    packed = []
    last, start = None, 0
    for chunk, length in enumerate(lengths):
        new = spans.place(start, start + length, chunk, last)
        last, start = new[-1], start + length
        pieces += new
        waiting += [piece for piece in new if not piece.kept_dense]
        for group in spans.ready(waiting, chunk):
            packed.append((chunk, group[0].start, group[-1].end))
            waiting = [piece for piece in waiting if piece not in group]
    return pieces, packed


@pytest.mark.parametrize(
    ("fields", "end", "expected"),
    [
        ({}, 70, ((0, 70),)),
        ({}, 0, ()),
        ({"window_frames": 6}, 50, ((0, 50),)),
        ({"window_frames": 6}, 60, ((0, 60),)),
        ({"window_frames": 6}, 61, ((1, 61),)),
        ({"window_frames": 6}, 90, ((30, 90),)),
        # Of 90 tokens the first 20 and the newest 40 are attended.
        ({"window_frames": 6, "sink_frames": 2}, 90, ((0, 20), (50, 90))),
        ({"window_frames": 6, "sink_frames": 2}, 60, ((0, 60),)),
        ({"window_frames": 6, "sink_frames": 2}, 65, ((0, 20), (25, 65))),
        ({"window_frames": 6, "sink_frames": 2}, 15, ((0, 15),)),
        # A window that is no multiple of chunks: 18 frames, sink 6, chunks of 4 (after 7 chunks).
        ({"window_frames": 18, "sink_frames": 6}, 280, ((0, 60), (160, 280))),
        ({"sink_frames": 2}, 70, ((0, 70),)),
    ],
)
def test_attended_ranges(fields, end, expected):
    assert policy(**fields).attended(end) == expected


def test_a_kept_window_start_never_moves_back():
    """A shorter rewrite may ask for an earlier start than what is still there."""
    assert policy(window_frames=3).attended(55, window_start=40) == ((40, 55),)
    # The window can even have moved behind everything that is left.
    assert policy(window_frames=3).attended(38, window_start=40) == ()


@given(
    window=st.integers(1, 9),
    sink=st.integers(0, 8),
    end=st.integers(0, 400),
)
def test_attended_is_the_sink_and_the_newest_tokens(window, sink, end):
    if sink >= window:
        return
    spans = policy(window_frames=window, sink_frames=sink)
    kept = [i for i in range(end) if i < sink * FRAME or i >= end - (window - sink) * FRAME]
    ranges = spans.attended(end)
    assert [i for start, stop in ranges for i in range(start, stop)] == kept
    assert all(stop > start for start, stop in ranges)
    assert len(ranges) <= 2


def test_one_chunk_a_span_packs_at_its_own_commit():
    _, packed = run(policy(), [30, 30, 30])
    assert packed == [(0, 0, 30), (1, 30, 60), (2, 60, 90)]


def test_spans_of_several_chunks_wait_for_the_last():
    _, packed = run(policy(span_chunks=3), [30] * 7)
    assert packed == [(2, 0, 90), (5, 90, 180)]


def test_recent_chunks_stay_dense():
    _, packed = run(policy(recent_keep=1), [30] * 4)
    assert packed == [(1, 0, 30), (2, 30, 60), (3, 60, 90)]
    _, packed = run(policy(span_chunks=2, recent_keep=2), [30] * 7)
    assert packed == [(3, 0, 60), (5, 60, 120)]


def test_spans_end_at_the_sink():
    """Sink of 6 frames, chunks of 4: the second chunk is cut, and its halves go apart."""
    pieces, packed = run(policy(window_frames=18, sink_frames=6, span_chunks=2), [40] * 4)
    assert [(p.start, p.end) for p in pieces[:4]] == [(0, 40), (40, 60), (60, 80), (80, 120)]
    assert packed == [(1, 0, 60), (2, 60, 120)]


def test_a_long_span_is_cut_short_by_the_sink():
    _, packed = run(policy(span_chunks=4, sink_frames=3, window_frames=30), [30] * 6)
    assert packed == [(0, 0, 30), (4, 30, 150)]


def test_sink_keep_is_never_packed_and_ends_a_span():
    pieces, packed = run(policy(sink_keep=4, span_chunks=2), [30] * 5)
    assert [(p.start, p.end, p.kept_dense) for p in pieces[:4]] == [
        (0, 30, True),
        (30, 40, True),
        (40, 60, False),
        (60, 90, False),
    ]
    assert packed == [(2, 40, 90), (4, 90, 150)]


def test_sink_keep_inside_the_sink_packs_the_rest_of_it():
    _, packed = run(policy(sink_keep=1, sink_frames=3, window_frames=9), [30, 30])
    assert packed == [(0, 10, 30), (1, 30, 60)]


@given(
    span=st.integers(1, 4),
    recent=st.integers(0, 3),
    sink=st.integers(0, 6),
    keep=st.integers(0, 6),
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=25),
)
def test_every_packable_token_is_packed_once_and_in_order(span, recent, sink, keep, lengths):
    spans = policy(span_chunks=span, recent_keep=recent, sink_frames=sink, sink_keep=keep)
    pieces, packed = run(spans, lengths)
    total = sum(lengths)
    # Pieces tile the tokens; groups never cross a border.
    assert [p.start for p in pieces] == [0, *(p.end for p in pieces[:-1])]
    assert pieces[-1].end == total
    for _, start, end in packed:
        for border in (sink * FRAME, keep * FRAME):
            assert not start < border < end
    tokens = [i for _, start, end in packed for i in range(start, end)]
    assert tokens == sorted(set(tokens))
    if tokens:
        # Without a gap, starting behind what is kept dense.
        assert tokens == list(range(keep * FRAME, tokens[-1] + 1))
    # What is not packed is recent, or in a group that is not complete.
    dense_chunks = recent + span
    packed_end = tokens[-1] + 1 if tokens else keep * FRAME
    assert total - packed_end <= sum(lengths[-dense_chunks:])


def test_only_whole_segments_behind_the_sink_leave():
    spans = policy(window_frames=6, sink_frames=2)
    assert not spans.has_left(0, 20, 100)
    assert not spans.has_left(20, 61, 60)
    assert spans.has_left(20, 60, 60)


def test_reasons_say_what_a_piece_waits_for():
    spans = policy(span_chunks=3, recent_keep=1)
    pieces, _ = run(spans, [30, 30])
    assert spans.reason(pieces[0], pieces, 1) == "waits for its span: 2 of 3 chunks committed"
    assert spans.reason(pieces[1], pieces, 1).startswith("recent_keep: the newest 1 ")
    pieces, _ = run(spans, [30, 30, 30])
    assert "recent_keep chunks" in spans.reason(pieces[0], pieces, 2)
    kept, _ = run(policy(sink_keep=2), [20])
    assert kept[0].kept_dense
    assert policy(sink_keep=2).reason(kept[0], kept, 0) == (
        "sink_keep: the first 2 frames stay dense"
    )


def test_a_group_counts_as_lost_only_when_nothing_of_it_is_left():
    spans = policy(span_chunks=2, recent_keep=2)
    pieces, _ = run(spans, [30, 30, 30])
    assert not spans.loses_a_span([], pieces)
    assert not spans.loses_a_span(pieces[:1], pieces[1:])
    assert spans.loses_a_span(pieces[:2], pieces[2:])
    assert not spans.loses_a_span(pieces[2:], [])  # incomplete: its second chunk may still come
