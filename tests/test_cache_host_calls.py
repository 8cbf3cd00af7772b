"""What host adapters call beside write, commit and read: ranges, eviction, truncation."""

from __future__ import annotations

import pytest
import torch

from steadykv.errors import ConfigError, PositionError
from tests.cache_cases import DIM, FRAME, HEADS, cache_for, small

METHODS = ["bf16", "qvg", "quantwm"]


def filled(method: str, chunks: int = 4, **policy):
    """A layer with chunks of one frame each, and the joined keys and values."""
    layer = cache_for(small(method, **policy))[0]
    generator = torch.Generator().manual_seed(5)
    keys, values = [], []
    for i in range(chunks):
        k, v = (torch.randn(2, FRAME, HEADS, DIM, generator=generator).bfloat16() for _ in range(2))
        layer.write(k, v, i * FRAME)
        layer.observe_queries(k)
        keys.append(k)
        values.append(v)
    return layer, torch.cat(keys, 1), torch.cat(values, 1)


@pytest.mark.parametrize("method", METHODS)
def test_ranges_are_parts_of_a_read(method):
    layer, _, _ = filled(method)
    k, v = layer.read()
    ranges = [(3, 5), (FRAME, 3 * FRAME + 1), (0, 0), (1, 2)]
    for name, dense in (("key", k), ("value", v)):
        wanted = torch.cat([dense[:, a:b] for a, b in ranges], 1)
        assert torch.equal(layer.read_tensor(name, ranges), wanted)
        out = dense.new_zeros(2, 40, HEADS, DIM)
        got = layer.read_tensor(name, ranges, out)
        assert torch.equal(got, wanted)
        assert got.data_ptr() == out.data_ptr()
        assert not out[:, wanted.shape[1] :].any()


def test_a_range_that_left_the_window_is_refused():
    layer, k, _ = filled("bf16", chunks=6, window_frames=3, sink_frames=1)
    assert layer.held() == [(0, FRAME), (4 * FRAME, 6 * FRAME)]
    with pytest.raises(PositionError, match=r"read of tokens 8 to 16.*0 to 8, 32 to 48.*window"):
        layer.read_tensor("key", [(FRAME, 2 * FRAME)])
    for start, end in ((-1, 2), (5, 3), (40, 49)):
        with pytest.raises(PositionError):
            layer.read_tensor("key", [(start, end)])
    assert torch.equal(layer.read_tensor("key", [(35, 48)]), k[:, 35:48])


def test_an_unknown_tensor_is_refused():
    layer, _, _ = filled("bf16")
    with pytest.raises(ConfigError, match="'keys': expected 'key' or 'value'"):
        layer.read_tensor("keys", [(0, 1)])


@pytest.mark.parametrize("method", METHODS)
def test_eviction_frees_and_keeps_the_sink(method):
    layer, _, _ = filled(method, chunks=5, sink_frames=1, window_frames=50)
    layer.commit()
    before, full = layer.nbytes, layer.read()[0]
    layer.evict(3 * FRAME)
    assert layer.spans() == [(0, FRAME), (3 * FRAME, 5 * FRAME)]
    assert layer.nbytes < before
    assert torch.equal(layer.read()[0], torch.cat([full[:, :FRAME], full[:, 3 * FRAME :]], 1))
    layer.evict(FRAME)  # moves nothing back
    assert layer.spans() == [(0, FRAME), (3 * FRAME, 5 * FRAME)]
    assert layer.encoded_tokens == (0 if method == "bf16" else 5 * FRAME)


@pytest.mark.parametrize("method", METHODS)
def test_truncated_tokens_are_written_again_and_the_others_keep_their_bytes(method):
    layer, k, v = filled(method, chunks=4)
    layer.commit()
    kept = [s for s in layer.keys.segments if s.end <= 2 * FRAME]
    layer.truncate(2 * FRAME)
    assert layer.spans() == [(0, 2 * FRAME)]
    layer.write(k[:, : 2 * FRAME], v[:, : 2 * FRAME], 2 * FRAME)
    layer.commit()
    assert layer.spans() == [(0, 4 * FRAME)]
    assert all(a is b for a, b in zip(kept, layer.keys.segments, strict=False))
    if method == "quantwm":
        assert layer.stats is not None
        assert layer.stats.has_history


def test_a_rebuild_from_zero_gives_the_same_bytes_again():
    """Spans are numbered from 0 again, so the same input has the same seed."""
    layer, k, v = filled("qvg", chunks=1)
    layer.commit()
    first = layer.read()
    layer.truncate(0)
    assert layer.held() == []
    layer.write(k, v, 0)
    layer.commit()
    assert all(torch.equal(a, b) for a, b in zip(first, layer.read(), strict=True))


def test_truncation_inside_a_span_is_refused():
    layer, _, _ = filled("qvg", chunks=4, span_chunks=2)
    layer.commit()
    for start in (FRAME, 3, 5 * FRAME):
        with pytest.raises(PositionError, match="expected 0 or the end of a chunk"):
            layer.truncate(start)
    layer.truncate(2 * FRAME)
    assert layer.held() == [(0, 2 * FRAME)]


def test_queries_seen_before_their_write_count_as_its_own():
    layer = cache_for(small("quantwm"))[0]
    own = layer.stats
    assert own is not None
    own.own_first_span = True
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 64, HEADS, DIM, generator=generator).bfloat16()
    layer.observe_queries(x)
    layer.write(x, x, 0, observed=True)
    layer.commit()
    assert layer.stats is not None
    assert "basis" in layer.keys.segments[0].payload.tensors
