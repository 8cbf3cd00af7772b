"""Matrix-Game 2: the main cache is ours, those of mouse, keyboard and text stay as they are."""

from __future__ import annotations

import sys

import pytest
import torch

import steadykv as skv
from steadykv.errors import HostError
from steadykv.hosts.dicts import IndexedEntry
from tests.hosts.checks import (
    QUANTIZING,
    assert_equal,
    assert_ledger_is_real,
    assert_packed_once,
    assert_same_state,
    peak_bytes,
    small_config,
    state_of,
)
from tests.hosts.matrix_game_2 import CACHES, GRID, CausalInferencePipeline, inputs_of
from tests.hosts.self_forcing import DIM, HEADS, LAYERS

MODULE = sys.modules[CausalInferencePipeline.__module__]
FRAME = GRID[0] * GRID[1]


def run_twice(host, frames=30):
    return [host.inference(*inputs_of(frames, seed)) for seed in (1, 2)]


@pytest.mark.parametrize("window", [6, 7, 15])
def test_bf16_is_bit_identical(window):
    wanted = run_twice(CausalInferencePipeline(window))
    host = CausalInferencePipeline(window)
    with skv.attach(host, preset="bf16") as caches:
        got = run_twice(host)
        assert list(caches.branches) == ["main"]
    assert_equal(got, wanted)


@pytest.mark.parametrize("method", QUANTIZING)
def test_every_span_is_packed_once(method):
    host = CausalInferencePipeline()
    with skv.attach(host, config=small_config(method)) as caches:
        got = host.inference(*inputs_of(30))
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
        wanted = CausalInferencePipeline().inference(*inputs_of(30))
    assert not torch.equal(got, wanted)
    for layer in caches["main"]:
        assert layer.encoded_tokens == 27 * FRAME
        assert layer.held() == [(24 * FRAME, 30 * FRAME)]


def test_caches_of_actions_and_of_text_stay_dense():
    """Trap 12: bit-identical to those of a host that was never attached, also with quantization."""
    host, plain = CausalInferencePipeline(), CausalInferencePipeline()
    plain.inference(*inputs_of(9))
    with skv.attach(host, preset="bf16"):
        host.inference(*inputs_of(9))
        assert all(isinstance(entry, IndexedEntry) for entry in host.kv_cache1)
        for name in CACHES[1:]:
            for ours, theirs in zip(getattr(host, name), getattr(plain, name), strict=True):
                assert type(ours) is dict
                assert list(ours) == list(theirs)
                for key, value in theirs.items():
                    assert value is ours[key] or torch.equal(value, ours[key])
    with skv.attach(host, config=small_config("qvg")) as caches:
        host.inference(*inputs_of(9))
        assert host.kv_cache_mouse[0]["k"].shape == (FRAME, 6, 4, 16)
        assert all(type(entry) is dict for name in CACHES[1:] for entry in getattr(host, name))
        assert len(caches) == 1


def test_caches_are_made_anew_in_every_call():
    """The old ones give their memory back, though the block goes on."""
    host = CausalInferencePipeline()
    with skv.attach(host, config=small_config("qvg")) as caches:
        host.inference(*inputs_of(12))
        first, one_run = caches["main"], caches.nbytes
        host.inference(*inputs_of(12))
        assert caches["main"] is not first
        assert first[0].held() == []
        assert caches.nbytes == one_run
        assert_ledger_is_real(caches)


def test_a_batch_of_two():
    wanted = CausalInferencePipeline().inference(*inputs_of(12, batch=2))
    host = CausalInferencePipeline()
    with skv.attach(host, preset="bf16"):
        assert torch.equal(host.inference(*inputs_of(12, batch=2)), wanted)


def test_queries_reach_the_statistics_of_their_layer_alone():
    host = CausalInferencePipeline()
    with skv.attach(host, config=small_config("quantwm")) as caches:
        host.inference(*inputs_of(9))
        counts = [int(layer.stats.for_encoding(10).count.flatten()[0]) for layer in caches["main"]]
    # Two chunks are packed, of four passes each; actions and cross-attention were not counted.
    assert counts == [2 * 4 * 3 * FRAME] * LAYERS


