"""Attention from the packed cache, in a host that calls attention(q, k, v)."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

import steadykv as skv
from steadykv.errors import ConfigError
from tests.hosts import self_forcing as fixture
from tests.hosts.checks import notes_of, peak_bytes, small_config
from tests.hosts.self_forcing import (
    DIM,
    FRAME,
    HEADS,
    CausalInferencePipeline,
    noise_of,
    text_of,
)

MODULE = sys.modules[CausalInferencePipeline.__module__]
CHUNKS = [3] * 8


def video(method, shape=(9, 3), **options):
    host = CausalInferencePipeline(*shape)
    with skv.attach(host, config=small_config(method), **options) as caches:
        return host.inference(noise_of(24), CHUNKS, text_of()), caches


@pytest.mark.parametrize("shape", [(9, 3), (6, 0), (-1, 0)])
@pytest.mark.parametrize("method", ["bf16", "qvg", "quantwm"])
def test_every_attention_is_that_to_the_decoded_window(method, shape, monkeypatch):
    """Whole videos drift apart: a rounding of BF16 changes codes of the next chunk."""
    errors, original = [], skv.LayerCache.attend

    def attend(layer, q):
        got, (k, v) = original(layer, q), layer.read()
        wanted = fixture.attention(*(x.float() for x in (q, k, v)))
        errors.append(float((got - wanted).norm() / wanted.norm()))
        return got

    monkeypatch.setattr(skv.LayerCache, "attend", attend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*more memory than in BF16")
        _, caches = video(method, shape, attention="packed")
    assert len(errors) == len(CHUNKS) * 3 * fixture.LAYERS
    assert max(errors) < 0.004  # of rounding to BF16
    assert not notes_of(caches)


def test_queries_are_observed():
    _, dense = video("quantwm")
    _, packed = video("quantwm", attention="packed")
    for a, b in zip(dense["main"], packed["main"], strict=True):
        moments = [layer.stats.for_encoding(99) for layer in (a, b)]
        assert torch.equal(moments[0].count, moments[1].count)
        assert float((moments[0].moment - moments[1].moment).norm()) < 0.1 * float(
            moments[0].moment.norm()
        )


def test_no_window_is_decoded(monkeypatch):
    window = 21 * FRAME * HEADS * DIM * 2

    def used(**options):
        return peak_bytes(lambda: video("rtn", (-1, 0), **options))

    monkeypatch.setattr("steadykv.ops.attention.BUDGETS", {"default": 1 << 14, "small": 1 << 14})
    calls = []
    original = skv.LayerCache.read_tensor
    monkeypatch.setattr(
        skv.LayerCache, "read_tensor", lambda *args: calls.append(args) or original(*args)
    )
    dense = used()
    assert calls
    calls.clear()
    assert used(attention="packed") < dense + window
    assert not calls


def test_more_arguments_are_served_decoded_with_one_warning(monkeypatch):
    original = fixture.attention

    def attention(q, k, v, causal=False):
        return original(q, k, v)

    def forward(self, x, kv_cache, current_start):
        watched = MODULE.attention
        MODULE.attention = lambda q, k, v: watched(q, k, v, causal=False)
        try:
            return unchanged(self, x, kv_cache, current_start)
        finally:
            MODULE.attention = watched

    unchanged = fixture.SelfAttention.forward
    monkeypatch.setattr(fixture, "attention", attention)
    monkeypatch.setattr(fixture.SelfAttention, "forward", forward)
    wanted, _ = video("qvg")
    with pytest.warns(UserWarning, match="more than queries, keys and values"):
        got, caches = video("qvg", attention="packed")
    assert torch.equal(got, wanted)
    assert len(caches.notes) == 1


def test_options_that_exclude_each_other():
    with pytest.raises(ConfigError, match="expected one of them"):
        video("qvg", attention="packed", store_keys="before_rope")
    with pytest.raises(ConfigError, match="attention is 'flash': expected 'dense' or 'packed'"):
        video("qvg", attention="flash")
