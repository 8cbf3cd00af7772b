"""Writing, committing and reading: what a host sees."""

from __future__ import annotations

import pytest
import torch

from steadykv.cache import KVCache, LayerCache
from steadykv.codecs import Calibration
from steadykv.config import PRESETS, preset
from steadykv.errors import ShapeError
from tests.cache_cases import (
    DIM,
    FRAME,
    HEADS,
    cache_for,
    chunks_of,
    drive,
    small,
)
from tests.codecs import CACHE_METHODS
from tests.plain_cache import PlainCache


def kv(tokens: int, batch: int = 1, value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.full((batch, tokens, HEADS, DIM), value, dtype=torch.bfloat16)
    return k, 2 * k


# --- bf16 equals a plain cache ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "sink", "lengths"),
    [
        (None, 0, [24, 24, 24, 24]),
        (6, 0, [24] * 9),
        (7, 2, [8, 24, 24, 24, 24, 24, 24]),
        (9, 3, [13, 29, 7, 24, 31, 24, 5, 24, 24]),
        (5, 3, [32, 32, 32, 32]),  # chunks of 4 frames across a sink of 3
        (2, 0, [24, 24, 24]),  # the open chunk alone is longer than the window
        (1, 0, [24, 8, 40]),
    ],
)
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_bf16_is_a_plain_sliding_window(poisoned_memory, window, sink, lengths, layout):
    """Bit for bit, over rewrites, with memory that would show an element that was not written."""
    chunks = chunks_of(lengths, passes=3, batch=2)
    cache = cache_for(small(window_frames=window, sink_frames=sink), layout=layout)
    plain = PlainCache(1, None if window is None else window * FRAME, sink=sink * FRAME)
    expected = drive(plain, chunks)
    for (k, v), (plain_k, plain_v) in zip(drive(cache, chunks, layout), expected, strict=True):
        assert torch.equal(k, plain_k)
        assert torch.equal(v, plain_v)
    assert [i for start, end in cache[0].spans() for i in range(start, end)] == plain[0].indices()


