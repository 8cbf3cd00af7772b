"""What is packed, when, with what, and what comes back."""

from __future__ import annotations

import pytest
import torch

from steadykv.cache import LayerCache
from steadykv.codecs import Payload, SpanKey, encode
from steadykv.config import METHODS, CacheConfig, CachePolicy
from steadykv.errors import ConfigError
from tests.cache_cases import (
    DIM,
    FRAME,
    HEADS,
    cache_for,
    chunks_of,
    drive,
    small,
    small_codec,
)
from tests.codecs import PACKED_METHODS
from tests.plain_cache import PlainCache


def packed_ranges(layer: LayerCache, side: str = "keys") -> list[tuple[int, int]]:
    segments = getattr(layer, side).segments
    return [(s.start, s.end) for s in segments if s.payload is not None]


def run(config: CacheConfig, lengths: list[int]) -> LayerCache:
    cache = cache_for(config)
    drive(cache, chunks_of(lengths))
    return cache[0]


def snr_db(expected: torch.Tensor, got: torch.Tensor) -> float:
    error = (expected.float() - got.float()).square().sum()
    return float(10 * torch.log10(expected.float().square().sum() / error))


# --- content --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", PACKED_METHODS)
@pytest.mark.parametrize(
    "policy",
    [
        {"span_chunks": 1},
        {"span_chunks": 3, "window_frames": 13},
        {"span_chunks": 2, "window_frames": 11, "sink_frames": 4, "recent_keep": 1},
        {"span_chunks": 2, "window_frames": 10, "sink_keep": 4},
    ],
    ids=lambda policy: "-".join(map(str, policy.values())),
)
def test_packed_tokens_are_close_and_dense_tokens_exact(poisoned_memory, method, policy):
    """Every read has the tokens of the plain window, in its order: exact where they are dense, in a
    two-sided band of signal to noise where they are packed."""
    lengths = [24, 17, 24, 31, 24, 24, 24]
    chunks = chunks_of(lengths, batch=2)
    layer = cache_for(small(method, **policy))[0]
    window = policy.get("window_frames")
    sink = policy.get("sink_frames", 0) * FRAME
    plain = PlainCache(1, None if window is None else window * FRAME, sink=sink)[0]
    seen_packed = 0
    for chunk in chunks:
        for k, v, q in chunk.passes:
            layer.write(k, v, chunk.start)
            plain.write(k, v, chunk.start)
            layer.observe_queries(q)
            indices = plain.indices()
            assert [i for start, end in layer.spans() for i in range(start, end)] == indices
            reads = zip(layer.read(), plain.read(), ("keys", "values"), strict=True)
            for got, expected, side in reads:
                packed = {i for start, end in packed_ranges(layer, side) for i in range(start, end)}
                is_packed = torch.tensor([i in packed for i in indices])
                assert torch.equal(got[:, ~is_packed], expected[:, ~is_packed])
                if is_packed.any():
                    seen_packed += 1
                    assert 5 < snr_db(expected[:, is_packed], got[:, is_packed]) < 15
    assert seen_packed >= 8


@pytest.mark.parametrize("method", PACKED_METHODS)
def test_spans_are_what_encode_makes_of_the_chunks(method):
    """Byte for byte: the span's tokens joined, its number, its warm start. Chunks of equal and of
    other lengths, so that warm and cold starts both occur."""
    lengths = [24, 24, 24, 24, 24, 20, 24, 20, 24, 20]
    chunks = chunks_of(lengths)
    config = small(method, span_chunks=2)
    layer = cache_for(config, layers=2)[1]
    for chunk in chunks:
        for k, v, _ in chunk.passes:  # no queries: those have tests of their own
            layer.write(k, v, chunk.start)
    layer.commit()
    for store, codec, name in (
        (layer.keys, config.keys, "key"),
        (layer.values, config.values, "value"),
    ):
        segments = [segment for segment in store.segments if segment.payload is not None]
        assert len(segments) == 5
        warm: Payload | None = None
        for span, segment in enumerate(segments):
            pair = chunks[2 * span : 2 * span + 2]
            side = 0 if name == "key" else 1
            dense = torch.cat([chunk.passes[-1][side] for chunk in pair], 1).transpose(1, 2)
            if warm is not None and warm.shape != dense.shape:
                warm = None
            expected = encode(dense, codec, warm=warm, span_key=SpanKey(1, name, span))
            assert segment.payload == expected
            if warm is not None and "centroids" in METHODS[codec.method]:
                cold = encode(dense, codec, span_key=SpanKey(1, name, span))
                assert segment.payload != cold
            warm = expected


