"""Self-Forcing and Causal-Forcing: slices of a dict of tensors, rewritten at every step."""

from __future__ import annotations

import sys

import pytest
import torch

import steadykv as skv
from steadykv.errors import ConfigError, HostError
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
from tests.hosts.self_forcing import (
    DIM,
    FRAME,
    HEADS,
    LAYERS,
    CausalDiffusionInferencePipeline,
    CausalInferencePipeline,
    noise_of,
    text_of,
)

MODULE = sys.modules[CausalInferencePipeline.__module__]

# (window, sink) in frames, chunk lengths in frames: with and without overflow, window and sink that
# are no multiples of the chunk, a first chunk of one frame.
SHAPES = [
    (-1, 0, [3] * 7),
    (4, 1, [1] * 12),
    (7, 2, [1, 3, 3, 3, 3, 3, 3, 3, 3]),
    (9, 3, [3] * 12),
    (6, 0, [3] * 9),
    (18, 6, [4] * 9),
]


def run_twice(pipeline, chunks):
    """Two prompts, one after the other, as the host's own script does it."""
    return [
        pipeline.inference(noise_of(sum(chunks), seed), chunks, text_of(seed)) for seed in (1, 2)
    ]


@pytest.mark.parametrize("kind", [CausalInferencePipeline, CausalDiffusionInferencePipeline])
@pytest.mark.parametrize(("window", "sink", "chunks"), SHAPES)
def test_bf16_is_bit_identical(kind, window, sink, chunks):
    wanted = run_twice(kind(window, sink), chunks)
    host = kind(window, sink)
    with skv.attach(host, preset="bf16") as caches:
        got = run_twice(host, chunks)
    assert_equal(got, wanted)
    assert list(caches.branches) == (["main"] if len(kind.LISTS) == 1 else ["positive", "negative"])


@pytest.mark.parametrize("method", QUANTIZING)
def test_every_span_is_packed_once(method):
    host = CausalInferencePipeline(9, 3)
    chunks = [3] * 10
    with skv.attach(host, config=small_config(method)) as caches:
        wanted = CausalInferencePipeline(9, 3).inference(noise_of(30), chunks, text_of())
        got = host.inference(noise_of(30), chunks, text_of())
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
    assert not torch.equal(got, wanted)
    assert torch.isfinite(got).all()
    for layer in caches["main"]:
        assert layer.encoded_tokens == 27 * FRAME  # the newest chunk is still open
        assert layer.held() == [(0, 3 * FRAME), (24 * FRAME, 30 * FRAME)]
    caches.commit()
    assert caches.encoded_tokens == LAYERS * 30 * FRAME


def test_queries_reach_the_statistics_of_their_layer_alone():
    host = CausalInferencePipeline(9, 3)
    with skv.attach(host, config=small_config("quantwm")) as caches:
        host.inference(noise_of(9), [3] * 3, text_of())
        counts = []
        for layer in caches["main"]:
            assert layer.stats is not None
            moment = layer.stats.for_encoding(10)
            assert moment is not None
            counts.append(int(moment.count.flatten()[0]))
    # Two chunks are packed, of three passes each; cross-attention was not counted.
    assert counts == [2 * 3 * 3 * FRAME] * LAYERS


def test_an_untouched_host_comes_back():
    host = CausalInferencePipeline(9, 3)
    before = state_of(host, MODULE)
    with skv.attach(host, config=small_config("quantwm")):
        host.inference(noise_of(9), [3] * 3, text_of())
    after = state_of(host, MODULE)
    before["0..crossattn_cache"] = after["0..crossattn_cache"]  # the host's own
    assert_same_state(before, after)

    def run_with_an_error():
        with skv.attach(host, config=small_config("quantwm")):
            host.inference(noise_of(3), [3], text_of())
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        run_with_an_error()
    again = state_of(host, MODULE)
    again["0..crossattn_cache"] = after["0..crossattn_cache"]
    assert_same_state(after, again)


