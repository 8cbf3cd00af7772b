"""The recorder: leaves the rollout alone, keeps what passed, and what a cache would have known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from steadykv.cache.policy import SpanPolicy
from steadykv.capture import (
    CapturedSpan,
    RecordingCache,
    Selection,
    plan_spans,
)
from steadykv.capture.sample import QuerySample
from steadykv.config import CachePolicy
from steadykv.errors import ConfigError, PositionError, ShapeError
from tests.cache_cases import DIM, FRAME, HEADS, Chunk, cache_for, chunks_of, drive, small

LENGTHS = (24, 24, 13, 24, 24, 8, 24, 24)
POLICIES = [
    CachePolicy(span_chunks=2),
    CachePolicy(span_chunks=2, window_frames=14),
    CachePolicy(span_chunks=1, window_frames=9, sink_frames=4),
    CachePolicy(span_chunks=3, window_frames=16, sink_frames=2),
]


def recorder(policy: CachePolicy, selection: Selection | None = None, **options: Any) -> Any:
    """A recording cache of one layer around a BF16 cache."""
    layout = options.get("layout", "BSHD")
    inner = cache_for(small("bf16").replace(policy=policy), layers=1, layout=layout)
    shape = {"num_layers": 1, "num_heads": HEADS, "frame_tokens": FRAME}
    return RecordingCache(inner, selection or Selection(), policy=policy, **shape, **options)


def run(cache: Any, chunks: Sequence[Chunk], layout: str = "BSHD") -> list[CapturedSpan]:
    for chunk in chunks:
        for k, v, q in chunk.passes:
            k, v, q = (x if layout == "BSHD" else x.transpose(1, 2) for x in (k, v, q))
            cache[0].write(k, v, chunk.start)
            cache[0].observe_queries(q)
            cache[0].read()
        cache.commit()
    return list(cache.captured())


def same(first: CapturedSpan, second: CapturedSpan) -> bool:
    mine, theirs = first.tensors(), second.tensors()
    is_same = all(torch.equal(mine[name], theirs[name]) for name in mine)
    return mine.keys() == theirs.keys() and is_same and first.entry() == second.entry()


def test_statistics_are_of_the_past_only() -> None:
    """Span s knows the queries of the chunks before it; a first span those of its own commits."""
    chunks = chunks_of(LENGTHS, passes=3, query_heads=2 * HEADS)
    spans = run(recorder(CachePolicy(span_chunks=2)), chunks)
    assert [span.statistics for span in spans] == ["own", "history", "history", "history"]
    for span in spans:
        seen = (
            [q for chunk in chunks if chunk.end <= span.start for _, _, q in chunk.passes]
            if span.index
            else [chunk.passes[-1][2] for chunk in chunks[:2]]
        )
        queries = torch.cat(seen, dim=1).double().unflatten(2, (HEADS, 2))
        moment = torch.einsum("bshgd,bshge->bhde", queries, queries) / (2 * queries.shape[1])
        assert span.moment is not None
        assert span.moment_count is not None
        assert span.moment_count.tolist() == [[2 * queries.shape[1]] * HEADS]
        torch.testing.assert_close(span.moment.double(), moment, rtol=1e-4, atol=1e-4)


# --- spans and queries ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_is_kept_where_the_sample_is_large_enough(policy: CachePolicy) -> None:
    """K and V as committed; every query that met a whole complete span, in order, marked right."""
    chunks = chunks_of(LENGTHS, passes=3, batch=2, query_heads=2 * HEADS)
    spans = run(recorder(policy, Selection(queries=10_000)), chunks)
    rule = SpanPolicy(policy, FRAME)
    k, v = (torch.cat([c.passes[-1][i] for c in chunks], dim=1).transpose(1, 2) for i in (0, 1))
    assert len(spans) >= 2
    for span in spans:
        assert torch.equal(span.k, k[:, :, span.start : span.end])
        assert torch.equal(span.v, v[:, :, span.start : span.end])
        assert span.chunks[0][0] == span.start
        assert span.chunks[-1][1] == span.end
        expected, places = [], []
        for chunk in chunks:
            is_later = chunk.start >= max(c.end for c in chunks if c.start < span.end)
            attended = rule.attended(chunk.end)
            is_met = any(low <= span.start and span.end <= high for low, high in attended)
            for step, (_, _, q) in enumerate(chunk.passes):
                if is_later and is_met:
                    expected.append(q.transpose(1, 2))
                    tokens = range(chunk.start, chunk.end)
                    places += [(token, step, step == 2) for token in tokens]
        assert (span.q is None) == (not expected)
        if span.q is not None:
            assert torch.equal(span.q, torch.cat(expected, dim=2))
        found = zip(span.query_token.tolist(), span.query_step.tolist(),
                    span.query_clean.bool().tolist(), strict=True)  # fmt: skip
        assert list(found) == places
    assert any(span.q is not None for span in spans)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_plan_is_what_is_recorded(policy: CachePolicy) -> None:
    chunks = chunks_of(LENGTHS, passes=3)
    spans = run(recorder(policy, Selection(queries=10_000)), chunks)
    ranges = [(chunk.start, chunk.end) for chunk in chunks]
    planned = plan_spans(policy, FRAME, ranges, [3] * len(chunks))
    recorded = [(s.index, s.start, s.end, s.chunks, len(s.query_token)) for s in spans]
    assert [(p.index, p.start, p.end, p.chunks, p.candidates) for p in planned] == recorded


def test_a_sample_is_a_part_of_everything_and_depends_on_its_seed() -> None:
    chunks = chunks_of(LENGTHS, passes=3)
    policy = CachePolicy(span_chunks=2)
    whole = run(recorder(policy, Selection(queries=10_000)), chunks)
    found = [run(recorder(policy, Selection(queries=20, seed=s)), chunks) for s in (0, 0, 1)]
    for everything, span, again, other in zip(whole, *found, strict=True):
        assert same(span, again)
        assert len(span.query_token) == min(20, len(everything.query_token))
        if span.q is None:
            continue
        assert not torch.equal(span.query_token, other.query_token)
        assert everything.q is not None
        places = list(zip(everything.query_token.tolist(), everything.query_step.tolist(),
                          strict=True))  # fmt: skip
        for number, place in enumerate(zip(span.query_token.tolist(), span.query_step.tolist(),
                                           strict=True)):  # fmt: skip
            assert torch.equal(span.q[:, :, number], everything.q[:, :, places.index(place)])


def test_every_query_is_equally_likely_to_be_sampled() -> None:
    """40 passes of 30 tokens, 60 kept, 200 samples: each quarter of the stream gets a quarter."""
    counts = torch.zeros(4)
    for seed in range(200):
        sample = QuerySample(60, f"{seed}/0/0")
        for step in range(40):
            sample.offer(torch.full((1, 1, 30, 2), float(step)), 0, 0, step)
        assert sample.queries is not None
        steps = sample.places[:, 2]
        assert torch.equal(sample.queries[0, 0, :, 0], steps.float())
        assert len({(int(token), int(step)) for token, _, step in sample.places}) == 60
        counts += torch.bincount(steps // 10, minlength=4)
    # 3,000 expected in each quarter, standard deviation under 47.
    assert (counts - 3000).abs().max() < 190


def test_no_queries_asked_for_none_kept() -> None:
    spans = run(recorder(CachePolicy(), Selection(queries=0)), chunks_of(LENGTHS))
    assert len(spans) == len(LENGTHS)
    assert all(span.q is None and not len(span.query_token) for span in spans)
    assert set(spans[3].tensors()) == {f"layer0/span3/{x}" for x in ("k", "v", "moment",
                                                                     "moment_count")}  # fmt: skip


def test_selected_heads_and_spans_are_those_of_everything() -> None:
    chunks = chunks_of(LENGTHS, passes=2, query_heads=3 * HEADS)
    policy = CachePolicy(span_chunks=2)
    whole = run(recorder(policy), chunks)
    part = run(recorder(policy, Selection(heads=(1,), spans=(0, 2))), chunks)
    assert [span.index for span in part] == [0, 2]
    for span in part:
        everything = whole[span.index]
        assert torch.equal(span.k, everything.k[:, 1:])
        assert torch.equal(span.v, everything.v[:, 1:])
        assert span.moment is not None
        assert everything.moment is not None
        assert torch.equal(span.moment, everything.moment[:, 1:])
        assert span.q is not None
        assert everything.q is not None
        assert torch.equal(span.q, everything.q[:, 3:])  # query heads 3-5 read head 1
        assert torch.equal(span.query_token, everything.query_token)


def test_both_layouts_and_a_commit_by_the_next_write_agree() -> None:
    chunks = chunks_of(LENGTHS, passes=2)
    policy = CachePolicy(span_chunks=2, window_frames=14)
    expected = run(recorder(policy), chunks)
    other = run(recorder(policy, layout="BHSD"), chunks, "BHSD")
    implicit = recorder(policy)
    for chunk in chunks:
        for k, v, q in chunk.passes:
            implicit[0].write(k, v, chunk.start)
            implicit[0].observe_queries(q)
    implicit.commit()
    for found in (other, implicit.captured()):
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_the_host_may_reuse_its_memory_and_run_in_inference_mode() -> None:
    chunks = chunks_of(LENGTHS, passes=2)
    expected = run(recorder(CachePolicy(span_chunks=2)), chunks)
    cache = recorder(CachePolicy(span_chunks=2))
    with torch.inference_mode():
        for chunk in chunks:
            for tensors in chunk.passes:
                k, v, q = (x.clone() for x in tensors)
                cache[0].write(k, v, chunk.start)
                cache[0].observe_queries(q)
                for x in (k, v, q):
                    x.zero_()
            cache.commit()
    assert all(same(a, b) for a, b in zip(cache.captured(), expected, strict=True))


def test_reads_go_through() -> None:
    chunks = chunks_of(LENGTHS)
    plain = cache_for(small("bf16", span_chunks=2, window_frames=14))
    cache = recorder(CachePolicy(span_chunks=2, window_frames=14))
    expected = drive(plain, chunks)
    reads = []
    for chunk in chunks:
        for k, v, q in chunk.passes:
            cache[0].write(k, v, chunk.start)
            cache[0].observe_queries(q)
            reads.append(cache[0].read())
        cache.commit()
    assert all(torch.equal(a, b) for r, e in zip(reads, expected, strict=True)
               for a, b in zip(r, e, strict=True))  # fmt: skip
    assert cache[0].spans() == plain[0].spans()
    out = tuple(torch.empty_like(x) for x in cache[0].read())
    assert cache[0].read(out=out)[0].data_ptr() == out[0].data_ptr()


# --- misuse ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"layers": ()}, "layers"),
        ({"heads": (1, 0)}, "ascending"),
        ({"heads": (1, 1)}, "none twice"),
        ({"spans": (-1,)}, "from 0 on"),
        ({"spans": [0]}, "expected numbers"),
        ({"queries": -1}, "queries is -1"),
        ({"seed": 1.5}, "seed is 1.5"),
    ],
)
def test_a_selection_that_means_nothing_is_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Selection(**fields)


def test_misuse_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"layers: got 3, but there are 1"):
        recorder(CachePolicy(), Selection(layers=(0, 3)))
    with pytest.raises(ConfigError, match=r"heads: got 2, but there are 2"):
        recorder(CachePolicy(), Selection(heads=(2,)))
    with pytest.raises(ConfigError, match="layout is 'SBHD'"):
        recorder(CachePolicy(), layout="SBHD")
    with pytest.raises(ConfigError, match="recent_keep is 1"):
        recorder(CachePolicy(recent_keep=1))
    cache = recorder(CachePolicy())
    with pytest.raises(PositionError, match="no open chunk"):
        cache[0].observe_queries(torch.zeros(1, 24, HEADS, DIM))
    k = torch.zeros(1, 24, HEADS, DIM, dtype=torch.bfloat16)
    cache[0].write(k, k, 0)
    with pytest.raises(ShapeError, match="12 tokens, expected the 24"):
        cache[0].observe_queries(k[:, :12])


def test_spans_that_never_fit_the_window_are_refused() -> None:
    ranges = [(24 * n, 24 * n + 24) for n in range(8)]
    with pytest.raises(ConfigError, match="expected at most 3"):
        plan_spans(CachePolicy(span_chunks=4, window_frames=9), FRAME, ranges, [2] * 8)
