"""FastVideo: entries re-assigned detached, everything read and trimmed, keys before RoPE."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

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
from tests.hosts.fastvideo import (
    DIM,
    FRAME,
    HEADS,
    LAYERS,
    CausalStage,
    MatrixGame2Stage,
    noise_of,
)

MODULE = sys.modules[CausalStage.__module__]
KINDS = [CausalStage, MatrixGame2Stage]


def run_twice(stage, chunks):
    return [stage.forward(noise_of(sum(chunks), seed), chunks) for seed in (1, 2)]


# (window, sink) in frames and chunk lengths; without a window the stage of causal Wan alone runs.
SHAPES = [
    (9, 3, [3] * 10),
    (6, 0, [3] * 9),
    (7, 2, [1, 3, 3, 3, 3, 3, 3, 3, 3]),
    (18, 6, [4] * 9),
]
CASES = [(kind, *shape) for kind in KINDS for shape in SHAPES] + [(CausalStage, -1, 0, [3] * 7)]


@pytest.mark.parametrize("policy", ["absolute", "relativistic"])
@pytest.mark.parametrize(("kind", "local", "sink", "chunks"), CASES)
def test_bf16_is_bit_identical(kind, policy, local, sink, chunks):
    wanted = run_twice(kind(local, sink, policy), chunks)
    host = kind(local, sink, policy)
    with skv.attach(host, preset="bf16") as caches:
        got = run_twice(host, chunks)
    assert_equal(got, wanted)
    assert list(caches.branches) == ["main"]


def test_two_lists_at_a_time_are_two_branches():
    wanted = run_twice(CausalStage(guided=True), [3] * 9)
    host = CausalStage(guided=True)
    with skv.attach(host, preset="bf16") as caches:
        got = run_twice(host, [3] * 9)
    assert_equal(got, wanted)
    assert list(caches.branches) == ["main", "second"]


def test_a_third_list_at_a_time_is_refused():
    host = CausalStage()
    host.frame_seq_length = FRAME
    with skv.attach(host, preset="bf16"):
        lists = [host._initialize_kv_cache(1, torch.bfloat16, "cpu") for _ in range(2)]
        with pytest.raises(HostError, match="third list while two are in use: expected two"):
            host._initialize_kv_cache(1, torch.bfloat16, "cpu")
        del lists
        host._initialize_kv_cache(1, torch.bfloat16, "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_one_adapter_knows_it(kind):
    assert [a.name for a in adapters() if a.matches(kind())] == ["fastvideo"]


@pytest.mark.filterwarnings("ignore:FastVideo. queries cannot be observed")
@pytest.mark.parametrize("method", QUANTIZING)
@pytest.mark.parametrize("kind", KINDS)
def test_every_span_is_packed_once(kind, method):
    wanted = kind().forward(noise_of(30), [3] * 10)
    host = kind()
    with skv.attach(host, config=small_config(method)) as caches:
        if kind is MatrixGame2Stage and skv.preset(method).needs_queries:
            assert "queries cannot be observed (Matrix-Game" in caches.notes[0]
        got = host.forward(noise_of(30), [3] * 10)
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
    assert not torch.equal(got, wanted)
    assert torch.isfinite(got).all()
    for layer in caches["main"]:
        assert layer.encoded_tokens == 27 * FRAME
        assert layer.held() == [(0, 3 * FRAME), (24 * FRAME, 30 * FRAME)]


def test_everything_read_and_trimmed_decodes_the_window_alone():
    host = MatrixGame2Stage()
    host.frame_seq_length = FRAME
    with skv.attach(host, preset="bf16") as caches:
        entry = host._initialize_kv_cache(1, torch.bfloat16, "cpu")[0]
        keys = torch.arange(12 * 3 * FRAME).float()[None, :, None, None]
        keys = keys.expand(1, -1, HEADS, DIM).bfloat16()
        for start in range(0, 36 * FRAME, 3 * FRAME):
            chunk = keys[:, start : start + 3 * FRAME]
            entry["k"][:, start : start + 3 * FRAME] = chunk
            entry["v"][:, start : start + 3 * FRAME] = chunk
        lazy = entry["k"][:, : 36 * FRAME]
        assert not isinstance(lazy, torch.Tensor)
        assert lazy.shape == (1, 36 * FRAME, HEADS, DIM)
        assert torch.equal(lazy[:, : 3 * FRAME], keys[:, : 3 * FRAME])
        assert torch.equal(lazy[:, 3 * FRAME :][:, -6 * FRAME :], keys[:, -6 * FRAME :])
        assert torch.equal(lazy[:, -5:], keys[:, -5:])
        assert caches["main"][0].held() == [(0, 3 * FRAME), (30 * FRAME, 36 * FRAME)]
        for wrong in (
            lambda: lazy.transpose(1, 2),
            lambda: torch.cat([lazy, lazy], 1),
            lambda: lazy[:, :, 0],
        ):
            with pytest.raises(HostError, match="expected") as caught:
                wrong()
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", ["absolute", "relativistic"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:FastVideo. queries cannot be observed")
def test_queries_reach_their_layer_in_the_frame_of_its_keys(kind, policy):
    host = kind(9, 3, policy)
    seen = []
    with skv.attach(host, config=small_config("quantwm")) as caches:
        host.frame_seq_length = FRAME
        original = skv.LayerCache.observe_queries
        host.transformer.blocks[0].to_q.register_forward_hook(
            lambda _m, _a, out: seen.append(out.unflatten(-1, (HEADS, DIM)))
        )
        given = []
        skv.LayerCache.observe_queries = lambda self, q: given.append(q) or original(self, q)
        try:
            host.forward(noise_of(9), [3] * 3)
        finally:
            skv.LayerCache.observe_queries = original
        counts = []
        for layer in caches["main"]:
            moment = layer.stats.for_encoding(10)
            counts.append(0 if moment is None else int(moment.count.flatten()[0]))
    if kind is MatrixGame2Stage and policy == "absolute":
        assert counts == [0] * LAYERS
        return
    assert counts == [2 * 3 * 3 * FRAME] * LAYERS
    # Keys that are stored before RoPE are weighed with queries before it.
    assert torch.equal(given[-LAYERS], seen[-1]) == (policy == "relativistic")


def test_beyond_21_frames_without_a_window_the_host_raises_as_before():
    host = CausalStage(-1, 0)
    before = state_of(host, host.transformer)

    def attached():
        with skv.attach(host, config=small_config("quantwm")):
            host.forward(noise_of(24), [3] * 8)

    with pytest.raises(ValueError, match="keeps 21 frames; got 192 tokens"):
        attached()
    after = state_of(host, host.transformer)
    assert after.pop("0..frame_seq_length") == FRAME  # the host's own
    assert_same_state(before, after)


@pytest.mark.parametrize("policy", ["absolute", "relativistic"])
def test_an_untouched_host_comes_back(policy):
    host = CausalStage(9, 3, policy)
    host.frame_seq_length = FRAME
    before = state_of(host, host.transformer, MODULE)
    with skv.attach(host, config=small_config("quantwm")):
        host.forward(noise_of(9), [3] * 3)
    assert_same_state(before, state_of(host, host.transformer, MODULE))
    wanted = CausalStage(9, 3, policy).forward(noise_of(12), [3] * 4)
    assert torch.equal(host.forward(noise_of(12), [3] * 4), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_no_second_layer_is_dense_at_a_time(kind):
    plain, packed = kind(18, 3), kind(18, 3)
    noise, chunks, resident = noise_of(27), [3] * 9, []

    def run_packed():
        with skv.attach(packed, config=small_config("rtn")) as caches:
            packed.forward(noise, chunks)
            resident.append(caches.nbytes)

    dense = peak_bytes(lambda: plain.forward(noise, chunks))
    used = peak_bytes(run_packed)
    frame = FRAME * HEADS * DIM * 2 * 2  # K and V of one layer, BF16
    # One dense window, the packed cache, one chunk's source and FP32 copies of it.
    assert used < dense - LAYERS * 18 * frame + resident[0] + 18 * frame + 6 * 3 * frame


def test_frames_of_1560_tokens():
    host = CausalStage(6, 3, frame=1560, steps=1)
    with skv.attach(host, config=small_config("qvg")) as caches:
        host.forward(noise_of(9, tokens=1560), [3] * 3)
        caches.commit()
    assert caches.encoded_tokens == LAYERS * 9 * 1560


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda h: setattr(h, "transformer_2", nn.Identity()),
         "transformer_2 of Identity: expected one transformer"),
        (lambda h: setattr(h, "kv_cache1", None), "a stage that keeps kv_cache1: expected"),
        (lambda h: setattr(h, "local_attn_size", -1), "size -1 in the stage: expected 9"),
        (lambda h: setattr(h.transformer.blocks[0].attn1, "rope_cache_policy", "block"),
         "rope_cache_policy 'block': expected 'absolute' or 'relativistic'"),
        (lambda h: delattr(h.transformer.blocks[0].attn1, "sink_size"), "without 'sink_size'"),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_refused_before_anything_happens(edit, message):
    host = CausalStage()
    edit(host)
    before = state_of(host, host.transformer)
    with pytest.raises(HostError, match=message) as caught, skv.attach(host):
        pass
    assert "\n" not in str(caught.value)
    assert_same_state(before, state_of(host, host.transformer))
