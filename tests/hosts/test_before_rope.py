"""Keys stored before their rotary embedding, by what the host's own function does."""

from __future__ import annotations

import sys

import pytest
import torch

import steadykv as skv
from steadykv.errors import ConfigError, HostError
from tests.hosts import self_forcing as fixture
from tests.hosts.checks import assert_packed_once, assert_same_state, small_config, state_of
from tests.hosts.self_forcing import FRAME, CausalInferencePipeline, noise_of, text_of

MODULE = sys.modules[CausalInferencePipeline.__module__]
CHUNKS = [3] * 10


def video(config, **options):
    host = CausalInferencePipeline(9, 3)
    with skv.attach(host, config=config, **options) as caches:
        return host.inference(noise_of(30), CHUNKS, text_of()), caches


def test_the_same_video_but_for_rounding():
    """Nothing else changes: with four bits both are as close to BF16."""
    wanted, _ = video(skv.preset("bf16"))
    config = small_config("rtn", bits=4)
    errors = {}
    for place in ("after_rope", "before_rope"):
        got, caches = video(config, store_keys=place)
        assert_packed_once(caches["main"])
        errors[place] = float((got - wanted).float().norm() / wanted.float().norm())
    assert 0 < errors["before_rope"] < 1.5 * errors["after_rope"] < 0.05


def test_stored_keys_are_those_before():
    """A host whose keys are constant along time before the embedding: one centroid is enough."""
    host = CausalInferencePipeline(9, 3)
    for block in host.generator.model.blocks:
        block.self_attn.k.weight.data.zero_()
    stored = {}
    for place in ("after_rope", "before_rope"):
        with skv.attach(host, config=small_config("qvg"), store_keys=place) as caches:
            host.inference(noise_of(9), [3] * 3, text_of())
            layer = caches["main"][0]
            stored[place] = layer.read_tensor("key", [(0, 6 * FRAME)]).float()
    assert stored["before_rope"].std(1).max() < 1e-3
    assert stored["after_rope"].std(1).max() > 0.05


def test_queries_are_those_before_too():
    host = CausalInferencePipeline(9, 3)
    for block in host.generator.model.blocks:
        block.self_attn.q.weight.data.zero_()
    config, moments = small_config("quantwm"), {}
    bias = host.generator.model.blocks[0].self_attn.q.bias.view(fixture.HEADS, -1).float()
    for place in ("after_rope", "before_rope"):
        with skv.attach(host, config=config, store_keys=place) as caches:
            host.inference(noise_of(9), [3] * 3, text_of())
            moments[place] = caches["main"][0].stats.for_encoding(9).moment[0]
    wanted = bias[:, :, None] * bias[:, None, :]
    assert torch.allclose(moments["before_rope"], wanted, rtol=0.02, atol=1e-3)
    assert not torch.allclose(moments["after_rope"], wanted, rtol=0.02, atol=1e-3)


def test_dense_keys_are_left_as_they_are():
    wanted = CausalInferencePipeline(9, 3).inference(noise_of(30), CHUNKS, text_of())
    got, _ = video(skv.preset("bf16"), store_keys="before_rope")
    assert torch.equal(got, wanted)


def test_nothing_is_left_behind():
    host = CausalInferencePipeline(9, 3)
    before = state_of(host, MODULE)
    with skv.attach(host, config=small_config("qvg"), store_keys="before_rope"):
        host.inference(noise_of(6), [3] * 2, text_of())
    after = state_of(host, MODULE)
    after["0..crossattn_cache"] = before["0..crossattn_cache"]
    assert_same_state(before, after)


def test_pairs_of_the_two_halves_are_found(monkeypatch):
    original = fixture.causal_rope_apply

    def halves(x, *args, **kwargs):
        """Pairs channel d with d + D/2, as other models do."""
        paired = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        turned = original(paired, *args, **kwargs)
        return turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2).contiguous()

    monkeypatch.setattr(fixture, "causal_rope_apply", halves)
    wanted, _ = video(skv.preset("bf16"))
    got, _ = video(small_config("rtn", bits=4), store_keys="before_rope")
    assert float((got - wanted).float().norm() / wanted.float().norm()) < 0.05


def test_another_embedding_is_refused(monkeypatch):
    original = fixture.causal_rope_apply

    def mirrored(x, *args, **kwargs):
        return original(x.flip(-1), *args, **kwargs)

    monkeypatch.setattr(fixture, "causal_rope_apply", mirrored)
    with pytest.raises(HostError, match="rotary embedding is off by"):
        video(small_config("qvg"), store_keys="before_rope")


@pytest.mark.parametrize("edit", [torch.Tensor.clone, lambda x: 2 * x])
def test_copies_of_the_keys_are_turned_back_and_other_keys_refused(monkeypatch, edit):
    original = fixture.SelfAttention.forward

    def forward(self, x, kv_cache, current_start):
        class Copying(dict):
            def __getitem__(self, name):
                found = kv_cache[name]
                return Copies(found) if name == "k" else found

        class Copies:
            def __init__(self, inner):
                self.inner, self.shape = inner, inner.shape

            def __getitem__(self, key):
                return self.inner[key]

            def __setitem__(self, key, value):
                self.inner[key] = edit(value)

        return original(self, x, Copying(), current_start)

    config = small_config("rtn", bits=4)
    wanted, _ = video(skv.preset("bf16"))
    monkeypatch.setattr(fixture.SelfAttention, "forward", forward)
    if edit is torch.Tensor.clone:
        got, _ = video(config, store_keys="before_rope")
        assert float((got - wanted).float().norm() / wanted.float().norm()) < 0.05
        return
    with pytest.raises(HostError, match=r"not what the host's rotary embedding returned"):
        video(config, store_keys="before_rope")


def test_the_option_is_checked():
    host = CausalInferencePipeline(9, 3)
    with (
        pytest.raises(ConfigError, match=r"store_keys is 'pre': expected 'after_rope' or"),
        skv.attach(host, store_keys="pre"),
    ):
        pass
