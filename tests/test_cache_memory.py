"""Bytes: the ledger against the storages that really live, the peak against the real peak."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from steadykv.cache import KVCache
from steadykv.cache.segments import part_of
from steadykv.codecs import QueryMoment, encode
from steadykv.config import parse_method, preset
from tests.cache_cases import (
    DIM,
    HEADS,
    Allocations,
    NoHostSync,
    cache_for,
    chunks_of,
    drive,
    small,
    small_codec,
)
from tests.codecs import (
    CACHE_METHODS,
    CODEC_METHODS,
    DENSE_METHODS,
    KEYS_ONLY_METHODS,
    PACKED_METHODS,
)

METHODS = [*CACHE_METHODS, *KEYS_ONLY_METHODS]
PACKED_CODECS = [name for name in CODEC_METHODS if name not in DENSE_METHODS]
CASES = [
    ({}, "BSHD"),
    ({"span_chunks": 2, "window_frames": 9}, "BHSD"),
    ({"span_chunks": 2, "window_frames": 14, "sink_frames": 4, "recent_keep": 1}, "BSHD"),
]


def step(cache: KVCache, chunk, commit: bool = True) -> None:
    """All passes of a chunk, as a host runs them: one dense layer at a time."""
    for k, v, q in chunk.passes:
        for layer in cache:
            layer.write(k, v, chunk.start)
            layer.observe_queries(q)
            layer.read()
    if commit:
        cache.commit()


# --- what lives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("policy", "layout"), CASES, ids=["chunk", "span", "sink"])
def test_resident_bytes_are_the_storages_that_live(method, policy, layout):
    """To the byte, after every pass and every commit; the dense views that were read are gone."""
    with Allocations() as allocations:
        cache = cache_for(small(method, **policy), layers=2, layout=layout)
    chunks = chunks_of([24, 24, 13, 24, 24, 24, 8, 24], batch=2)
    for chunk in chunks:
        for k, v, q in chunk.passes:
            if layout == "BHSD":
                k, v, q = (x.transpose(1, 2) for x in (k, v, q))
            for layer in cache:
                with allocations:
                    layer.write(k, v, chunk.start)
                    layer.observe_queries(q)
                    layer.read()
            assert cache.nbytes == allocations.now
        with allocations:
            cache.commit()
        assert cache.nbytes == allocations.now
        ledger = cache.ledger()
        assert ledger.resident_bytes == allocations.now
        assert sum(ledger.parts.values()) == allocations.now
    with allocations:
        cache.reset()
    assert cache.nbytes == allocations.now == 2 * 8  # the counters of non-finite numbers
    assert ledger.peak_bytes >= allocations.peak


@pytest.mark.parametrize("method", PACKED_METHODS)
@pytest.mark.parametrize("span_chunks", [1, 2])
def test_dense_tokens_die_with_the_commit_that_packs_them(method, span_chunks):
    cache = cache_for(small(method, span_chunks=span_chunks))
    sources: list[weakref.ref] = []
    for number, chunk in enumerate(chunks_of([24] * 4), start=1):
        step(cache, chunk, commit=False)
        for store in (cache[0].keys, cache[0].values):
            sources.append(weakref.ref(store.segments[-1].tensor.untyped_storage()))
        assert all(source() is not None for source in sources)
        cache.commit()
        if number % span_chunks == 0:
            assert all(source() is None for source in sources)
            sources.clear()


def test_a_cut_chunk_does_not_keep_both_halves_alive():
    """A chunk across the sink's end: its second half can leave."""
    cache = cache_for(small("bf16", sink_frames=3, window_frames=7))
    for chunk in chunks_of([32] * 4):
        step(cache, chunk)
    held = [(s.start, s.end) for s in cache[0].keys.segments]
    assert held == [(0, 24), (96, 128)]
    assert cache.nbytes == 2 * (24 + 32) * HEADS * DIM * 2 + 8