def test_the_host_runs_as_before_after_the_block():
    host = CausalInferencePipeline(6, 0)
    wanted = run_twice(CausalInferencePipeline(6, 0), [3] * 4)
    with skv.attach(host, config=small_config("qvg")):
        host.inference(noise_of(6), [3] * 2, text_of())
    assert_equal(run_twice(host, [3] * 4), wanted)


def test_a_cache_that_was_allocated_before_is_put_back_with_a_warning():
    host = CausalInferencePipeline(6, 0)
    host.inference(noise_of(3), [3], text_of())
    before = host.kv_cache1
    with (
        pytest.warns(UserWarning, match="kv_cache1 was allocated before"),
        skv.attach(host, preset="bf16") as caches,
    ):
        assert host.kv_cache1 is None
    assert host.kv_cache1 is before
    assert len(caches.notes) == 1


def test_no_second_layer_is_dense_at_a_time():
    """What the run allocates beyond an untouched host's run, without its cache."""
    frames, chunks = 18, [3] * 6
    plain, packed = (CausalInferencePipeline(-1, 0) for _ in range(2))
    noise, text = noise_of(frames), text_of()
    window = frames * FRAME * HEADS * DIM * 2 * 2  # K and V of one layer, BF16

    def run_packed():
        with skv.attach(packed, config=small_config("rtn")) as caches:
            packed.inference(noise, chunks, text)
            resident.append(caches.nbytes)

    resident: list[int] = []
    dense = peak_bytes(lambda: plain.inference(noise, chunks, text))
    cache = LAYERS * 21 * FRAME * HEADS * DIM * 2 * 2
    used = peak_bytes(run_packed)
    # One dense window, the packed cache, one chunk's joined source and FP32 copies of it.
    chunk = 3 * FRAME * HEADS * DIM * 4
    assert used < dense - cache + resident[0] + window + 6 * chunk


def test_wider_windows():
    host = CausalInferencePipeline(-1, 0)
    wide = CausalInferencePipeline(40, 0)
    chunks = [3] * 10
    wanted = wide.inference(noise_of(30), chunks, text_of())
    with skv.attach(host, preset="bf16", window_frames=40):
        got = host.inference(noise_of(30), chunks, text_of())
    assert torch.equal(got, wanted)
    assert host.generator.model.blocks[1].self_attn.max_attention_size == 21 * FRAME
    for wrong in (0, True, 2.5):
        with (
            pytest.raises(ConfigError, match="window_frames is"),
            skv.attach(host, preset="bf16", window_frames=wrong),
        ):
            pass
    with (
        pytest.raises(ConfigError, match=r"local_attn_size is 6.*leave the option out"),
        skv.attach(CausalInferencePipeline(6, 0), preset="bf16", window_frames=40),
    ):
        pass


def test_a_changed_host_is_refused_before_anything_happens():
    host = CausalInferencePipeline(6, 0)
    del host.generator.model.blocks[0].self_attn.max_attention_size
    before = state_of(host, MODULE)
    with (
        pytest.raises(HostError, match=r"Self-Forcing: got .*without 'max_attention_size'.*docs"),
        skv.attach(host),
    ):
        pass
    assert_same_state(before, state_of(host, MODULE))


def test_options_and_presets_are_checked_first():
    host = CausalInferencePipeline(6, 0)
    before = state_of(host, MODULE)
    for wrong in ({"windows": 3}, {"preset": "quantmw"}, {"adapter": "cog"}, {"config": 3}):
        with pytest.raises(ConfigError), skv.attach(host, **wrong):
            pass
    with skv.attach(host), pytest.raises(HostError, match="attached already"):  # noqa: SIM117
        with skv.attach(host):
            pass
    assert_same_state(before, state_of(host, MODULE))


def test_an_unknown_host_is_named():
    message = r"a builtins.dict, which no adapter knows.*self-forcing"
    with pytest.raises(HostError, match=message), skv.attach({}):
        pass
