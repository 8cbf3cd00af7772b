"""Causal-Forcing rolling: several blocks a query, block 0 unrotated, two slices a read."""

from __future__ import annotations

import sys

import pytest
import torch

import steadykv as skv
from steadykv.errors import HostError, PositionError
from steadykv.hosts.registry import adapters
from tests.hosts.causal_forcing_rolling import (
    ATTENDED_FRAMES,
    BLOCK_FRAMES,
    BUFFER_FRAMES,
    DIM,
    FRAME,
    HEADS,
    LAYERS,
    CausalInferencePipeline,
    noise_of,
    text_of,
)
from tests.hosts.checks import (
    QUANTIZING,
    assert_equal,
    assert_ledger_is_real,
    assert_packed_once,
    assert_same_state,
    notes_of,
    peak_bytes,
    small_config,
    state_of,
)

MODULE = sys.modules[CausalInferencePipeline.__module__]
BLOCK = BLOCK_FRAMES * FRAME


def run(pipeline, blocks, seed=1, frame=FRAME):
    return pipeline.inference_rolling_forcing(noise_of(blocks, seed, frame), text_of(seed))


@pytest.mark.parametrize("steps", [4, 5, 1])
def test_bf16_is_bit_identical_over_two_prompts(steps):
    """14 blocks: the untouched host rolls six times; a shorter second prompt resets the indices."""
    plain, host = CausalInferencePipeline(steps), CausalInferencePipeline(steps)
    wanted = [run(plain, 14, 1), run(plain, 9, 2)]
    with skv.attach(host, preset="bf16") as caches:
        got = [run(host, 14, 1), run(host, 9, 2)]
    assert_equal(got, wanted)
    assert list(caches.branches) == ["main"]


def test_exactly_one_adapter_knows_it():
    found = [a.name for a in adapters() if a.matches(CausalInferencePipeline())]
    assert found == ["causal-forcing-rolling"]


@pytest.mark.parametrize("method", QUANTIZING)
def test_every_span_is_packed_once_and_the_rest_is_freed(method):
    host, blocks = CausalInferencePipeline(), 12
    wanted = run(CausalInferencePipeline(), blocks)
    with skv.attach(host, config=small_config(method)) as caches:
        got = run(host, blocks)
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
    assert not torch.equal(got, wanted)
    assert torch.isfinite(got).all()
    end = blocks * BLOCK
    for layer in caches["main"]:
        # Every rolling and every clean pass wrote the same block again; it was packed once.
        assert layer.encoded_tokens == end - BLOCK
        assert layer.held() == [(0, BLOCK), (end - ATTENDED_FRAMES * FRAME, end)]
    caches.commit()
    assert caches.encoded_tokens == LAYERS * end


def test_nothing_outside_block_0_and_the_newest_frames_is_held_at_any_time():
    host, held = CausalInferencePipeline(), []
    with skv.attach(host, preset="bf16") as caches:
        handle = host.generator.register_forward_hook(
            lambda *_: held.extend(layer.held() for layer in caches["main"])
        )
        run(host, 14)
        handle.remove()
    for ranges in held:
        end = ranges[-1][1]
        first = max(0, end - ATTENDED_FRAMES * FRAME)
        expected = [(0, end)] if first <= BLOCK else [(0, BLOCK), (first, end)]
        assert ranges == expected
        assert sum(b - a for a, b in ranges) <= BUFFER_FRAMES * FRAME
    assert held[-1][0] == (0, BLOCK)
    with pytest.raises(PositionError, match="expected ones that are held"):
        caches["main"][0].read_tensor("key", [(BLOCK, 2 * BLOCK)])


def test_block_0_is_packed_apart_from_rotated_keys():
    """The trap of mixed RoPE: even spans of several blocks end at block 0."""
    host = CausalInferencePipeline()
    with skv.attach(host, config=small_config("qvg", span_chunks=2)) as caches:
        run(host, 6)
    for layer in caches["main"]:
        packed = [
            (s.start, s.end) for s in layer.keys.segments if not isinstance(s.data, torch.Tensor)
        ]
        assert packed == [(0, BLOCK), (BLOCK, 3 * BLOCK), (3 * BLOCK, 5 * BLOCK)]


def test_callers_may_edit_what_they_read_in_place():
    host = CausalInferencePipeline()
    with skv.attach(host, preset="bf16"):
        run(host, 4)
        keys = host.kv_cache_clean[0]["k"]
        before = keys[:, :BLOCK]
        edited = keys[:, :BLOCK]
        edited.zero_()
        assert torch.equal(keys[:, :BLOCK], before)
        assert keys[:, BLOCK:BLOCK].shape == (1, 0, HEADS, DIM)


