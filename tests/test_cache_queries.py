"""Query statistics: which queries a span is encoded with, and how they are pooled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from steadykv.cache import LayerCache
from steadykv.cache.query_stats import QueryStats
from steadykv.codecs import Payload, QueryMoment, SpanKey, encode
from steadykv.config import CacheConfig, CachePolicy, CodecConfig
from steadykv.errors import ShapeError
from tests.cache_cases import (
    DIM,
    FRAME,
    HEADS,
    Chunk,
    cache_for,
    chunks_of,
    drive,
    small,
    small_codec,
)
from tests.codecs import PLAIN_METHODS


def moment_of(queries: Sequence[Tensor], heads: int = HEADS) -> Tensor:
    """E[q q^T] in FP64 [B, H, D, D], by definition: query head i reads KV head floor(i·H / Hq)."""
    batch, _, query_heads, dim = queries[0].shape
    total = torch.zeros(batch, heads, dim, dim, dtype=torch.float64)
    count = 0
    for q in queries:
        for i in range(query_heads):
            rows = q[:, :, i].double()
            total[:, i * heads // query_heads] += torch.einsum("bsc,bsd->bcd", rows, rows)
        count += q.shape[1] * query_heads // heads
    return total / count


def observed(layer: LayerCache) -> QueryMoment:
    """M as the next complete span would be encoded with."""
    assert layer.stats is not None
    moment = layer.stats.for_encoding(10**6)
    assert moment is not None
    return moment


def folded(groups: Sequence[Sequence[Chunk]], upto: int) -> QueryMoment | None:
    """M after the groups before `upto`: passes update a group's moment, groups fold into M."""
    total: QueryMoment | None = None
    for group in groups[:upto]:
        pending = QueryMoment.empty(1, HEADS, DIM)
        for chunk in group:
            for _, _, q in chunk.passes:
                pending.update(q.transpose(1, 2))
        if total is None:
            total = pending
        else:
            total.fold(pending)
    return total


def key_payloads(layer: LayerCache) -> list[tuple[int, int, Payload]]:
    return [(s.start, s.end, s.payload) for s in layer.keys.segments if s.payload is not None]


# --- which queries --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "length", "groups"),
    [
        # (chunks whose queries are settled with the group), per group
        ({}, 24, [[0], [1], [2], [3], [4], [5]]),
        ({"span_chunks": 2}, 24, [[0, 1], [2, 3], [4, 5]]),
        ({"recent_keep": 2}, 24, [[0], [1], [2], [3]]),
        ({"span_chunks": 2, "recent_keep": 1}, 24, [[0, 1], [2, 3]]),
        # Kept dense for good: settled at once, as a group of its own.
        ({"sink_keep": 3}, 24, [[0], [1], [2], [3], [4], [5]]),
        # A chunk of 4 frames across a sink of 6 belongs, with its queries, to the later span.
        ({"sink_frames": 6, "window_frames": 60, "span_chunks": 2}, 32, [[0], [1, 2], [3, 4]]),
    ],
    ids=["chunk", "span", "recent", "late", "kept", "sink"],
)
def test_a_span_is_encoded_with_the_queries_of_earlier_spans(policy, length, groups):
    """Byte for byte: not with its own, nor with those seen while it waited."""
    chunks = chunks_of([length] * 6, passes=3)
    config = small("quantwm:qvg4", **policy)
    cache = cache_for(config)
    drive(cache, chunks)
    tokens = torch.cat([chunk.passes[-1][0] for chunk in chunks], dim=1).transpose(1, 2)
    payloads = key_payloads(cache[0])
    skipped = policy.get("sink_keep", 0) > 0
    assert len(payloads) == len(groups) - skipped
    warm = None
    for number, (start, end, payload) in enumerate(payloads, start=int(skipped)):
        stats = folded([[chunks[i] for i in group] for group in groups], number)
        span = tokens[:, :, start:end]
        if warm is not None and warm.shape != span.shape:
            warm = None
        key = SpanKey(0, "key", number)
        expected = encode(span, config.keys, stats=stats, warm=warm, span_key=key)
        assert payload == expected
        is_warm = number > 0
        assert bool(payload.flags["psac_active"].all()) is is_warm
        assert ("basis" in payload.tensors) is is_warm
        warm = expected