def test_warm_centroids_outlive_their_span_and_are_counted():
    """Window of one chunk: the span they came from is gone when the next one is encoded."""
    cache = cache_for(small("qvg", window_frames=3))
    first, second = chunks_of([24, 24], passes=1)
    step(cache, first)
    before = cache[0].keys.segments[0].payload
    cache[0].write(*second.passes[0][:2], second.start)
    assert [s.role for s in cache[0].keys.segments] == ["open"]
    centroid_bytes = before.nbytes_by_part()["centroids"]
    assert cache.ledger().parts["centroids"] == 2 * centroid_bytes
    cache.commit()
    k = second.passes[0][0].transpose(1, 2)
    codec = cache.config.keys
    assert (
        cache[0]
        .keys.segments[0]
        .payload.tensors["centroids"]
        .equal(encode(k, codec, warm=before).tensors["centroids"])
    )


def live_tensor_bytes() -> int:
    """Bytes of the storages of all tensors that Python can reach."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    # The compiler leaves tensors of symbolic size behind, which have no memory.
    return sum(size for size in storages.values() if type(size) is int)


@pytest.mark.parametrize("method", CACHE_METHODS)
def test_memory_stays_flat_over_a_long_roll(method):
    """60 chunks: tensors that live, objects and the peak are those of the first windows."""
    pattern = chunks_of([24] * 4, passes=1)
    before = live_tensor_bytes()
    cache = cache_for(small(method, span_chunks=2, window_frames=10, sink_frames=3))
    seen = []
    for number in range(60):
        k, v, q = pattern[number % 4].passes[0]
        cache[0].write(k, v, 24 * number)
        cache[0].observe_queries(q)
        cache[0].read()
        if number % 12 == 11:
            held = live_tensor_bytes() - before
            assert held == cache.nbytes
            seen.append((held, len(gc.get_objects()), cache.ledger().peak_bytes))
    assert len({(held, peak) for held, _, peak in seen}) == 1
    assert abs(seen[-1][1] - seen[1][1]) < 50
    assert cache[0].spans() == [(0, 24), (60 * 24 - 56, 60 * 24)]
    # All but the open chunk and at most one that waits.
    assert cache[0].encoded_tokens >= (0 if method in DENSE_METHODS else (60 - 2) * 24)


# --- peak -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_ledgers_peak_bounds_the_real_one(method):
    """From both sides, at sizes where tokens outweigh constants: never too small, and at most half
    too large."""
    config = parse_method(method)
    config = config.with_span(2, 16).replace(window_frames=8, sink_frames=0)
    with Allocations() as allocations:
        cache = KVCache(2, 2, 64, 96, config)
        generator = torch.Generator().manual_seed(0)
    for chunk in range(8):
        for _ in range(2):
            k, v, q = (torch.randn(1, 192, 2, 64, generator=generator).bfloat16() for _ in "kvq")
            with allocations:
                for layer in cache:
                    layer.write(k, v, 192 * chunk)
                    layer.observe_queries(q)
                    layer.read()
        with allocations:
            cache.commit()
        assert allocations.peak <= cache.ledger().peak_bytes
    assert cache.ledger().peak_bytes <= 1.5 * allocations.peak
    if method not in DENSE_METHODS:
        assert cache.ledger().packed_tokens == 2 * 8 * 96


def test_reading_into_out_does_not_count_as_the_caches():
    fresh, reusing = (cache_for(small("bf16")) for _ in range(2))
    out = tuple(torch.empty(1, 48, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    for chunk in chunks_of([24, 24]):
        for cache, target in ((fresh, None), (reusing, out)):
            cache[0].write(*chunk.passes[0][:2], chunk.start)
            cache[0].read(target)
    view = 2 * 48 * HEADS * DIM * 2
    assert fresh.ledger().peak_bytes == fresh.nbytes + view
    assert reusing.ledger().peak_bytes < reusing.nbytes + view


def test_one_layer_is_dense_at_a_time():
    """Reading eight layers one after the other peaks like reading one."""
    peaks = {}
    for layers in (1, 8):
        cache = cache_for(small("qvg", window_frames=30), layers=layers)
        chunks = chunks_of([24] * 8, passes=1)
        for chunk in chunks:
            step(cache, chunk)
        before = cache.nbytes
        with Allocations() as allocations:
            for layer in cache:
                layer.read()
        peaks[layers] = allocations.peak
        assert cache.nbytes == before
        assert allocations.now == 0
    assert peaks[8] == peaks[1]


# --- what the ledger says -------------------------------------------------------------------------


def test_the_ledger_of_the_embedded_models_sizes():
    """Spans of 1,152 tokens, 32 centroids, head dimension 128; quantwm without its cold start."""
    expected = {"kivi": 3.0, "qvg": 2.632, "qvg4": 2.663, "quantwm": 3.031}
    expected["kvquant"] = 2.389
    expected |= {"rtn": 2.5, "quarot": 2.5}
    assert set(expected) == set(PACKED_CODECS)
    for name, bits in expected.items():
        config = preset(name).with_span(2, 32)
        warm = config.needs_queries
        # The first span has no statistics: it leaves the window.
        config = config.replace(window_frames=6)
        cache = KVCache(1, 3, 128, 192, config)
        generator = torch.Generator().manual_seed(0)
        for chunk in range(4):
            k, v, q = (torch.randn(1, 576, 3, 128, generator=generator).bfloat16() for _ in "kvq")
            cache[0].write(k, v, 576 * chunk)
            cache[0].observe_queries(q)
        cache.commit()
        ledger = cache.ledger()
        assert ledger.packed_tokens == 1152
        assert ledger.bits_per_element == pytest.approx(bits, abs=5e-4)
        assert ledger.bits_per_element == config.bits_per_element(1, 3, 1152, 128, warm)
        # Nothing but payloads, statistics and a few counters is held.
        payloads = ledger.resident_bytes - ledger.parts.get("query_moment", 0)
        assert 2 * 2 * 3 * 1152 * 128 / payloads == pytest.approx(16 / bits, rel=2e-3)


def test_bits_per_element_of_a_split_configuration():
    """K2V16: the mean of the payload's bits and 16."""
    config = small("quantwm:bf16", span_chunks=2)
    cache = cache_for(config)
    drive(cache, chunks_of([24] * 5))
    ledger = cache.ledger()
    spans = [s.payload.bits_per_element for s in cache[0].keys.segments if s.payload is not None]
    assert len(spans) == 2
    assert spans[0] < spans[1]  # the cold start has no basis
    assert ledger.bits_per_element == pytest.approx((sum(spans) / 2 + 16) / 2)
    assert ledger.packed_tokens == 96
    assert ledger.dense_tokens == 24