def test_warm_start_can_be_off():
    config = CacheConfig(small_codec("qvg", warm_start=False), small_codec("qvg"), name="half")
    layer = run(config, [24, 24])
    chunk = chunks_of([24, 24])[1]
    k, v, _ = chunk.passes[-1]
    keys, values = layer.keys.segments[1].payload, layer.values.segments[1].payload
    cold = encode(k.transpose(1, 2), config.keys, span_key=SpanKey(0, "key", 1))
    assert keys == cold
    assert values != encode(v.transpose(1, 2), config.values, span_key=SpanKey(0, "value", 1))


@pytest.mark.parametrize("method", PACKED_METHODS)
@pytest.mark.parametrize("policy", [{}, {"span_chunks": 2, "window_frames": 9, "sink_frames": 2}])
def test_a_batch_equals_its_rows(method, policy):
    chunks = chunks_of([24, 24, 15, 24, 24], batch=2)
    together = drive(cache_for(small(method, **policy)), chunks)
    for row in range(2):
        one = [chunk.row(row) for chunk in chunks]
        alone = drive(cache_for(small(method, **policy)), one)
        for both, single in zip(together, alone, strict=True):
            for x, y in zip(both, single, strict=True):
                assert torch.equal(x[row : row + 1], y)


@pytest.mark.parametrize("method", PACKED_METHODS)
def test_two_runs_and_a_reset_run_are_the_same(method):
    """Statistics, warm starts, span numbers and counters all start anew; the RNG is not touched."""
    chunks = chunks_of([24] * 5)
    config = small(method, span_chunks=2, window_frames=9)
    state = torch.random.get_rng_state()
    cache = cache_for(config, layers=2)
    first = drive(cache, chunks)
    ledger, status = cache.ledger(), cache.status()
    again = drive(cache_for(config, layers=2), chunks)
    cache.reset()
    assert cache[0].spans() == []
    assert cache[0].read()[0].shape[1] == 0
    assert cache.ledger().packed_tokens == cache.ledger().dense_tokens == 0
    # A run in between that leaves a span half finished.
    drive(cache, chunks_of([24, 24, 24], seed=9))
    cache.reset()
    after_reset = drive(cache, chunks)
    assert torch.equal(state, torch.random.get_rng_state())
    for one, two, three in zip(first, again, after_reset, strict=True):
        assert all(map(torch.equal, one, two))
        assert all(map(torch.equal, one, three))
    assert cache.status() == status
    assert cache.ledger() == ledger


# --- which tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", PACKED_METHODS)
@pytest.mark.parametrize("span_chunks", [1, 2, 3])
def test_every_token_is_encoded_once(method, span_chunks):
    """However often a chunk is rewritten and the window rolls."""
    chunks = chunks_of([24] * 12, passes=3)
    layer = cache_for(small(method, span_chunks=span_chunks, window_frames=10))[0]
    payloads: dict[tuple[int, int], Payload] = {}
    for chunk in chunks:
        for k, v, q in chunk.passes:
            layer.write(k, v, chunk.start)
            layer.observe_queries(q)
            for segment in layer.keys.segments:
                if segment.payload is not None:
                    known = payloads.setdefault((segment.start, segment.end), segment.payload)
                    assert segment.payload is known
    layer.commit()
    assert layer.encoded_tokens == 12 * 24
    assert layer.status().encoded_tokens == 12 * 24
    assert layer.status().dropped_dense_tokens == 0


def test_the_window_frees_whole_segments_only():
    """Window of 6 frames, spans of 2 chunks of 3: a span stays until its last token leaves."""
    cache = cache_for(small("qvg", span_chunks=2, window_frames=6))
    ranges = []
    for chunk in chunks_of([24] * 6, passes=1):
        cache[0].write(*chunk.passes[0][:2], chunk.start)
        ranges.append((packed_ranges(cache[0]), cache[0].spans()))
    assert ranges == [
        ([], [(0, 24)]),
        ([], [(0, 48)]),
        ([(0, 48)], [(24, 72)]),
        ([], [(48, 96)]),
        ([(48, 96)], [(72, 120)]),
        ([], [(96, 144)]),
    ]