def test_values_are_encoded_without_queries():
    """Even by a codec that could use them: M belongs to the keys."""
    config = CacheConfig(small_codec("quantwm"), small_codec("quantwm"), name="both")
    cache = cache_for(config)
    drive(cache, chunks_of([24] * 3))
    for segment in cache[0].values.segments:
        assert "basis" not in segment.payload.tensors
        assert not segment.payload.flags["weight_active"].any()


@pytest.mark.parametrize("span_chunks", [1, 2])
def test_the_first_span_can_use_its_own_commit_passes(span_chunks):
    """Only the last pass of each of its chunks; later spans use everything before them."""
    codec = small_codec("quantwm", first_span="own")
    config = CacheConfig(codec, small_codec("qvg4"), CachePolicy(span_chunks=span_chunks))
    chunks = chunks_of([24] * 4, passes=3)
    cache = cache_for(config)
    drive(cache, chunks)
    payloads = key_payloads(cache[0])
    own: QueryMoment | None = None
    for chunk in chunks[:span_chunks]:
        last = QueryMoment.empty(1, HEADS, DIM)
        last.update(chunk.passes[-1][2].transpose(1, 2))
        if own is None:
            own = last
        else:
            own.fold(last)
    groups = [chunks[i : i + span_chunks] for i in range(0, 4, span_chunks)]
    dense = torch.cat([chunk.passes[-1][0] for chunk in groups[0]], dim=1).transpose(1, 2)
    first = encode(dense, codec, stats=own, span_key=SpanKey(0, "key", 0))
    assert payloads[0][2] == first
    assert payloads[0][2].flags["psac_active"].all()
    dense = torch.cat([chunk.passes[-1][0] for chunk in groups[1]], dim=1).transpose(1, 2)
    stats = folded(groups, 1)
    second = encode(dense, codec, stats=stats, warm=first, span_key=SpanKey(0, "key", 1))
    assert payloads[1][2] == second


def test_every_pass_counts_and_nothing_is_forgotten():
    """Overwritten passes, unequal lengths, chunks that left the window: M is over all of them."""
    chunks = chunks_of([24, 10, 31, 24, 24], passes=3)
    cache = cache_for(small("quantwm:qvg4", window_frames=4))
    drive(cache, chunks)
    queries = [q for chunk in chunks for _, _, q in chunk.passes]
    moment = observed(cache[0])
    torch.testing.assert_close(moment.moment.double(), moment_of(queries), rtol=2e-5, atol=1e-5)
    assert moment.count.tolist() == [[sum(q.shape[1] for q in queries)] * HEADS]


def test_queries_of_chunks_that_were_dropped_unpacked_join_too():
    config = small("quantwm:qvg4", sink_frames=3, window_frames=6, recent_keep=1)
    chunks = chunks_of([24] * 5)
    cache = cache_for(config)
    drive(cache, chunks)
    assert cache[0].dropped_dense_tokens == 3 * 24
    settled = [q for chunk in chunks[:4] for _, _, q in chunk.passes]
    torch.testing.assert_close(
        observed(cache[0]).moment.double(), moment_of(settled), rtol=2e-5, atol=1e-5
    )


def test_queries_without_an_open_chunk_belong_to_the_next():
    first, second, third = chunks_of([24] * 3, passes=1)
    early, late = (cache_for(small("quantwm:qvg4"))[0] for _ in range(2))
    for layer, is_early in ((early, True), (late, False)):
        for chunk in (first, second, third):
            k, v, q = chunk.passes[0]
            if is_early and chunk is not first:
                layer.observe_queries(q)
            layer.write(k, v, chunk.start)
            if not is_early or chunk is first:
                layer.observe_queries(q)
            layer.commit()
    assert [p for _, _, p in key_payloads(early)] == [p for _, _, p in key_payloads(late)]