def test_compression_counts_everything_that_is_held():
    """BF16 bytes of the attended tokens over payloads, waiting and open tokens and statistics."""
    cache = cache_for(small("quantwm:qvg4", span_chunks=2), layers=2)
    chunks = chunks_of([24] * 4)
    for chunk in chunks[:3]:
        step(cache, chunk)
    step(cache, chunks[3], commit=False)
    ledger = cache.ledger()
    payloads = sum(
        segment.payload.nbytes
        for layer in cache
        for store in (layer.keys, layer.values)
        for segment in store.segments
        if segment.payload is not None
    )
    one_chunk = 2 * 2 * 24 * HEADS * DIM * 2  # layers, K and V
    parts = ledger.parts
    moments = 2 * 2 * HEADS * (4 * DIM * DIM + 8)  # layers; M and one pending
    assert parts["waiting"] == parts["open"] == one_chunk
    assert parts["query_moment"] == moments
    packed = ("codes", "scales", "ids", "centroids")
    assert sum(parts[name] for name in packed) == payloads
    assert "basis" not in parts  # there is only a first span
    total = payloads + 2 * one_chunk + moments + parts["counters"]
    assert ledger.resident_bytes == cache.nbytes == total
    assert ledger.compression == 4 * one_chunk / total
    assert ledger.attended_tokens == 2 * 96


