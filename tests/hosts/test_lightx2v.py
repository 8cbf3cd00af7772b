"""LightX2V: a pool addressed by places in a window that the host moves by itself."""

from __future__ import annotations

import sys

import pytest
import torch

import steadykv as skv
from steadykv.errors import HostError
from tests.hosts.checks import (
    QUANTIZING,
    assert_ledger_is_real,
    assert_packed_once,
    assert_same_state,
    notes_of,
    peak_bytes,
    small_config,
    state_of,
)
from tests.hosts.lightx2v import DIM, FRAME, HEADS, LAYERS, Kernel, Runner, noise_of

MODULE = sys.modules[Runner.__module__]
# Window with sink, sink, chunk in frames; -1: no window.
SHAPES = [(-1, 0, 3), (7, 1, 3), (7, 2, 3), (6, 0, 3), (9, 3, 3), (18, 6, 4), (4, 1, 1)]


def run_twice(runner, chunks=9):
    frames = chunks * runner.config["ar_config"]["num_frame_per_chunk"]
    return [runner.run(noise_of(frames, seed)) for seed in (1, 2)]


@pytest.mark.parametrize("step_caches", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_is_bit_identical(shape, step_caches):
    wanted = run_twice(Runner(*shape, step_caches=step_caches))
    runner = Runner(*shape, step_caches=step_caches)
    with skv.attach(runner, preset="bf16") as caches:
        got = run_twice(runner)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert list(caches.branches) == (["step 0", "step 1"] if step_caches else ["main"])


@pytest.mark.parametrize("limit", [4 * FRAME, 5 * FRAME + 3])
def test_reads_shorter_than_the_window(limit):
    """`max_attention_size` is a limit of its own: the sink is seen where it reaches that far."""
    for local in (-1, 7):
        wanted = run_twice(Runner(local, 1, max_attention_size=limit))
        runner = Runner(local, 1, max_attention_size=limit)
        with skv.attach(runner, preset="bf16"):
            got = run_twice(runner)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("method", QUANTIZING)
def test_every_span_is_packed_once(method):
    runner = Runner(9, 3)
    wanted = Runner(9, 3).run(noise_of(30))
    with skv.attach(runner, config=small_config(method)) as caches:
        got = runner.run(noise_of(30))
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
    assert torch.isfinite(got).all()
    assert not torch.equal(got, wanted)
    for layer in caches["main"]:
        assert layer.encoded_tokens == 27 * FRAME  # the newest chunk is still open
        assert layer.held() == [(0, 3 * FRAME), (24 * FRAME, 30 * FRAME)]
    caches.commit()
    assert caches.encoded_tokens == LAYERS * 30 * FRAME
    assert not notes_of(caches)


def test_each_step_packs_its_own_cache():
    runner = Runner(9, 3, step_caches=True)
    with skv.attach(runner, config=small_config("quantwm")) as caches:
        runner.run(noise_of(30))
        for cache in caches:
            assert [layer.encoded_tokens for layer in cache] == [27 * FRAME] * LAYERS
        queries = [cache[0].stats.for_encoding(30).count.flatten()[0] for cache in caches]
    assert [int(n) for n in queries] == [27 * FRAME, 2 * 27 * FRAME]  # with the clean pass


def test_queries_reach_the_statistics_of_their_layer_alone():
    runner = Runner(9, 3)
    with skv.attach(runner, config=small_config("quantwm")) as caches:
        runner.run(noise_of(9))
        counts = [int(x.stats.for_encoding(10).count.flatten()[0]) for x in caches["main"]]
    assert counts == [2 * 3 * 3 * FRAME] * LAYERS
    assert not notes_of(caches)


def test_one_warning_where_weights_are_not_loaded():
    runner = Runner()
    runner.model.transformer_weights = None
    with (
        pytest.warns(UserWarning, match=r"queries cannot be observed .*w = 1") as caught,
        skv.attach(runner, config=small_config("quantwm")),
    ):
        pass
    assert len(caught) == 1


@pytest.mark.parametrize("tokens", [880, 1560, 4680])
def test_frames_that_are_no_multiples_of_64(tokens, monkeypatch):
    """Trap 3."""
    monkeypatch.setattr(MODULE, "FRAME", tokens)
    runner = Runner(3, 1, 1)
    with skv.attach(runner, config=small_config("qvg")) as caches:
        runner.init_kv_cache_manager(4)
        pool = runner.model.kv_cache_manager.self_attn_kv_cache
        for start in range(3):
            k, v = torch.randn(2, tokens, HEADS, DIM).bfloat16()
            pool.store_kv(k, v, start * tokens, (start + 1) * tokens, 0)
        pool.set_ends(0, 3 * tokens, 3 * tokens)
        pool.roll_window(0, tokens, tokens)
        pool.store_kv(k, v, 2 * tokens, 3 * tokens, 0)
        assert pool.k_cache(0, 0, 3 * tokens).shape == (3 * tokens, HEADS, DIM)
        assert caches["main"][0].encoded_tokens == 3 * tokens
        with pytest.raises(HostError, match="rolled behind 5 tokens"):
            pool.roll_window(0, 5, tokens)


def test_an_untouched_runner_comes_back():
    runner = Runner(9, 3)
    kernels = [
        block.compute_phases[0].self_attn_1 for block in runner.model.transformer_weights.blocks
    ]

    def state():
        found = state_of(runner, MODULE, *kernels)
        return {**found, "settings": dict(runner.config["ar_config"])}

    before = state()
    with skv.attach(runner, config=small_config("quantwm")):
        assert runner.config["ar_config"]["kv_cache_scheme"] == "steadykv"
        runner.run(noise_of(9))
    assert_same_state(before, state())

    def run_with_an_error():
        with skv.attach(runner, config=small_config("quantwm")):
            runner.run(noise_of(9))
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        run_with_an_error()
    assert_same_state(before, state())
    assert "apply" not in vars(kernels[0])
    assert type(kernels[0]) is Kernel
    assert torch.equal(runner.run(noise_of(9)), Runner(9, 3).run(noise_of(9)))


def test_no_second_layer_is_dense_at_a_time():
    frames = 18
    plain, packed = (Runner(-1, 0) for _ in range(2))
    noise = noise_of(frames)
    resident: list[int] = []

    def run_packed():
        with skv.attach(packed, config=small_config("rtn")) as caches:
            packed.run(noise)
            resident.append(caches.nbytes)

    dense = peak_bytes(lambda: plain.run(noise))
    used = peak_bytes(run_packed)
    window = frames * FRAME * HEADS * DIM * 2 * 2  # K and V of one layer, BF16
    assert used < dense - LAYERS * window + resident[0] + window + 6 * 3 * FRAME * HEADS * DIM * 4


@pytest.mark.parametrize(
    "asked",
    [{"kv_quant": {"quant_scheme": "kivi"}}, {"kv_offload": True}, {"hybrid_attn": "W2-W21"}],
)
def test_other_pools_are_refused_before_anything_happens(asked):
    runner = Runner(**asked)
    before = state_of(runner, MODULE)
    with pytest.raises(HostError, match=r"got ar_config.*expected it unset"), skv.attach(runner):
        pass
    assert_same_state(before, state_of(runner, MODULE))


def test_a_changed_runner_is_refused_before_anything_happens(monkeypatch):
    monkeypatch.delattr(MODULE, "register_self_attn_kv_cache")
    runner = Runner()
    before = state_of(runner, MODULE)
    message = r"LightX2V: got .*without 'register_self_attn_kv_cache'.*docs"
    with pytest.raises(HostError, match=message), skv.attach(runner):
        pass
    assert_same_state(before, state_of(runner, MODULE))
    runner.model.seq_p_group = object()
    with pytest.raises(HostError, match="sequence parallelism"), skv.attach(runner):
        pass


def test_a_read_before_the_first_chunk_is_named():
    runner = Runner()
    with skv.attach(runner, preset="bf16"):
        runner.init_kv_cache_manager(3)
        with pytest.raises(HostError, match="expected store_kv"):
            runner.model.kv_cache_manager.self_attn_kv_cache.k_cache(0, 0, 3)
