"""HY-WorldPlay's RoPE half stored before RoPE, by a function that the user passes."""

from __future__ import annotations

import sys

import pytest
import torch

import steadykv as skv
from steadykv.errors import ConfigError, HostError
from tests.hosts.checks import assert_same_state, small_config, state_of
from tests.hosts.hy_worldplay import (
    DIM,
    FRAME,
    HEADS,
    Transformer,
    WorldPlayPipeline,
    cameras_of,
    noise_of,
    rope,
    texts_of,
)

MODULE = sys.modules[Transformer.__module__]
KINDS = [(False, 1), (True, 1), (True, 2)]  # WAN 5B; 8B without guidance and with it


def run(pipeline, frames):
    branches = len(pipeline._kv_caches)
    return pipeline(noise_of(frames), texts_of(branches), cameras_of(frames))


def frames_as_tokens(x, start):
    """What a user passes; the function of the fixture counts frames, and from whole ones on."""
    return rope(torch.cat([x.new_zeros(1, 1, start, DIM), x], 2), 0)[:, :, start:]


@pytest.mark.parametrize(("on_batch_axis", "branches"), KINDS)
def test_keys_before_rope_by_a_function_of_the_users(on_batch_axis, branches):
    wanted = run(WorldPlayPipeline(on_batch_axis, branches), 22).float()
    errors, exact = {}, small_config("rtn", sink_keep=60)
    for name, config, place in (
        ("bf16", skv.preset("bf16"), "before_rope"),
        ("dense", exact, "before_rope"),
        ("after", small_config("rtn", bits=4), "after_rope"),
        ("before", small_config("rtn", bits=4), "before_rope"),
    ):
        host = WorldPlayPipeline(on_batch_axis, branches)
        before = state_of(host.transformer, MODULE)
        options = {"frame_tokens": FRAME, "store_keys": place, "rotation": frames_as_tokens}
        with skv.attach(host, config=config, **options) as caches:
            got = run(host, 22).float()
            if name == "before":
                for number, layer in enumerate(caches["main"]):
                    # As above: four frames that keep their place keep their bytes too.
                    kept = 4 if number == 0 else 0
                    assert layer.encoded_tokens == (4 + 4 * 8 - kept) * FRAME
                tokens = caches["main"][0].held()[-1][1]
                # Of the cached tokens, and, where no queries are shown, of nothing else.
                assert caches.ledger().parts["turns"] == 4 * DIM * tokens * branches
                assert caches.ledger().resident_bytes == caches.nbytes
        assert_same_state(before, state_of(host.transformer, MODULE))
        errors[name] = float((got - wanted).norm() / wanted.norm())
    assert errors["bf16"] == 0 < errors["dense"] < 0.02
    assert 0 < errors["before"] < 1.5 * errors["after"]


def test_the_rope_half_alone_is_stored_unrotated():
    host = WorldPlayPipeline()
    for block in host.transformer.blocks:  # one key for all tokens
        block.attn.qkv.weight.data[HEADS * DIM : 2 * HEADS * DIM].zero_()
    spread = {}
    for place in ("after_rope", "before_rope"):
        options = {"frame_tokens": FRAME, "store_keys": place, "rotation": frames_as_tokens}
        with skv.attach(host, config=small_config("rtn", sink_keep=60), **options) as caches:
            run(host, 12)
        layer = caches["main"][0]
        keys = layer.read_tensor("key", layer.spans()).float()
        spread[place] = [float(x.std(2).max()) for x in keys.chunk(2, 3)]
    (after, other), (before, same) = spread.values()
    assert before < 0.01 < after
    assert abs(same - other) < 0.02


def test_queries_of_the_rope_half_come_unrotated(monkeypatch):
    host, seen = WorldPlayPipeline(), []
    for block in host.transformer.blocks:  # one query for all tokens
        block.attn.qkv.weight.data[: HEADS * DIM].zero_()
    original = skv.LayerCache.observe_queries
    monkeypatch.setattr(
        skv.LayerCache, "observe_queries", lambda self, q: seen.append(q) or original(self, q)
    )
    spread = {}
    for place in ("after_rope", "before_rope"):
        seen.clear()
        options = {"frame_tokens": FRAME, "store_keys": place, "rotation": frames_as_tokens}
        with skv.attach(host, config=small_config("quantwm"), **options):
            run(host, 12)
        spread[place] = [max(float(q.chunk(2, 3)[i].float().std(2).max()) for q in seen)
                         for i in range(2)]  # fmt: skip
    assert spread["before_rope"][0] < 0.02 < spread["after_rope"][0]
    assert spread["before_rope"][1] == spread["after_rope"][1] > 0


def test_keys_before_rope_need_a_function_that_turns():
    host = WorldPlayPipeline()
    with (
        pytest.raises(ConfigError, match=r"rotation None: expected a function \(x, start\)"),
        skv.attach(host, store_keys="before_rope"),
    ):
        pass
    options = {"store_keys": "before_rope", "frame_tokens": FRAME}
    config = small_config("rtn")
    with (
        pytest.raises(HostError, match=r"rotation is off by \d\.\d+ from turns of pairs"),
        skv.attach(host, config=config, rotation=lambda x, start: x.flip(3), **options),
    ):
        run(host, 12)