def test_an_unfinished_span_is_released_piece_by_piece():
    """A waiting chunk outside the window is dropped and counted; the rest of its span is packed.
    Chunks of unequal lengths: the shorter one of two shows that spans may fit."""
    layer = cache_for(small("qvg", span_chunks=3, window_frames=5))[0]
    seen = []
    for chunk in chunks_of([24, 16, 24, 16, 24, 16], passes=1):
        layer.write(*chunk.passes[0][:2], chunk.start)
        seen.append((layer.dropped_dense_tokens, packed_ranges(layer)))
    assert seen == [(0, []), (0, []), (24, []), (24, [(24, 64)]), (24, []), (40, [])]
    layer.commit()
    assert packed_ranges(layer) == [(80, 120)]
    assert layer.spans() == [(80, 120)]
    assert layer.encoded_tokens == 40 + 40


def test_a_policy_that_packs_nothing_is_an_error():
    """Two recent chunks fill the window of two: the first loses its tokens unpacked."""
    cache = cache_for(small("qvg", recent_keep=2, window_frames=6))[0]
    chunks = chunks_of([24] * 3, passes=1)
    for chunk in chunks[:2]:
        cache.write(*chunk.passes[0][:2], chunk.start)
    with pytest.raises(ConfigError, match=r"recent_keep=2 .*window of 6 frames.*lower recent_keep"):
        cache.write(*chunks[2].passes[0][:2], chunks[2].start)
    # The same policy is fine where nothing is to be packed.
    drive(cache_for(small("bf16", recent_keep=2, window_frames=6)), chunks)


def test_a_sink_that_packs_makes_a_tight_window_legal():
    """Only sink and open chunk are attended: later chunks leave unpacked, and are counted."""
    layer = run(small("qvg", sink_frames=3, window_frames=6, recent_keep=1), [24] * 5)
    assert packed_ranges(layer) == [(0, 24)]
    assert layer.encoded_tokens == 24
    assert layer.dropped_dense_tokens == 3 * 24
    assert layer.spans() == [(0, 24), (96, 120)]


def test_chunks_across_the_sink_are_cut():
    """Window 18, sink 6, chunks of 4 frames: spans end at the sink, so that it alone stays."""
    layer = run(small("qvg", sink_frames=6, window_frames=18, span_chunks=2), [32] * 9)
    assert layer.spans() == [(0, 48), (192, 288)]
    assert packed_ranges(layer) == [(0, 48), (160, 224), (224, 288)]
    assert layer.encoded_tokens == 288


def test_kept_and_recent_chunks_stay_dense():
    layer = run(small("qvg", sink_keep=3, recent_keep=2), [24] * 6)
    assert packed_ranges(layer) == [(24, 48), (48, 72), (72, 96)]
    roles = [(s.start, s.role) for s in layer.keys.segments if s.payload is None]
    assert roles == [(0, "dense"), (96, "waiting"), (120, "waiting")]
    reasons = {s.start: s.reason for s in layer.status().segments}
    assert reasons[0] == "sink_keep: the first 3 frames stay dense"
    assert reasons[24] == ""
    assert reasons[120] == "recent_keep: the newest 2 committed chunks stay dense"


# --- one side dense -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["qvg:bf16", "bf16:qvg", "quantwm:bf16", "bf16:kivi"])
def test_keys_and_values_have_their_own_codecs(method):
    chunks = chunks_of([24] * 5)
    layer = cache_for(small(method, span_chunks=2, window_frames=6))
    reads = drive(layer, chunks)
    plain = drive(PlainCache(1, 6 * FRAME), chunks)
    dense_side = 1 if method.endswith("bf16") else 0
    for read, expected in zip(reads, plain, strict=True):
        assert torch.equal(read[dense_side], expected[dense_side])
    assert not torch.equal(reads[-1][1 - dense_side], plain[-1][1 - dense_side])
    status = layer[0].status()
    # A token with one packed side is packed. The dense side is freed chunk by chunk, the packed one
    # span by span: half of the span of tokens 48 to 96 is outside the window.
    assert (status.packed_tokens, status.dense_tokens, status.attended_tokens) == (48, 24, 48)
    forms = [
        (s.start, s.end, *((s.keys, s.values) if dense_side else (s.values, s.keys)))
        for s in status.segments
    ]
    assert forms == [
        (48, 72, "packed", "freed"),
        (72, 96, "packed", "dense"),
        (96, 120, "dense", "dense"),
    ]
    name = "values" if dense_side else "keys"
    assert f"{name}: method bf16" in {s.reason for s in status.segments}


