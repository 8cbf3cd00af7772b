"""Query heads may outnumber key/value heads: statistics are pooled per key/value head."""

from __future__ import annotations

import pytest
import torch

import steadykv as skv
from tests.hosts import self_forcing as fixture
from tests.hosts import sglang
from tests.hosts.checks import assert_packed_once, small_config
from tests.hosts.self_forcing import DIM, FRAME, HEADS, CausalInferencePipeline, noise_of, text_of

GROUP = 3  # query heads of one key/value head
CHUNKS = [3] * 6


def grouped(q, k, v):
    """The fixture's attention; a key/value head serves GROUP neighbouring query heads."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    return plain_attention(q, k, v)


def forward(self, x, kv_cache, current_start):
    """The fixture's forward, with GROUP query heads for each key/value head."""
    q, k, v = (f(x).unflatten(-1, (HEADS, DIM)) for f in (self.q, self.k, self.v))
    q = torch.stack([q, q.flip(-1), 0.5 * q.roll(5, -1)], 3).flatten(2, 3)
    grid, frame = self.grid_sizes(x), current_start // self.frame
    q, k = (fixture.causal_rope_apply(y, grid, self.freqs, start_frame=frame) for y in (q, k))
    stop = fixture.stored(kv_cache, k, v, current_start, self.sink_size * self.frame)
    first = max(0, stop - self.max_attention_size)
    out = fixture.attention(q, kv_cache["k"][:, first:stop], kv_cache["v"][:, first:stop])
    return self.o(out.unflatten(2, (HEADS, GROUP)).mean(3).flatten(2))


plain_attention = fixture.attention


@pytest.fixture(autouse=True)
def _grouped_host(monkeypatch):
    monkeypatch.setattr(fixture, "attention", grouped)
    monkeypatch.setattr(fixture.SelfAttention, "forward", forward)


def video(host):
    return host.inference(noise_of(18), CHUNKS, text_of())


def moments_of(queries):
    """FP32 [H, D, D] of queries [1, S, GROUP · H, D], each head's with those of its group."""
    rows = torch.cat(queries, 1).float()[0].unflatten(1, (HEADS, GROUP)).transpose(0, 1)
    rows = rows.flatten(1, 2)
    return rows.mT @ rows / rows.shape[1]


def test_bf16_is_bit_identical():
    wanted = video(CausalInferencePipeline(9, 3))
    with skv.attach(host := CausalInferencePipeline(9, 3), preset="bf16"):
        assert torch.equal(video(host), wanted)


@pytest.mark.parametrize("attention", ["dense", "packed"])
def test_statistics_are_pooled(attention, monkeypatch):
    """Of the passes of the five chunks that are packed, from every head of a group alike."""
    seen = [[] for _ in range(fixture.LAYERS)]
    original = skv.LayerCache.observe_queries

    def observe(layer, q):
        seen[layer.layer].append(q)
        return original(layer, q)

    monkeypatch.setattr(skv.LayerCache, "observe_queries", observe)
    host = CausalInferencePipeline(9, 3)
    with skv.attach(host, config=small_config("quantwm"), attention=attention) as caches:
        video(host)
        assert_packed_once(caches["main"])
    for layer, queries in zip(caches["main"], seen, strict=True):
        assert len(queries) == len(CHUNKS) * 3
        assert {q.shape[2] for q in queries} == {GROUP * HEADS}
        moment = layer.stats.for_encoding(99)
        passes = queries[: (len(CHUNKS) - 1) * 3]
        assert moment.count.tolist() == [[len(passes) * 3 * FRAME * GROUP] * HEADS]
        wanted = moments_of(passes)
        error = (moment.moment[0] - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        assert float(error.max()) < 1e-3
        # A head has its own group's alone.
        other = (moment.moment[0] - wanted.flip(0)).norm() / wanted.norm()
        assert float(other) > 0.1


@pytest.mark.parametrize("method", ["bf16", "qvg", "quantwm"])
def test_attention_from_the_packed_cache(method, monkeypatch):
    errors, original = [], skv.LayerCache.attend

    def attend(layer, q):
        got, (k, v) = original(layer, q), layer.read()
        wanted = grouped(*(x.float() for x in (q, k, v)))
        errors.append(float((got - wanted).norm() / wanted.norm()))
        return got

    monkeypatch.setattr(skv.LayerCache, "attend", attend)
    host = CausalInferencePipeline(9, 3)
    with skv.attach(host, config=small_config(method), attention="packed"):
        video(host)
    assert len(errors) == len(CHUNKS) * 3 * fixture.LAYERS
    assert max(errors) < 0.004  # of rounding to BF16


def test_an_object_that_is_shown_more_query_heads(monkeypatch):
    """SGLang's form: its kernel gets the group's queries, the cache keeps fewer heads."""
    seen = []

    def wide(_self, q, k, v):
        seen.append(q)
        return grouped(q, k, v)

    monkeypatch.setattr(sglang.Attention, "forward", _sglang_forward)
    monkeypatch.setattr(sglang.Kernel, "forward", wide)
    stage = sglang.CausalDMDDenoisingStage(9, 3)
    with skv.attach(stage, config=small_config("quantwm")) as caches:
        stage.forward(sglang.noise_of(9), [3] * 3)
    assert {q.shape[2] for q in seen} == {GROUP * sglang.HEADS}
    for layer in caches["main"]:
        count = layer.stats.for_encoding(99).count
        assert count.tolist() == [[2 * 3 * 3 * sglang.FRAME * GROUP] * sglang.HEADS]


def _sglang_forward(self, x, cache, start, recent):
    q, k, v = self.to_qkv(x).unflatten(-1, (3, sglang.HEADS, sglang.DIM)).unbind(2)
    view = cache.update_and_get_attention_kv(
        key=k, value=v, current_chunk_start=start, cache_head_start=0, recent_window_tokens=recent,
        debug_name="fixture",
    )  # fmt: skip
    wide = torch.stack([q, q.flip(-1), 0.5 * q], 3).flatten(2, 3)
    return self.attn(wide, view.k, view.v).unflatten(2, (sglang.HEADS, GROUP)).mean(3).flatten(2)