# --- how they are pooled --------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [1, 4, 7])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_query_heads_of_a_kv_head_are_pooled(per_head, layout):
    chunks = chunks_of([17, 24], batch=2, query_heads=per_head * HEADS)
    cache = cache_for(small("quantwm:qvg4"), layout=layout)
    drive(cache, chunks, layout)
    moment = observed(cache[0])
    queries = [q for chunk in chunks for _, _, q in chunk.passes]
    torch.testing.assert_close(moment.moment.double(), moment_of(queries), rtol=2e-5, atol=1e-5)
    assert moment.count.unique().tolist() == [2 * (17 + 24) * per_head]


@pytest.mark.parametrize("per_head", [1, 4, 7])
def test_pooling_is_the_same_in_both_layouts_and_for_single_rows(per_head):
    """Bit for bit."""
    chunks = chunks_of([17, 24, 24], batch=3, query_heads=per_head * HEADS)
    config = small("quantwm:qvg4")
    bshd, bhsd = cache_for(config), cache_for(config, layout="BHSD")
    drive(bshd, chunks)
    drive(bhsd, chunks, "BHSD")
    expected = observed(bshd[0])
    assert torch.equal(expected.moment, observed(bhsd[0]).moment)
    for row in range(3):
        alone = cache_for(config)
        drive(alone, [chunk.row(row) for chunk in chunks])
        assert torch.equal(expected.moment[row, None], observed(alone[0]).moment)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_queries_may_have_another_dtype_than_the_cache(dtype):
    layer = cache_for(small("quantwm:qvg4"))[0]
    k, v, q = chunks_of([24])[0].passes[0]
    layer.write(k, v, 0)
    layer.observe_queries(q.to(dtype))
    layer.commit()
    expected = moment_of([q.to(dtype)])
    torch.testing.assert_close(observed(layer).moment.double(), expected, rtol=2e-5, atol=1e-5)


