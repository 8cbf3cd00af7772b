"""`LayerCache.attend`: what attention to `read()` gives, without the dense window."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from steadykv import ops
from steadykv.cache import KVCache
from steadykv.config import CacheConfig, CachePolicy, parse_method
from steadykv.errors import ConfigError, NonFiniteError, PositionError, ShapeError
from tests.cache_cases import (
    Allocations,
    NoHostSync,
    cache_for,
    chunks_of,
    in_layout,
    small,
    small_codec,
)
from tests.codecs import CACHE_METHODS, DEVICES

POLICY = {"span_chunks": 2, "window_frames": 16, "sink_frames": 2, "recent_keep": 1}
LENGTHS = [24, 24, 13, 24, 24, 24, 8, 24]


def filled(
    config, layout="BSHD", batch=1, query_heads=2, dtype=torch.float32, device="cpu", **options
) -> tuple[KVCache, Tensor]:
    """A cache with sink, packed spans, recent and open tokens; queries of the last pass."""
    cache = cache_for(config, layout=layout, dtype=dtype, device=device, **options)
    chunks = chunks_of(LENGTHS, 1, batch, query_heads, dtype=dtype)
    for chunk in chunks:
        k, v, q = (in_layout(x, layout).to(device) for x in chunk.passes[0])
        cache[0].write(k, v, chunk.start)
        cache[0].observe_queries(q)
    return cache, q


def expected(cache: KVCache, q: Tensor, layout: str, bias: Tensor | None = None, scale=None):
    """FP64 attention to `read()`, in the layout of q."""
    q, k, v = (x if layout == "BHSD" else x.transpose(1, 2) for x in (q, *cache[0].read()))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).double() for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * q.double() @ k.transpose(2, 3)
    if bias is not None:
        logits += (
            bias.double()
            .expand(k.shape[0], k.shape[1] // group, -1)
            .repeat_interleave(group, 1)[:, :, None]
        )
    out = logits.softmax(-1) @ v
    return out if layout == "BHSD" else out.transpose(1, 2)


def error(got: Tensor, want: Tensor, cache: KVCache) -> float:
    """Largest error over the largest value."""
    return float((got.double() - want).abs().max() / cache[0].read()[1].abs().max())


@pytest.mark.parametrize("method", CACHE_METHODS)
@pytest.mark.parametrize(("layout", "batch", "query_heads"), [("BSHD", 2, 2), ("BHSD", 1, 6)])
def test_attend_is_attention_to_read(method, layout, batch, query_heads, poisoned_memory):
    cache, q = filled(small(method, **POLICY), layout, batch, query_heads)
    got = cache[0].attend(q)
    assert got.shape == q.shape
    assert got.dtype == q.dtype
    assert got.is_contiguous()
    assert error(got, expected(cache, q, layout), cache) < 4e-6


def test_the_case_holds_every_kind_of_segment():
    cache, _ = filled(small("quantwm:qvg4", **POLICY))
    segments = cache[0].keys.segments
    assert {s.role for s in segments if s.payload is None} == {"waiting", "open"}
    assert any(s.payload is not None for s in segments)
    assert len(cache[0].spans()) == 2


@pytest.mark.parametrize("method", ["bf16", "qvg:bf16", "quantwm:qvg4"])
def test_bf16_queries_and_tokens(method):
    cache, q = filled(small(method, **POLICY), dtype=torch.bfloat16, query_heads=4)
    got = cache[0].attend(q)
    assert got.dtype == torch.bfloat16
    # FP32 until the last cast.
    want = expected(cache, q, "BSHD")
    assert float((got.double() - want).abs().max()) <= 2**-8 * float(want.abs().max())


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_attend_to_refined_and_faded_spans(device, poisoned_memory):
    """Keys of four levels and values as trits, both with FP8 centroids."""
    pytest.importorskip("triton")
    options = {"group_size": 32, "centroid_format": "fp8", "refinement": 2}
    config = CacheConfig(
        small_codec("qvg4", **options),
        small_codec("qvg", metadata="int8", packing="trits", **options),
        CachePolicy(**POLICY, refined_spans=1),
    )
    cache, q = filled(config, batch=2, query_heads=4, dtype=torch.bfloat16, device=device)
    for store in (cache[0].keys, cache[0].values):
        packed = [s.payload for s in store.segments if s.payload is not None]
        assert ["refinement" in p.tensors for p in packed] == [False] * (len(packed) - 1) + [True]
        assert len(packed) > 1
    want = expected(cache, q, "BSHD")
    with ops.use_backend("triton"):
        got = cache[0].attend(q)
    assert error(got, want, cache) < 4 * 2**-8
    packed[-1].tensors["refinement"].zero_()  # it is looked at
    assert error(got, expected(cache, q, "BSHD"), cache) > 4 * 2**-8


def test_queries_may_be_finer_than_the_cache():
    cache, q = filled(small("qvg", **POLICY), dtype=torch.bfloat16)
    got = cache[0].attend(q.float())
    assert got.dtype == torch.float32
    assert error(got, expected(cache, q.float(), "BSHD"), cache) < 4e-6


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_scale_and_bias(layout):
    """A bias a head, one for all heads, and removed keys."""
    cache, q = filled(small("qvg", **POLICY), layout, batch=2, query_heads=4)
    tokens = sum(end - start for start, end in cache[0].spans())
    generator = torch.Generator().manual_seed(0)
    for shape in ((tokens,), (2, 2, tokens)):
        bias = 3 * torch.randn(shape, generator=generator)
        bias[..., 5:50] = -torch.inf
        got = cache[0].attend(q, bias=bias, scale=0.5)
        assert error(got, expected(cache, q, layout, bias, 0.5), cache) < 4e-6
        assert error(got, expected(cache, q, layout, None, 0.5), cache) > 1e-3


def test_a_batch_equals_its_rows():
    chunks = chunks_of(LENGTHS, 1, batch=3, query_heads=4)
    together = attended(small("quantwm:qvg4", **POLICY), chunks)
    for row in range(3):
        alone = attended(small("quantwm:qvg4", **POLICY), [chunk.row(row) for chunk in chunks])
        assert torch.equal(together[row, None], alone)


def attended(config, chunks) -> Tensor:
    cache = cache_for(config)
    for chunk in chunks:
        k, v, q = chunk.passes[0]
        cache[0].write(k, v, chunk.start)
        cache[0].observe_queries(q)
    return cache[0].attend(q)


def test_attend_changes_nothing():
    cache, q = filled(small("quantwm:qvg4", **POLICY))
    before, again = cache[0].read(), cache[0].attend(q)
    assert torch.equal(cache[0].attend(q), again)
    assert all(map(torch.equal, cache[0].read(), before))


def test_wrong_calls_get_one_line():
    cache = cache_for(small("qvg"))
    q = torch.randn(1, 8, 2, 32, generator=torch.Generator().manual_seed(0))
    with pytest.raises(PositionError, match="attend before the first write"):
        cache[0].attend(q)
    cache, q = filled(small("qvg", **POLICY))
    with pytest.raises(ShapeError, match="q is"):
        cache[0].attend(q[:, :, :1])
    with pytest.raises(ShapeError, match=r"bias is \(3,\): expected"):
        cache[0].attend(q, bias=torch.zeros(3))
    with pytest.raises(ShapeError, match=r"bias is float: expected"):
        cache[0].attend(q, bias=1.0)
    tokens = sum(end - start for start, end in cache[0].spans())
    with pytest.raises(ShapeError, match="expected floats"):
        cache[0].attend(q, bias=torch.zeros(tokens, dtype=torch.int64))
    with pytest.raises(ConfigError, match="memory is 'tiny'"):
        cache[0].attend(q, memory="tiny")
    strict, q = filled(small("qvg", **POLICY), debug=True)
    with pytest.raises(NonFiniteError):
        strict[0].attend(q.fill_(torch.nan))


@pytest.mark.parametrize("call", ["attend", "read"])
def test_it_compiles_without_a_break(call):
    """After one call, which decides what runs; the peak is still accounted for."""
    cache, q = filled(small("quantwm:qvg4", **POLICY))

    def step(q: Tensor) -> tuple[Tensor, ...]:
        return (cache[0].attend(q),) if call == "attend" else cache[0].read()

    want = step(q)
    cache[0].meter.restart_peak()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert all(map(torch.equal, compiled(q), want))
    assert cache[0].meter.peak > cache[0].meter.resident


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["bf16", "quantwm:qvg4", "kivi"])
def test_the_ledgers_peak_bounds_what_attend_allocates(method):
    """From both sides, where tokens and queries outweigh constants; and far below a read."""
    config = parse_method(method).with_span(1, 16).replace(window_frames=12)
    cache = KVCache(1, 2, 64, 256, config)
    generator = torch.Generator().manual_seed(0)
    for number in range(5):
        k, v = (torch.randn(1, 768, 2, 64, generator=generator).bfloat16() for _ in range(2))
        cache[0].write(k, v, 768 * number)
    cache[0].meter.restart_peak()
    gc.collect()
    with Allocations() as allocations, NoHostSync():
        cache[0].attend(k)
    stated = cache.ledger().peak_bytes - cache.nbytes
    assert allocations.peak <= stated <= 2.5 * allocations.peak


@pytest.mark.cuda
@pytest.mark.parametrize(("memory", "limit"), [("default", 128 << 20), ("small", 32 << 20)])
def test_transients_stay_in_their_budget(memory, limit):
    """32 heads, 4,680 queries and 34,320 keys: the result, and no more than the mode allows."""
    cache = KVCache(1, 32, 128, 1560, parse_method("qvg").replace(span_chunks=1), device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for number in range(8):
        tokens = 1560 if number == 7 else 4680
        k, v = (
            torch.randn(1, tokens, 32, 128, generator=generator, device="cuda").bfloat16()
            for _ in range(2)
        )
        cache[0].write(k, v, 4680 * number)
    q = torch.randn(1, 4680, 32, 128, generator=generator, device="cuda").bfloat16()
    cache[0].attend(q, memory=memory)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = cache[0].attend(q, memory=memory)
    peak = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert peak <= limit
    part = q[:, :64]
    want = expected(cache, part, "BSHD")
    assert error(out[:, :64], want, cache) < 4 * 2**-8


@pytest.mark.parametrize("device", DEVICES)
def test_attend_does_not_sync(device):
    cache, q = filled(small("quantwm:qvg4", **POLICY), device=device, dtype=torch.bfloat16)
    cache[0].attend(q)
    if device == "cpu":
        with NoHostSync():
            cache[0].attend(q)
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache[0].attend(q)
    finally:
        torch.cuda.set_sync_debug_mode("default")
