"""LongLive 2.0: a cloned cache is edited, the cache itself is written after all layers."""

from __future__ import annotations

import sys

import pytest
import torch

import steadykv as skv
from steadykv.errors import HostError
from steadykv.hosts.registry import adapters
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
from tests.hosts.longlive2 import (
    DIM,
    FRAME,
    HEADS,
    LAYERS,
    CausalDiffusionInferencePipeline,
    noise_of,
)

MODULE = sys.modules[CausalDiffusionInferencePipeline.__module__]


def run_twice(pipeline, frames):
    return [pipeline.inference(noise_of(frames, seed)) for seed in (1, 2)]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
@pytest.mark.parametrize(
    ("window", "sink", "chunk", "frames"),
    [(8, 2, 2, 20), (32, 8, 8, 72), (6, 0, 2, 18), (7, 2, 3, 27)],
)
def test_bf16_is_bit_identical(window, sink, chunk, frames, guidance_scale, relative):
    shape = (window, sink, chunk)
    options = {"guidance_scale": guidance_scale, "relative": relative, "steps": 1}
    wanted = run_twice(CausalDiffusionInferencePipeline(*shape, **options), frames)
    host = CausalDiffusionInferencePipeline(*shape, **options)
    with skv.attach(host, preset="bf16") as caches:
        got = run_twice(host, frames)
    assert_equal(got, wanted)
    assert list(caches.branches) == ["positive", "negative"]


def test_exactly_one_adapter_knows_it():
    found = [a.name for a in adapters() if a.matches(CausalDiffusionInferencePipeline())]
    assert found == ["longlive2"]


@pytest.mark.parametrize("method", QUANTIZING)
def test_every_span_is_packed_once(method):
    wanted = CausalDiffusionInferencePipeline().inference(noise_of(20))
    host = CausalDiffusionInferencePipeline()
    with skv.attach(host, config=small_config(method)) as caches:
        got = host.inference(noise_of(20))
        assert_packed_once(caches["positive"])
        assert_ledger_is_real(caches)
    assert not torch.equal(got, wanted)
    assert torch.isfinite(got).all()
    for layer in caches["positive"]:
        assert layer.encoded_tokens == 18 * FRAME
        assert layer.held() == [(0, 2 * FRAME), (14 * FRAME, 20 * FRAME)]
    # The list that is allocated without guidance costs nothing.
    assert all(layer.keys.nbytes + layer.values.nbytes == 0 for layer in caches["negative"])


def test_a_clone_is_private_until_the_deferred_write():
    host = CausalDiffusionInferencePipeline()
    with skv.attach(host, preset="bf16") as caches:
        host.inference(noise_of(4))
        entry = host.kv_cache_pos[0]
        before = entry["k"][:, 2 * FRAME : 4 * FRAME]
        clone = entry["k"].clone()
        rows = torch.ones(1, 2 * FRAME, HEADS, DIM).bfloat16()
        clone[:, 2 * FRAME : 4 * FRAME] = rows
        assert torch.equal(entry["k"][:, 2 * FRAME : 4 * FRAME], before)
        assert torch.equal(clone[:, 2 * FRAME : 4 * FRAME], rows)
        assert torch.equal(clone[:, : 2 * FRAME], entry["k"][:, : 2 * FRAME])
        assert torch.equal(clone[:, FRAME : 3 * FRAME][:, FRAME:], rows[:, :FRAME])
        clone[:, : 4 * FRAME].zero_()  # a caller may edit what it read
        assert torch.equal(clone[:, 2 * FRAME : 4 * FRAME], rows)
        assert clone.shape == entry["k"].shape
        assert clone.dtype == torch.bfloat16
        assert caches["positive"][0].progress.open == (2 * FRAME, 4 * FRAME)
        again = entry["k"].clone()
        with pytest.raises(HostError, match=r"edit of a cloned cache at token 8: expected one"):
            again[:, FRAME : 3 * FRAME] = rows


def test_queries_reach_their_layer_and_count_for_their_own_chunk():
    host = CausalDiffusionInferencePipeline()
    with skv.attach(host, config=small_config("quantwm")) as caches:
        host.inference(noise_of(8))
        counts, pending = [], []
        for layer in caches["positive"]:
            counts.append(int(layer.stats.for_encoding(10).count.flatten()[0]))
            waiting = [layer.stats._pending[group] for group in layer.stats.pending_groups]
            pending.append([int(moment.count.flatten()[0]) for moment in waiting])
    # Three chunks of three passes are packed. None of the open chunk's passes is among theirs,
    # though the host writes only after it attended.
    assert counts == [3 * 3 * 2 * FRAME] * LAYERS
    assert pending == [[3 * 2 * FRAME]] * LAYERS


