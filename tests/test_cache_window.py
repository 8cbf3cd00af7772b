"""Spans against the window: which policies are refused, when, and which ones lose nothing."""

from __future__ import annotations

import pytest
import torch

from steadykv.cache import KVCache, LayerCache
from steadykv.config import CacheConfig, preset
from steadykv.errors import ConfigError
from tests.cache_cases import NoHostSync, cache_for, chunks_of, drive, small


def rolled(config: CacheConfig, lengths: list[int]) -> LayerCache:
    cache = cache_for(config)
    drive(cache, chunks_of(lengths))
    return cache[0]


@pytest.mark.parametrize(
    ("policy", "longest", "widened"),
    [
        ({"span_chunks": 7, "window_frames": 15}, 5, 21),
        ({"span_chunks": 10, "window_frames": 6}, 2, 30),
        ({"span_chunks": 9, "window_frames": 24}, 8, 27),
        ({"span_chunks": 2, "window_frames": 3}, 1, 6),
        ({"span_chunks": 3, "window_frames": 9, "sink_frames": 3}, 2, 12),
    ],
    ids=str,
)
def test_a_span_longer_than_the_window_is_refused(policy, longest, widened):
    """By the second chunk behind the sink, before a token is lost; what it advises works."""
    chunks = chunks_of([24] * 12, passes=1)
    layer = cache_for(small("bf16:qvg", **policy))[0]
    accepted = max(1, policy.get("sink_frames", 0) // 3)
    for chunk in chunks[:accepted]:
        layer.write(*chunk.passes[0][:2], chunk.start)
    before, (k, v, _) = layer.status(), chunks[accepted].passes[0]
    with NoHostSync(), pytest.raises(ConfigError, match=rf"at most {longest} .*={widened}$") as got:
        layer.write(k, v, chunks[accepted].start)
    assert "\n" not in str(got.value)
    assert layer.status() == before
    for change in ({"span_chunks": longest}, {"window_frames": widened}):
        layer = cache_for(small("bf16:qvg", **(policy | change)))[0]
        for chunk in chunks:
            layer.write(*chunk.passes[0][:2], chunk.start)
        layer.commit()
        assert layer.dropped_dense_tokens == 0
        assert layer.encoded_tokens > 0
    drive(cache_for(small("bf16", **policy)), chunks)


@pytest.mark.parametrize("span_chunks", range(1, 9))
def test_spans_up_to_the_window_pack_every_token(span_chunks):
    """The embedded model's window of 8 chunks of 3 frames."""
    layer = rolled(small("kivi", span_chunks=span_chunks, window_frames=24), [24] * 20)
    assert layer.encoded_tokens == 24 * (20 - 20 % span_chunks)
    assert layer.dropped_dense_tokens == 0


@pytest.mark.parametrize("lengths", [[48, 8, 8, 8, 8, 8], [8, 48, 8, 8, 8, 8]])
def test_one_long_chunk_does_not_condemn_a_policy(lengths):
    """A prompt of its own length: not certain, so tokens that it loses would only be counted."""
    layer = rolled(small("kivi", span_chunks=2, window_frames=6), lengths)
    assert layer.encoded_tokens + layer.dropped_dense_tokens == sum(lengths)
    assert layer.ledger().packed_tokens


def test_a_short_first_chunk_hides_nothing():
    layer = cache_for(small("kivi", span_chunks=3, window_frames=6))[0]
    chunks = chunks_of([8, 24, 24], passes=1)
    for chunk in chunks[:2]:
        layer.write(*chunk.passes[0][:2], chunk.start)
    with pytest.raises(ConfigError, match="span_chunks is 3 with chunks of 24 tokens"):
        layer.write(*chunks[2].passes[0][:2], chunks[2].start)


def test_a_shorter_rewrite_of_a_chunk_longer_than_the_window_reads_all_it_holds() -> None:
    cache = KVCache(1, 1, 8, 4, preset("bf16", window_frames=3), layout="BSHD")
    k = torch.randn(1, 18, 1, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer = cache[0]
    for length in (18, 10, 2):
        layer.write(k[:, :length], k[:, :length], 0)
        got, _ = layer.read()
        assert torch.equal(got, k[:, max(0, length - 12) : length])
    cache.commit()
    layer.write(k[:, 2:5], k[:, 2:5], 2)
    assert torch.equal(layer.read()[0], k[:, :5])