@pytest.mark.parametrize("options", [{"store_keys": "before_rope"}, {"attention": "packed"}])
def test_options_of_the_family(options):
    """Grid sizes of one dimension; attention with whole windows."""
    config = small_config("rtn", bits=4)
    outs = []
    for chosen in ({}, options):
        host = CausalInferencePipeline()
        with skv.attach(host, config=config, **chosen) as caches:
            outs.append(host.inference(*inputs_of(18)).float())
            assert_packed_once(caches["main"])
            assert not caches.notes
    assert 0 < float((outs[0] - outs[1]).norm() / outs[0].norm()) < 0.1


def test_frames_of_880_tokens(monkeypatch):
    """Trap 3: no multiple of 64. What attention would get is compared, not computed."""
    seen = []

    def attention(q, k, v):
        seen.append((k.shape, k.float().sum(), v.float().sum()))
        return q

    monkeypatch.setattr(MODULE, "attention", attention)
    host, plain = (CausalInferencePipeline(6, (22, 40)) for _ in range(2))
    wanted = plain.inference(*inputs_of(9, frame=880))
    before = list(seen)
    seen.clear()
    with skv.attach(host, preset="bf16"):
        assert torch.equal(host.inference(*inputs_of(9, frame=880)), wanted)
    assert seen == before
    with skv.attach(host, config=small_config("rtn")) as caches:
        host.inference(*inputs_of(9, frame=880))
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
        assert caches["main"][0].encoded_tokens == 2 * 3 * 880


def test_no_second_layer_is_dense_at_a_time():
    plain, packed = CausalInferencePipeline(15), CausalInferencePipeline(15)
    inputs, resident = inputs_of(15), []

    def run_packed():
        with skv.attach(packed, config=small_config("rtn")) as caches:
            packed.inference(*inputs)
            resident.append(caches.nbytes)

    token = HEADS * DIM * 2 * 2  # K and V, BF16
    dense = peak_bytes(lambda: plain.inference(*inputs))
    used = peak_bytes(run_packed)
    window, cache = 15 * FRAME * token, LAYERS * 15 * FRAME * token
    chunk = 3 * FRAME * HEADS * DIM * 4
    assert used < dense - cache + resident[0] + window + 6 * chunk


def test_an_untouched_host_comes_back():
    host = CausalInferencePipeline()
    host.inference(*inputs_of(3))
    before = state_of(host, MODULE)

    def run_with_an_error():
        with skv.attach(host, config=small_config("quantwm"), store_keys="before_rope"):
            host.inference(*inputs_of(6))
            raise RuntimeError("in the block")

    with (
        pytest.warns(UserWarning, match="kv_cache1 was allocated before"),
        pytest.raises(RuntimeError, match="in the block"),
    ):
        run_with_an_error()
    after = state_of(host, MODULE)
    for name in CACHES[1:]:
        before[f"0..{name}"] = after[f"0..{name}"]  # the host's own, made anew
    assert_same_state(before, after)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda h: setattr(h, "local_attn_size", 9),
            r"got local_attn_size 9 in the pipeline and 6",
        ),
        (lambda h: delattr(h.generator.model.blocks[0].self_attn, "sink_size"), "'sink_size'"),
        (lambda h: setattr(h, "frame_seq_length", 20.0), "frame_seq_length of builtins.float"),
        (
            lambda h: setattr(h, "_initialize_kv_cache_mouse_and_keyboard", lambda batch_size: 0),
            "expected an argument 'dtype' and 'device'",
        ),
    ],
)
def test_a_changed_host_is_refused_before_anything_happens(change, message):
    host = CausalInferencePipeline()
    change(host)
    before = state_of(host, MODULE)
    with pytest.raises(HostError, match=message), skv.attach(host):
        pass
    assert_same_state(before, state_of(host, MODULE))


def test_a_host_without_its_window_is_refused():
    host = CausalInferencePipeline()
    host.local_attn_size = host.generator.model.blocks[0].self_attn.local_attn_size = -1
    message = r"got local_attn_size -1: expected a window.*6"
    with pytest.raises(HostError, match=message), skv.attach(host):
        pass