def test_non_finite_queries_count_as_zero():
    layers = [cache_for(small("quantwm:qvg4"))[0] for _ in range(2)]
    k, v, q = chunks_of([24])[0].passes[0]
    bad = q.clone()
    bad[0, 3, 1, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    for layer, queries in zip(layers, (bad, bad.nan_to_num(0.0, 0.0, 0.0)), strict=True):
        layer.write(k, v, 0)
        layer.observe_queries(queries)
        layer.commit()
    assert torch.equal(observed(layers[0]).moment, observed(layers[1]).moment)
    assert [int(layer.nonfinite_count) for layer in layers] == [3, 0]


# --- what does not count --------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*PLAIN_METHODS, "bf16:qvg4"])
def test_codecs_that_use_no_queries_keep_none(method):
    cache = cache_for(small(method))
    chunks = chunks_of([24, 24])
    drive(cache, chunks)
    assert cache[0].stats is None
    assert "query_moment" not in cache.ledger().parts
    unobserved = cache_for(small(method))
    for chunk in chunks:
        for k, v, _ in chunk.passes:
            unobserved[0].write(k, v, chunk.start)
    unobserved.commit()
    assert all(map(torch.equal, unobserved[0].read(), cache[0].read()))


@pytest.mark.parametrize("method", ["qvg", "quantwm:qvg4"])
@pytest.mark.parametrize(
    "shape", [(1, 24, HEADS + 1, DIM), (2, 24, HEADS, DIM), (1, 24, HEADS, DIM - 1), (24, DIM)]
)
def test_queries_that_do_not_fit_are_refused(method, shape):
    """Also where they would not be used: a mistake should not show only with another method."""
    layer = cache_for(small(method))[0]
    layer.write(*chunks_of([24])[0].passes[0][:2], 0)
    with pytest.raises(ShapeError, match=r"q is .*: expected \(1, S>0, n\*2, 32\) in layout BSHD"):
        layer.observe_queries(torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match=r"q is torch\.int64"):
        layer.observe_queries(torch.zeros(1, 24, HEADS, DIM, dtype=torch.int64))


def test_the_number_of_tokens_need_not_be_that_of_the_chunk():
    """A host may hand over every second query, or those of a longer sequence."""
    layer = cache_for(small("quantwm:qvg4"))[0]
    k, v, q = chunks_of([24])[0].passes[0]
    layer.write(k, v, 0)
    layer.observe_queries(q[:, ::2])
    layer.observe_queries(torch.cat([q, q], dim=1))
    layer.commit()
    expected = moment_of([q[:, ::2], q, q])
    torch.testing.assert_close(observed(layer).moment.double(), expected, rtol=2e-5, atol=1e-5)


# --- the accumulators -----------------------------------------------------------------------------


def test_statistics_take_as_many_accumulators_as_there_are_waiting_spans():
    """M and one pending moment in the plain case; each FP32 D² and an int64 per head."""
    one = HEADS * (4 * DIM * DIM + 8)
    for policy, count in (
        ({}, 1),  # all settled at the commit
        ({"span_chunks": 2}, 2),  # M, and the open span's
        ({"span_chunks": 2, "recent_keep": 2}, 3),
    ):
        cache = cache_for(small("quantwm:qvg4", **policy))
        drive(cache, chunks_of([24] * 5))
        assert cache.ledger().parts["query_moment"] == count * one


def test_query_stats_alone():
    """Pending queries stay out of M until their group is settled."""
    stats = QueryStats(heads=1)
    generator = torch.Generator().manual_seed(0)
    queries = [torch.randn(1, 3, n, 4, generator=generator) for n in (5, 6, 7)]
    assert stats.for_encoding(0) is None
    assert stats.nbytes == 0
    for group, q in enumerate(queries):
        stats.observe(q, group)
    assert stats.for_encoding(0) is None
    assert stats.pending_groups == (0, 1, 2)
    stats.settle(0)
    stats.settle(0)
    assert int(stats.for_encoding(1).count) == 15
    stats.settle(2)
    assert stats.pending_groups == (1,)
    expected = moment_of([q.transpose(1, 2) for q in (queries[0], queries[2])], heads=1)
    torch.testing.assert_close(
        stats.for_encoding(1).moment.double(), expected, rtol=1e-6, atol=1e-6
    )
    stats.reset()
    assert stats.for_encoding(1) is None
    assert stats.nbytes == 0


def test_autocast_inference_mode_and_gradients_change_nothing():
    """FP32 whatever the host has switched on; and state made inside can be updated outside."""
    chunks = chunks_of([24] * 4)
    config = small("quantwm:qvg4", span_chunks=2, window_frames=FRAME)
    expected = drive(cache_for(config), chunks)
    cache = cache_for(config)
    reads = []
    for number, chunk in enumerate(chunks):
        modes = [
            torch.inference_mode(),
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.enable_grad(),
            torch.no_grad(),
        ]
        for step, (k, v, q) in enumerate(chunk.passes):
            with modes[(number + step) % 4]:
                cache[0].write(k.clone().requires_grad_(), v.clone(), chunk.start)
                cache[0].observe_queries(q.clone().requires_grad_())
                k_read, v_read = cache[0].read()
            assert not k_read.requires_grad
            reads.append((k_read, v_read))
        with modes[(number + 3) % 4]:
            cache.commit()
    for one, other in zip(reads, expected, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_codec_configuration_of_its_own_kind_is_used_for_keys():
    """Rank 0 turns the compensation off but keeps the channel weights."""
    codec = CodecConfig("quantwm", group_size=16, centroids=4, candidates=2, rank=0)
    cache = cache_for(CacheConfig(codec, small_codec("qvg4"), name="no-psac"))
    drive(cache, chunks_of([24] * 2))
    second = key_payloads(cache[0])[1][2]
    assert second.flags["weight_active"].all()
    assert not second.flags["psac_active"].any()
    assert "basis" not in second.tensors
