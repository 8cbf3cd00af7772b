"""Caches whose payloads take another form: the same books, the same reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steadykv.cache import KVCache
from steadykv.codecs import SpanKey, encode
from steadykv.config import CacheConfig, CachePolicy
from tests.cache_cases import Allocations, NoHostSync, cache_for, chunks_of, small_codec

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "qvg-stages": ("qvg", {"stages": 3, "packing": "trits"}),
    "qvg-fp8-centroids": ("qvg", {"stages": 2, "centroid_format": "fp8", "metadata": "int8"}),
    "qvg4-fp8": ("qvg4", {"bits": 3, "metadata": "fp8", "centroid_format": "fp8"}),
    "quantwm-fp8": ("quantwm", {"metadata": "fp8", "centroid_format": "fp8"}),
    "quarot-splits": ("quarot", {"dim_splits": (16, 16), "bits": 3}),
    "rtn-trits": ("rtn", {"grid": "symmetric", "packing": "trits"}),
}
every_form = pytest.mark.parametrize("form", FORMS)


def config_of(form: str, **policy: Any) -> CacheConfig:
    method, fields = FORMS[form]
    keys = small_codec(method, **fields)
    values = small_codec("qvg4") if method == "quantwm" else keys
    return CacheConfig(keys, values, CachePolicy(**policy), form)


@every_form
@pytest.mark.parametrize("policy", [{"window_frames": 3}, {"span_chunks": 2, "window_frames": 9}])
def test_resident_bytes_are_the_storages_that_live(form: str, policy: dict[str, int]) -> None:
    """After every pass; with a window of one chunk the remembered centroids outlive their span."""
    with Allocations() as allocations:
        cache = cache_for(config_of(form, **policy), layers=2)
    for chunk in chunks_of([24] * 6, batch=2):
        for k, v, q in chunk.passes:
            for layer in cache:
                with allocations, NoHostSync():
                    layer.write(k, v, chunk.start)
                    layer.observe_queries(q)
                    layer.read()
            assert cache.nbytes == allocations.now == sum(cache.ledger().parts.values())
        with allocations, NoHostSync():
            cache.commit()
        assert cache.nbytes == allocations.now
        assert cache.ledger().peak_bytes >= allocations.peak
    assert cache.ledger().packed_tokens > 0


@every_form
def test_peak_is_bounded_from_both_sides(form: str) -> None:
    config = config_of(form, span_chunks=2, window_frames=8)
    fields = {k: v for k, v in FORMS[form][1].items() if k != "dim_splits"}
    if "dim_splits" in FORMS[form][1]:
        fields["dim_splits"] = (32, 32)
    config = CacheConfig(small_codec(FORMS[form][0], **fields), config.values, config.policy, form)
    if form != "quantwm-fp8":
        config = config.replace(values=config.keys)
    with Allocations() as allocations:
        cache = KVCache(2, 2, 64, 96, config)
        generator = torch.Generator().manual_seed(0)
    for chunk in range(6):
        k, v, q = (torch.randn(1, 192, 2, 64, generator=generator).bfloat16() for _ in "kvq")
        with allocations:
            for layer in cache:
                layer.write(k, v, 192 * chunk)
                layer.observe_queries(q)
                layer.read()
            cache.commit()
        assert allocations.peak <= cache.ledger().peak_bytes <= 1.6 * allocations.peak


@every_form
def test_spans_start_warm_and_read_back(form: str) -> None:
    """What a cache holds is what `encode` makes of the same tokens, one span after the other."""
    config = config_of(form)
    layer = cache_for(config)[0]
    chunks = chunks_of([24] * 3, passes=1)
    for chunk in chunks:
        k, v, _ = chunk.passes[0]
        layer.write(k, v, chunk.start)
    layer.commit()
    warm = None
    for span, (segment, chunk) in enumerate(zip(layer.keys.segments, chunks, strict=True)):
        k = chunk.passes[0][0].transpose(1, 2)
        expected = encode(k, config.keys, warm=warm, span_key=SpanKey(0, "key", span))
        assert segment.payload == expected
        read = layer.read()[0][:, 24 * span : 24 * span + 24].transpose(1, 2)
        assert torch.equal(read, expected.decode())
        if warm is not None and "ids" in expected.tensors:
            assert expected != encode(k, config.keys, span_key=SpanKey(0, "key", span))
        warm = expected