# --- spans that would not shrink ------------------------------------------------------------------


def test_a_span_that_saves_nothing_stays_dense_and_says_so():
    """8 tokens with 8 centroids: the codebook alone is as large as the tokens."""
    codec = small_codec("qvg", centroids=8)
    config = CacheConfig(codec, small_codec("kivi"), CachePolicy(window_frames=4), "mixed")
    layer = run(config, [8, 8, 8])
    bits = codec.bits_per_element(1, HEADS, 8, DIM)
    assert bits >= 16
    assert packed_ranges(layer) == []
    assert packed_ranges(layer, "values") == [(0, 8), (8, 16), (16, 24)]
    status = layer.status()
    assert {s.reason for s in status.segments} == {
        f"keys: {bits:.1f} bits per element predicted, not below 16"
    }
    assert {(s.keys, s.values) for s in status.segments} == {("dense", "packed")}
    assert {s.role for s in layer.keys.segments} == {"dense"}
    assert torch.equal(layer.read()[0][:, :8], chunks_of([8, 8, 8])[0].passes[-1][0])
    # The same chunks, three to a span, are worth packing.
    layer = run(config.replace(span_chunks=3), [8, 8, 8])
    assert packed_ranges(layer) == [(0, 24)]


def test_the_prediction_counts_compensation_only_where_there_are_queries():
    """With basis and coefficients the span would not shrink; the cold first span still does."""
    codec = small_codec("quantwm", rank=32, centroids=8)
    cold = codec.bits_per_element(1, HEADS, 16, DIM, compensated=False)
    warm = codec.bits_per_element(1, HEADS, 16, DIM, compensated=True)
    assert cold < 16 <= warm
    layer = run(CacheConfig(codec, small_codec("qvg"), name="wide"), [16, 16])
    assert packed_ranges(layer) == [(0, 16)]
    assert packed_ranges(layer, "values") == [(0, 16), (16, 32)]
    assert layer.encoded_tokens == 32


# --- late packing, status -------------------------------------------------------------------------


def test_status_tells_every_token_apart():
    cache = cache_for(small("qvg", span_chunks=2))
    chunks = chunks_of([24] * 4, passes=1)
    drive(cache, chunks[:3])
    cache[0].write(*chunks[3].passes[0][:2], chunks[3].start)
    status = cache.status()[0]
    assert [(s.start, s.end, s.keys, s.values, s.reason) for s in status.segments] == [
        (0, 48, "packed", "packed", ""),
        (48, 72, "dense", "dense", "waits for its span: 1 of 2 chunks committed"),
        (72, 96, "dense", "dense", "open chunk"),
    ]
    assert status.packed_tokens == 48
    assert status.dense_tokens == 48
    assert status.attended_tokens == 96
    assert "0-48: keys packed, values packed" in str(status)


def test_bf16_says_why_it_is_dense():
    status = run(small("bf16"), [24, 24]).status()
    assert status.packed_tokens == status.encoded_tokens == 0
    assert {s.reason for s in status.segments} == {"keys: method bf16; values: method bf16"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("method", PACKED_METHODS)
def test_other_dtypes_are_packed_without_passing_bf16(method, dtype):
    """A span of FP32 tokens is the FP32 tokens encoded, and decodes to FP32."""
    config = small(method)
    chunks = chunks_of([24], dtype=dtype)
    cache = cache_for(config, dtype=dtype)
    drive(cache, chunks)
    v = chunks[0].passes[-1][1]
    expected = encode(v.transpose(1, 2), config.values, span_key=SpanKey(0, "value", 0))
    assert cache[0].values.segments[0].payload == expected
    assert cache[0].read()[1].dtype == dtype
