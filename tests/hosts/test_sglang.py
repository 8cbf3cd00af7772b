"""A stage of SGLang's causal models: it allocates one object per layer, and runs unedited."""

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
from tests.hosts.sglang import DIM, FRAME, HEADS, LAYERS, CausalDMDDenoisingStage, noise_of

MODULE = sys.modules[CausalDMDDenoisingStage.__module__]

# (window, sink) in frames, the window with the sink; chunk lengths in frames.
SHAPES = [
    (4, 1, [1] * 10),
    (7, 2, [1, 3, 3, 3, 3, 3, 3, 3, 3]),
    (9, 3, [3] * 9),
    (6, 0, [3] * 9),
    (18, 6, [4] * 9),
]


def run_twice(stage, chunks):
    return [stage.forward(noise_of(sum(chunks), seed), chunks) for seed in (1, 2)]


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(("window", "sink", "chunks"), SHAPES)
def test_bf16_is_bit_identical(window, sink, chunks, guided):
    wanted = run_twice(CausalDMDDenoisingStage(window, sink, guided), chunks)
    stage = CausalDMDDenoisingStage(window, sink, guided)
    with skv.attach(stage, preset="bf16") as caches:
        got = run_twice(stage, chunks)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert list(caches.branches) == (["main", "negative"] if guided else ["main"])


@pytest.mark.parametrize("recent", [0, 5, FRAME, 3 * FRAME, 100 * FRAME])
def test_recent_window_tokens_see_sink_and_current(recent):
    wanted = run_twice(CausalDMDDenoisingStage(6, 2, recent=recent), [2] * 9)
    stage = CausalDMDDenoisingStage(6, 2, recent=recent)
    with skv.attach(stage, preset="bf16"):
        got = run_twice(stage, [2] * 9)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("method", QUANTIZING)
def test_every_span_is_packed_once(method):
    stage = CausalDMDDenoisingStage(9, 3)
    with skv.attach(stage, config=small_config(method)) as caches:
        wanted = CausalDMDDenoisingStage(9, 3).forward(noise_of(30), [3] * 10)
        got = stage.forward(noise_of(30), [3] * 10)
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
        held = sum(cache.resident_nbytes() for cache in stage.causal_kv_cache)
        assert held == caches.nbytes
    assert torch.isfinite(got).all()
    assert not torch.equal(got, wanted)
    for layer in caches["main"]:
        assert layer.encoded_tokens == 27 * FRAME  # the newest chunk is still open
        assert layer.held() == [(0, 3 * FRAME), (24 * FRAME, 30 * FRAME)]
    caches.commit()
    assert caches.encoded_tokens == LAYERS * 30 * FRAME
    assert not notes_of(caches)


def test_queries_reach_the_statistics_of_their_layer_alone():
    stage = CausalDMDDenoisingStage(9, 3, guided=True)
    with skv.attach(stage, config=small_config("quantwm")) as caches:
        stage.forward(noise_of(9), [3] * 3)
        for cache in caches:
            counts = [int(layer.stats.for_encoding(10).count.flatten()[0]) for layer in cache]
            assert counts == [2 * 3 * 3 * FRAME] * LAYERS  # two packed chunks of three passes
    assert not notes_of(caches)


def test_a_stage_whose_kernels_are_unknown_warns_once():
    stage = CausalDMDDenoisingStage(4, 1)
    for block in stage.transformer.blocks:
        kernel = block.attn
        del block.attn
        object.__setattr__(block, "attn", lambda *args, kernel=kernel: kernel(*args))
    with (
        pytest.warns(UserWarning, match=r"SGLang: observe_queries was not called"),
        skv.attach(stage, config=small_config("quantwm")) as caches,
    ):
        stage.forward(noise_of(4), [1] * 4)
    assert len(caches.notes) == 1


def test_an_untouched_stage_comes_back():
    stage = CausalDMDDenoisingStage(4, 1, guided=True)
    before = state_of(stage, stage.transformer, MODULE)
    with skv.attach(stage, config=small_config("quantwm")):
        stage.forward(noise_of(6), [1] * 6)
    assert_same_state(before, state_of(stage, stage.transformer, MODULE))

    def run_with_an_error():
        with skv.attach(stage, config=small_config("quantwm")):
            stage.forward(noise_of(3), [1] * 3)
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        run_with_an_error()
    assert_same_state(before, state_of(stage, stage.transformer, MODULE))
    wanted = run_twice(CausalDMDDenoisingStage(4, 1, guided=True), [1] * 6)
    got = run_twice(stage, [1] * 6)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_caches_that_were_allocated_before_are_put_back_with_a_warning():
    stage = CausalDMDDenoisingStage(4, 1)
    stage.forward(noise_of(1), [1])
    before = stage.causal_kv_cache
    with (
        pytest.warns(UserWarning, match="causal_kv_cache was allocated before"),
        skv.attach(stage, preset="bf16"),
    ):
        stage.forward(noise_of(1), [1])
    assert stage.causal_kv_cache is before


def test_no_second_layer_is_dense_at_a_time():
    frames, chunks = 18, [3] * 6
    plain, packed = (CausalDMDDenoisingStage(frames, 0) for _ in range(2))
    noise = noise_of(frames)
    window = frames * FRAME * HEADS * DIM * 2 * 2  # K and V of one layer, BF16
    resident: list[int] = []

    def run_packed():
        with skv.attach(packed, config=small_config("rtn")) as caches:
            packed.forward(noise, chunks)
            resident.append(caches.nbytes)

    dense = peak_bytes(lambda: plain.forward(noise, chunks))
    used = peak_bytes(run_packed)
    chunk = 3 * FRAME * HEADS * DIM * 4
    # The dense stage holds every layer; the copies that its cache makes of one are in both.
    assert used < dense - LAYERS * window + resident[0] + window + 6 * chunk


def test_a_changed_stage_is_refused_before_anything_happens():
    class Renamed(CausalDMDDenoisingStage):
        def _allocate_causal_kv_cache(self, *, batch_size, cache_tokens):
            return []

    for stage, message in (
        (Renamed(), r"SGLang: got .*cache_tokens.*expected an argument 'kv_cache_size'"),
        (CausalDMDDenoisingStage(), r"without 'num_transformer_blocks'.*docs"),
    ):
        if not isinstance(stage, Renamed):
            del stage.num_transformer_blocks
        before = state_of(stage, stage.transformer, MODULE)
        with pytest.raises(HostError, match=message), skv.attach(stage):
            pass
        assert_same_state(before, state_of(stage, stage.transformer, MODULE))


@pytest.mark.parametrize(
    "asked", [{"global_sink_tokens": 16}, {"allow_growth": True}, {"attention_window_size": 32}]
)
def test_growth_and_global_sinks_are_refused(asked):
    stage = CausalDMDDenoisingStage()
    sizes = {"batch_size": 1, "kv_cache_size": 64, "num_attention_heads": 2}
    with skv.attach(stage), pytest.raises(HostError, match="run this model without attach"):
        stage._allocate_causal_kv_cache(
            **sizes, attention_head_dim=32, dtype=torch.bfloat16, device="cpu", **asked
        )