def test_a_span_that_has_partly_left_is_paid_in_full():
    cache = cache_for(small("qvg", span_chunks=2, window_frames=6))
    chunks = chunks_of([24] * 3, passes=1)
    for chunk in chunks:
        step(cache, chunk)
    ledger = cache.ledger()
    assert ledger.packed_tokens == 48
    assert ledger.attended_tokens == 48
    assert ledger.compression == 2 * 48 * HEADS * DIM * 2 / cache.nbytes
    assert ledger.bits_per_element == cache[0].keys.segments[0].payload.bits_per_element


def test_bf16_compresses_by_one():
    cache = cache_for(small("bf16"))
    assert cache.ledger().compression == 1.0
    drive(cache, chunks_of([24, 24]))
    ledger = cache.ledger()
    assert ledger.bits_per_element == 16
    assert ledger.compression == pytest.approx(1, rel=1e-3)
    wide = cache_for(small("bf16"), dtype=torch.float32)
    drive(wide, chunks_of([24, 24], dtype=torch.float32))
    assert wide.ledger().bits_per_element == 32
    assert wide.ledger().compression == pytest.approx(0.5, rel=1e-3)


def test_the_ledger_is_the_sum_of_its_layers_and_prints_every_part():
    cache = cache_for(small("quantwm:qvg4"), layers=3)
    drive(cache, chunks_of([24] * 3))
    ledger = cache.ledger()
    assert [layer.layer for layer in ledger.layers] == [0, 1, 2]
    assert ledger.resident_bytes == sum(layer.nbytes for layer in cache)
    assert ledger.layers[1] == cache[1].ledger()
    assert ledger.peak_bytes > ledger.resident_bytes
    expected = {"codes", "scales", "ids", "centroids", "basis", "coefficients"}
    expected |= {"query_moment", "counters"}
    assert set(ledger.parts) == expected
    text = str(ledger)
    for word in (*expected, "bits per element", "compression", "resident", "peak", "packed"):
        assert word in text
    data = ledger.to_dict()
    assert data["resident_bytes"] == sum(data["parts"].values())
    assert len(data["layers"]) == 3


def test_reset_restarts_the_peak():
    cache = cache_for(small("qvg"), layers=2)
    drive(cache, chunks_of([24] * 6))
    long = cache.ledger().peak_bytes
    cache.reset()
    drive(cache, chunks_of([24]))
    assert cache.ledger().peak_bytes < long


def test_every_payload_tensor_has_a_part():
    names = {"codes", "ids", "centroids", "basis"}
    for method in PACKED_CODECS:
        codec = small_codec(method)
        stats = QueryMoment.empty(1, HEADS, DIM)
        stats.update(torch.ones(1, HEADS, 4, DIM))
        x = torch.randn(1, HEADS, 24, DIM, generator=torch.Generator().manual_seed(0))
        payload = encode(x, codec, stats=stats if codec.needs_queries else None)
        assert {part_of(name) for name in payload.tensors} <= names | {
            "scales",
            "coefficients",
            "outliers",
        }


# --- no host sync ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_nothing_waits_for_the_device(method):
    """Neither the calls of a pass nor the books that are kept about them."""
    cache = cache_for(small(method, span_chunks=2, window_frames=9, sink_frames=2))
    for chunk in chunks_of([24] * 6):
        with NoHostSync():
            step(cache, chunk)
            cache.ledger()
            cache.status()
    assert cache[0].spans() == [(0, 16), (144 - 56, 144)]
    probe = torch.tensor([1.0])
    with pytest.raises(AssertionError, match="syncs"), NoHostSync():
        float(probe)
