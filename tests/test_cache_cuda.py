"""The cache on a GPU: the same tokens, no host sync, and the allocator agrees with the ledger."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from steadykv.cache import KVCache
from steadykv.config import preset
from tests.cache_cases import FRAME, cache_for, chunks_of, drive, small
from tests.codecs import CACHE_METHODS, CODEC_METHODS
from tests.plain_cache import PlainCache

pytestmark = pytest.mark.cuda


def on_gpu(chunks):
    return [
        type(chunk)(chunk.start, tuple(tuple(x.cuda() for x in p) for p in chunk.passes))
        for chunk in chunks
    ]


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def requested_bytes(when: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


def test_bf16_is_a_plain_sliding_window():
    chunks = on_gpu(chunks_of([24, 13, 24, 24, 8, 24], batch=2))
    cache = cache_for(small(window_frames=7, sink_frames=2), device="cuda")
    expected = drive(PlainCache(1, 7 * FRAME, sink=2 * FRAME), chunks)
    for read, plain in zip(drive(cache, chunks), expected, strict=True):
        assert all(map(torch.equal, read, plain))


@pytest.mark.parametrize("method", CACHE_METHODS)
def test_passes_do_not_sync(method):
    """Write, observe and read; committing a span is left out, as its eigenvectors may sync."""
    cache = cache_for(small(method, span_chunks=2, window_frames=9, sink_frames=2), device="cuda")
    for chunk in on_gpu(chunks_of([24] * 6)):
        for k, v, q in chunk.passes:
            with syncs_are_errors():
                cache[0].write(k, v, chunk.start)
                cache[0].observe_queries(q)
                cache[0].read()
        cache.commit()
    assert int(cache.nonfinite_count) == 0


@pytest.mark.parametrize("method", CACHE_METHODS)
def test_a_batch_equals_its_rows(method):
    chunks = chunks_of([24, 24, 15, 24], batch=3, query_heads=8)
    together = drive(cache_for(small(method), device="cuda"), on_gpu(chunks))
    for row in range(3):
        alone = drive(
            cache_for(small(method), device="cuda"), on_gpu([chunk.row(row) for chunk in chunks])
        )
        for both, single in zip(together, alone, strict=True):
            for x, y in zip(both, single, strict=True):
                assert torch.equal(x[row, None], y)


@pytest.mark.parametrize("method", CODEC_METHODS)
def test_the_allocator_agrees_with_the_ledger(method):
    """What the cache asked for, resident within 1 %, and peak within the stated bound.

    What the allocator hands out for it is more: blocks are multiples of 512 bytes, and a large one
    keeps up to 1 MiB that its request left over.
    """
    config = preset(method).with_span(2, 32).replace(window_frames=24)
    generator = torch.Generator("cuda").manual_seed(0)

    def tensors() -> list[torch.Tensor]:
        return [
            torch.randn(2, 1560, 12, 128, generator=generator, device="cuda").bfloat16()
            for _ in "kvq"
        ]

    def roll(cache: KVCache, chunks: int) -> None:
        k, v, q = tensors()
        for chunk in range(chunks):
            for layer in cache:
                layer.write(k, v, 1560 * chunk)
                layer.observe_queries(q)
                layer.read()
            cache.commit()

    roll(KVCache(2, 12, 128, 520, config, device="cuda"), 4)  # workspaces of the libraries
    gc.collect()
    torch.cuda.synchronize()
    before = requested_bytes("current")
    cache = KVCache(2, 12, 128, 520, config, device="cuda")
    inputs = 3 * 2 * 1560 * 12 * 128 * 2
    torch.cuda.reset_peak_memory_stats()
    roll(cache, 12)
    torch.cuda.synchronize()
    held = requested_bytes("current") - before
    assert held == pytest.approx(cache.nbytes, rel=0.01)
    peak = requested_bytes("peak") - before - inputs
    assert peak <= 1.02 * cache.ledger().peak_bytes