def test_own_statistics_of_a_first_span_survive_the_deferred_write():
    host = CausalDiffusionInferencePipeline()
    seen = []
    with skv.attach(host, config=small_config("quantwm", first_span="own")) as caches:
        host.inference(noise_of(2))
        for layer in caches["positive"]:
            seen.append(int(layer.stats._pass.count.flatten()[0]))
    # A pass shows its queries before it writes: a write must not throw them away. All passes count.
    assert seen == [3 * 2 * FRAME] * LAYERS


def test_without_a_place_for_queries_there_is_one_warning():
    host = CausalDiffusionInferencePipeline(relative=True)
    with (
        pytest.warns(UserWarning, match=r"queries cannot be observed .*before RoPE") as caught,
        skv.attach(host, config=small_config("quantwm")) as caches,
    ):
        host.inference(noise_of(8))
    assert len(caught) == len(caches.notes) == 1


def test_an_untouched_host_comes_back():
    host = CausalDiffusionInferencePipeline()
    before = state_of(host, MODULE)
    with skv.attach(host, config=small_config("quantwm")):
        host.inference(noise_of(8))
    assert_same_state(before, state_of(host, MODULE))

    def run_with_an_error():
        with skv.attach(host, config=small_config("quantwm")):
            host.inference(noise_of(8), scene_cuts=(1,))

    with pytest.raises(
        HostError, match="got _pin_current_chunk while attached: expected one scene"
    ):
        run_with_an_error()
    assert_same_state(before, state_of(host, MODULE))
    wanted = run_twice(CausalDiffusionInferencePipeline(), 12)
    assert_equal(run_twice(host, 12), wanted)


def test_no_second_layer_is_dense_at_a_time():
    plain, packed = (CausalDiffusionInferencePipeline(18, 3, 3) for _ in range(2))
    noise, resident = noise_of(27), []

    def run_packed():
        with skv.attach(packed, config=small_config("rtn")) as caches:
            packed.inference(noise)
            resident.append(caches.nbytes)

    dense = peak_bytes(lambda: plain.inference(noise))
    used = peak_bytes(run_packed)
    frame = FRAME * HEADS * DIM * 2 * 2  # K and V of one layer, BF16
    # The untouched host clones a layer's window itself; two lists of it are allocated.
    assert used < dense - 2 * LAYERS * 18 * frame + resident[0] + 18 * frame + 6 * 3 * frame


def test_frames_of_880_tokens():
    host = CausalDiffusionInferencePipeline(8, 2, 2, frame=880, steps=1)
    with skv.attach(host, config=small_config("qvg")) as caches:
        host.inference(noise_of(10, tokens=880))
        caches["positive"].commit()
    assert caches.encoded_tokens == LAYERS * 10 * 880


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("quantize_kv", True, r"got quantize_kv \(its own NVFP4 cache\): expected it off"),
        ("multi_shot_sink", True, r"got multi_shot_sink \(pinned scene sinks\): expected it off"),
        ("shot_clean_recache", True, r"got shot_clean_recache \(a zeroed buffer"),
        ("local_attn_size", -1, "got local_attn_size -1: expected a window, such as 32"),
        ("sink_size", None, "sink_size of builtins.NoneType: expected int"),
    ],
)
def test_what_is_not_covered_is_refused_before_anything_happens(name, value, message):
    host = CausalDiffusionInferencePipeline()
    setattr(host, name, value)
    before = state_of(host, MODULE)
    with pytest.raises(HostError, match=message) as caught, skv.attach(host):
        pass
    assert "\n" not in str(caught.value)
    assert_same_state(before, state_of(host, MODULE))


def test_recaching_is_refused():
    host = CausalDiffusionInferencePipeline()
    with skv.attach(host, preset="bf16"):
        host.inference(noise_of(4))
        with pytest.raises(HostError, match="got _zero_kv_data while attached: expected one scene"):
            host._zero_kv_data(host.kv_cache_pos, 4 * FRAME)