def test_rewrites_may_change_the_length():
    """Longer, shorter, and across the window's end; what was released stays gone."""
    cache = cache_for(small(window_frames=4))[0]
    plain = PlainCache(1, 4 * FRAME)[0]
    generator = torch.Generator().manual_seed(3)
    start = 0
    for lengths in ([24, 8, 16], [8, 24, 16], [16], [40, 8, 24], [1, 2, 3]):
        for length in lengths:
            k = torch.randn(1, length, HEADS, DIM, generator=generator).bfloat16()
            for target in (cache, plain):
                target.write(k, -k, start)
            assert all(map(torch.equal, cache.read(), plain.read()))
        start += lengths[-1]  # the next write commits
    cache.commit()
    assert all(map(torch.equal, cache.read(), plain.read()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_tokens_keep_the_hosts_dtype(dtype):
    chunks = chunks_of([24, 24], dtype=dtype)
    cache = cache_for(small(), dtype=dtype)
    k, v = drive(cache, chunks)[-1]
    assert k.dtype == v.dtype == dtype
    assert torch.equal(k[:, 24:], chunks[1].passes[-1][0])
    assert torch.equal(v[:, :24], chunks[0].passes[-1][1])


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CACHE_METHODS)
def test_read_into_out_is_the_same(poisoned_memory, method):
    """Also into a longer buffer, of which the front is returned, and into strided views."""
    cache = cache_for(small(method, span_chunks=2, window_frames=8, sink_frames=1))[0]
    for chunk in chunks_of([24] * 5, batch=2):
        k, v, q = chunk.passes[-1]
        cache.write(k, v, chunk.start)
        cache.observe_queries(q)
    fresh = cache.read()
    tokens = fresh[0].shape[1]
    assert tokens == 8 * FRAME
    exact = tuple(torch.full_like(x, 7) for x in fresh)
    views = cache.read(out=exact)
    assert [x.data_ptr() for x in views] == [x.data_ptr() for x in exact]
    longer = tuple(torch.full((2, tokens + 5, HEADS, DIM), 7.0).bfloat16() for _ in range(2))
    strided = tuple(
        torch.full((2, HEADS, tokens, DIM), 7.0).bfloat16().transpose(1, 2) for _ in range(2)
    )
    for out in (exact, longer, strided):
        for view, expected in zip(cache.read(out=out), fresh, strict=True):
            assert view.shape == expected.shape
            assert torch.equal(view, expected)
    assert all(bool((x[:, tokens:] == 7).all()) for x in longer)


def test_out_that_does_not_fit_is_refused():
    cache = cache_for(small())[0]
    cache.write(*kv(24), 0)
    good = torch.empty(1, 24, HEADS, DIM, dtype=torch.bfloat16)
    for bad in (
        good[:, :23],
        good.float(),
        good.expand(2, -1, -1, -1),
        good.transpose(1, 2),
        good.to("meta"),
    ):
        with pytest.raises(ShapeError, match=r"out\[1\]"):
            cache.read(out=(good, bad))


def test_reading_before_writing_gives_nothing():
    for layout, shape in (("BSHD", (1, 0, HEADS, DIM)), ("BHSD", (1, HEADS, 0, DIM))):
        layer = cache_for(small("qvg"), layout=layout)[0]
        k, v = layer.read()
        assert k.shape == v.shape == shape
        assert k.dtype == torch.bfloat16
        assert layer.spans() == []


@pytest.mark.parametrize("method", ["bf16", "qvg"])
def test_the_hosts_tensors_are_not_the_caches(method):
    """The host edits what it wrote and what it read; neither may change what the cache says."""
    cache = cache_for(small(method))[0]
    first, second = chunks_of([24, 24])
    expected = cache_for(small(method))[0]
    for chunk in (first, second):
        k, v, _ = chunk.passes[0]
        mine = k.clone(), v.clone()
        cache.write(*mine, chunk.start)
        expected.write(k, v, chunk.start)
        for x in mine:
            x.fill_(float("nan"))
        for x in cache.read():
            x.fill_(-1)
        assert all(map(torch.equal, cache.read(), expected.read()))
    cache.commit()
    for x in cache.read():
        x.zero_()
    expected.commit()
    assert all(map(torch.equal, cache.read(), expected.read()))


def test_an_earlier_read_outlives_later_writes():
    cache = cache_for(small("qvg", window_frames=3))[0]
    cache.write(*kv(24), 0)
    before = cache.read()
    kept = [x.clone() for x in before]
    for chunk in range(1, 4):
        cache.write(*kv(24, value=chunk + 1.0), 24 * chunk)
    assert all(map(torch.equal, before, kept))


@pytest.mark.parametrize("method", CACHE_METHODS)
def test_layouts_agree(method):
    chunks = chunks_of([24, 13, 24, 30], batch=2)
    config = small(method, window_frames=9, sink_frames=2)
    bshd = drive(cache_for(config), chunks)
    bhsd = drive(cache_for(config, layout="BHSD"), chunks, "BHSD")
    for one, other in zip(bshd, bhsd, strict=True):
        assert all(map(torch.equal, one, other))


# --- the whole model ------------------------------------------------------------------------------


def test_a_cache_is_a_sequence_of_layers():
    cache = cache_for(small("qvg", window_frames=6), layers=3)
    assert len(cache) == 3
    assert [layer.layer for layer in cache] == [0, 1, 2]
    assert isinstance(cache[-1], LayerCache)
    with pytest.raises(IndexError, match="expected 0 to"):
        cache[3]
    assert "qvg" in repr(cache)
    assert "layers=3" in repr(cache)


def test_presets_run_as_they_are():
    """Sizes at which no preset falls back to dense tokens."""
    generator = torch.Generator().manual_seed(0)
    captured = torch.randn(1, 1, 1400, 64, generator=generator).bfloat16()
    for name in PRESETS:
        config, calibration = preset(name), None
        if config.needs_calibration:
            calibration = Calibration.fit({(0, s): captured for s in ("key", "value")}, config)
        cache = KVCache(1, 1, 64, 1400, config, calibration=calibration)
        for chunk in range(2):
            k, v, q = (torch.randn(1, 1400, 1, 64, generator=generator).bfloat16() for _ in "kvq")
            cache[0].write(k, v, 1400 * chunk)
            cache[0].observe_queries(q)
            cache.commit()
        packed = {"bf16": 0, "kivi_recent": 1400}.get(name, 2800)
        assert cache.ledger().packed_tokens == packed
        k_read, v_read = cache[0].read()
        assert k_read.shape == v_read.shape == (1, 2800, 1, 64)
        error = (v_read[:, 1400:] - v).float().norm() / v.float().norm()
        assert error == 0 if packed < 2800 else 0.1 < error < 0.8


def test_layers_are_independent():
    """Each layer's content depends on its own tensors and its number alone."""
    chunks = chunks_of([24, 24, 24])
    config = small("qvg", window_frames=6)
    three = cache_for(config, layers=3)
    drive(three, chunks)
    alone = LayerCache(HEADS, DIM, FRAME, config, layer=1)
    for chunk in chunks:
        for k, v, _ in chunk.passes:
            alone.write(k, v, chunk.start)
        alone.commit()
    assert all(map(torch.equal, alone.read(), three[1].read()))
    # Other layers draw other initial centroids.
    assert not torch.equal(three[0].read()[0], three[1].read()[0])