def test_queries_reach_their_layer_though_keys_arrive_as_copies():
    host, blocks = CausalInferencePipeline(steps=2), 4
    with skv.attach(host, config=small_config("quantwm")) as caches:
        run(host, blocks)
        counts = []
        for layer in caches["main"]:
            moment = layer.stats.for_encoding(10)
            counts.append(int(moment.count.flatten()[0]))
    # Windows 0 to 4 start at blocks 0, 0, 1, 2, 3; the last one's statistics wait for its block.
    # A rolling pass has 1, 2, 2, 2 blocks of queries, a clean one has one. Heads are not pooled.
    assert counts == [(1 + 2 + 2 + 2 + 4) * BLOCK] * LAYERS
    assert not notes_of(caches)


def test_block_0_does_not_take_queries_of_another_frame():
    host = CausalInferencePipeline()
    with (
        pytest.warns(UserWarning, match="block 0 is stored before its rotation"),
        skv.attach(host, config=small_config("quantwm", first_span="own")) as caches,
    ):
        run(host, 5)
    assert caches["main"][0].stats.own_first_span is False


def test_an_untouched_host_comes_back():
    host = CausalInferencePipeline()
    before = state_of(host, MODULE)

    def same_but_for_the_hosts_own_text_cache(after):
        after["0..crossattn_cache"] = before["0..crossattn_cache"]
        assert_same_state(before, after)

    with skv.attach(host, config=small_config("quantwm")):
        run(host, 4)
    same_but_for_the_hosts_own_text_cache(state_of(host, MODULE))

    def run_with_an_error():
        with skv.attach(host, config=small_config("quantwm")):
            run(host, 4)
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        run_with_an_error()
    same_but_for_the_hosts_own_text_cache(state_of(host, MODULE))
    assert torch.equal(run(host, 9), run(CausalInferencePipeline(), 9))


def test_no_second_layer_is_dense_at_a_time():
    blocks = 9
    plain, packed = CausalInferencePipeline(), CausalInferencePipeline()
    resident = []

    def run_packed():
        with skv.attach(packed, config=small_config("rtn")) as caches:
            run(packed, blocks)
            resident.append(caches.nbytes)

    dense = peak_bytes(lambda: run(plain, blocks))
    used = peak_bytes(run_packed)
    frame = FRAME * HEADS * DIM * 2 * 2  # K and V of one layer, BF16
    cache, window, chunk = LAYERS * BUFFER_FRAMES * frame, ATTENDED_FRAMES * frame, 3 * frame
    # One dense window, the packed cache, one chunk's source and FP32 copies of it.
    assert used < dense - cache + resident[0] + window + 6 * chunk


@pytest.mark.parametrize("preset", ["bf16", "quantwm"])
def test_frames_of_1560_tokens(preset):
    frame, blocks = 1560, 2
    wanted = run(CausalInferencePipeline(2, frame), blocks, frame=frame)
    host = CausalInferencePipeline(2, frame)
    with skv.attach(host, config=small_config(preset) if preset != "bf16" else None,
                    preset="bf16") as caches:  # fmt: skip
        got = run(host, blocks, frame=frame)
    assert torch.equal(got, wanted) == (preset == "bf16")
    caches.commit()
    packed = 0 if preset == "bf16" else LAYERS * blocks * 3 * frame
    assert caches.encoded_tokens == packed


def changed(edit):
    host = CausalInferencePipeline()
    edit(host)
    return host


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda h: delattr(h.generator.model.blocks[0].self_attn, "block_length"),
            r"rolling: got .*without 'block_length'.*docs/hosts",
        ),
        (
            lambda h: setattr(h, "num_frame_per_block", 1),
            r"got block_length 24 in attention: expected 8.*make them agree",
        ),
        (lambda h: delattr(h, "kv_cache_clean"), r"without 'kv_cache_clean': expected"),
    ],
)
def test_a_changed_host_is_refused_before_anything_happens(edit, message):
    host = changed(edit)
    before = state_of(host, MODULE)
    with pytest.raises(HostError, match=message), skv.attach(host):
        pass
    assert_same_state(before, state_of(host, MODULE))


def test_a_cache_that_was_allocated_before_is_put_back_with_a_warning():
    host = CausalInferencePipeline()
    run(host, 1)
    before = host.kv_cache_clean
    with (
        pytest.warns(UserWarning, match="kv_cache_clean was allocated before"),
        skv.attach(host, preset="bf16"),
    ):
        assert host.kv_cache_clean is None
    assert host.kv_cache_clean is before
