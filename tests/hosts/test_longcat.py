"""LongCat-Video: one span per segment, packed in its clean pass and unpacked a layer at a time."""

from __future__ import annotations

import sys

import pytest
import torch

import steadykv as skv
from steadykv.errors import HostError
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
from tests.hosts.longcat import (
    DIM,
    HEADS,
    LAYERS,
    LongCatVideoPipeline,
    long_video,
    noise_of,
    text_of,
)

MODULE = sys.modules[LongCatVideoPipeline.__module__]
FRAME = 16
SEGMENTS = [4] * 9


def watched(host):
    return (host, host.dit, MODULE)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("segments", [SEGMENTS, [1, 3, 4, 2, 4, 7, 4, 4, 4]])
def test_bf16_is_bit_identical(segments, offload):
    options = {"offload_kv_cache": offload}
    plain, host = LongCatVideoPipeline(), LongCatVideoPipeline()
    wanted = [long_video(plain, segments, seed, **options) for seed in (1, 2)]
    with skv.attach(host, preset="bf16") as caches:
        got = [long_video(host, segments, seed, **options) for seed in (1, 2)]
    assert_equal(got, wanted)
    assert list(caches.branches) == ["main"]


@pytest.mark.parametrize("method", [*QUANTIZING, "kivi", "kivi_recent"])
def test_every_segment_is_packed_once(method):
    host = LongCatVideoPipeline()
    wanted = long_video(LongCatVideoPipeline(), SEGMENTS)
    with skv.attach(host, config=small_config(method)) as caches:
        got = long_video(host, SEGMENTS)
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
    assert (
        caches.encoded_tokens == LAYERS * 4 * FRAME
    )  # of the newest segment, which was packed once
    for layer in caches["main"]:
        assert layer.status().packed_tokens == 4 * FRAME
        assert [segment.payload is not None for segment in layer.keys.segments] == [True]
    assert not torch.equal(got[-1], wanted[-1])
    assert torch.isfinite(got[-1]).all()


def test_every_read_of_a_segment_gives_the_same_numbers_in_fresh_memory():
    """Trap 8: a caller may edit what it read."""
    host = LongCatVideoPipeline()
    with skv.attach(host, config=small_config("quantwm")):
        long_video(host, [4])
        first = host.kv_cache_dict.get(1, None)
        before = [tensor.clone() for tensor in first]
        first[0].zero_()
        assert_equal(host.kv_cache_dict[1], before)
        assert first[0].shape == (1, HEADS, 4 * FRAME, DIM)
        assert host.kv_cache_dict.get(LAYERS, None) is None
        with pytest.raises(KeyError):
            host.kv_cache_dict[LAYERS]
        assert_equal([host.kv_cache_dict[1]], [dict(host.kv_cache_dict.items())[1]])
        assert len(list(host.kv_cache_dict.values())) == len(host.kv_cache_dict) == LAYERS


def test_a_segment_is_encoded_with_the_queries_of_its_own_clean_pass():
    """One span only: without them its keys would never be weighed."""
    host = LongCatVideoPipeline()
    seen = []
    hook = host.dit.blocks[1].attn.q_norm.register_forward_hook(lambda m, i, q: seen.append(q))
    with skv.attach(host, config=small_config("quantwm")) as caches:
        long_video(host, [4, 3], seed=3)
        moments = [layer.stats for layer in caches["main"]]
    hook.remove()
    clean = [q for q in seen if q.shape[0] == 1]
    assert [q.shape[2] for q in clean] == [4 * FRAME, 3 * FRAME]
    for number, stats in enumerate(moments):
        assert stats is not None
        moment = stats.for_encoding(0)
        assert moment is not None
        assert moment.count.flatten().tolist() == [3 * FRAME] * HEADS
        if number == 1:
            q = clean[1][0].float()
            wanted = q.transpose(1, 2) @ q / q.shape[1]
            torch.testing.assert_close(moment.moment[0], wanted, rtol=1e-3, atol=1e-3)
    assert not notes_of(caches)


def test_queries_change_what_is_stored():
    keys = []
    for first_span in ("own", "paper"):
        host = LongCatVideoPipeline()
        config = small_config("quantwm")
        with skv.attach(host, config=config):
            if first_span == "paper":
                for block in host.dit.blocks:
                    del block.attn.q_norm.forward  # as a host that normalizes elsewhere
                with pytest.warns(UserWarning, match="did not call q_norm"):
                    long_video(host, [4])
            else:
                long_video(host, [4])
            keys.append(host.kv_cache_dict[1][0])
    assert not torch.equal(*keys)


def test_a_segment_that_was_replaced_is_not_read_silently():
    host = LongCatVideoPipeline()
    with skv.attach(host, config=small_config("qvg")):
        long_video(host, [4])
        old = host.kv_cache_dict
        long_video(host, [4], seed=1)
        with pytest.raises(HostError, match="segment 1 is read while segment 2 is held"):
            old.get(0)


def test_a_dictionary_that_was_made_elsewhere_is_packed_where_it_is_stored():
    """As after `torch.compile` had traced the blocks without the hooks."""
    host = LongCatVideoPipeline()
    k, v = (torch.randn(1, HEADS, 4 * FRAME, DIM).bfloat16() for _ in range(2))
    with skv.attach(host, config=small_config("qvg")) as caches:
        host._update_kv_cache_dict(dict.fromkeys(range(LAYERS), (k, v)))
        assert caches.encoded_tokens == LAYERS * 4 * FRAME
        got = host._get_kv_cache_dict().get(2, None)
        error = (got[0].float() - k.float()).norm() / k.float().norm()
        assert 0.01 < float(error) < 1
        host._update_kv_cache_dict(None)
        assert host._get_kv_cache_dict() is None


def test_no_second_layer_is_dense_at_a_time():
    plain, packed = LongCatVideoPipeline(1), LongCatVideoPipeline(1)
    frames, size = 13, (12, 12)
    latents, text = noise_of(frames + 1, size=size), text_of()
    window = frames * 144 * HEADS * DIM * 2 * 2  # K and V of one layer, BF16
    resident = []

    def run_packed():
        with skv.attach(packed, config=small_config("rtn")) as caches:
            packed.generate_vc(latents, frames, text)
            resident.append(caches.nbytes)

    dense = peak_bytes(lambda: plain.generate_vc(latents, frames, text))
    used = peak_bytes(run_packed)
    # Without the dense dictionary; with the packed one and one layer that was just unpacked.
    assert used <= dense - LAYERS * window + resident[0] + window
    assert resident[0] < LAYERS * window / 3


@pytest.mark.parametrize("size", [(22, 40), (30, 52), (60, 78)])
def test_whole_frames_of_real_resolutions(size):
    """Trap 3: 880, 1560 and 4680 tokens are no multiples of 64."""
    host = LongCatVideoPipeline(1)
    with skv.attach(host, config=small_config("quantwm", group_size=32)) as caches:
        host.generate_vc(noise_of(2, size=size), 1, text_of())
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
        assert caches["main"][0].geometry.frame_tokens == size[0] * size[1]


def test_another_resolution_gets_another_cache():
    host = LongCatVideoPipeline(1)
    with skv.attach(host, config=small_config("qvg")) as caches:
        host.generate_vc(noise_of(5), 4, text_of())
        host.generate_vc(noise_of(5, size=(6, 4)), 4, text_of())
        assert caches["main"][0].held() == [(0, 4 * 24)]
        assert_ledger_is_real(caches)
    assert list(caches.branches) == ["main"]


def test_an_untouched_host_comes_back():
    host = LongCatVideoPipeline()
    before = state_of(*watched(host))
    with skv.attach(host, config=small_config("quantwm")):
        long_video(host, [4, 4])
    assert_same_state(before, state_of(*watched(host)))

    def run_with_an_error():
        with skv.attach(host, config=small_config("quantwm")):
            long_video(host, [4])
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        run_with_an_error()
    assert_same_state(before, state_of(*watched(host)))
    assert_equal(long_video(host, [4, 4]), long_video(LongCatVideoPipeline(), [4, 4]))


def test_a_dictionary_from_before_is_put_back():
    host = LongCatVideoPipeline()
    long_video(host, [4])
    before = host.kv_cache_dict
    with skv.attach(host, preset="bf16"):
        long_video(host, [4])
    assert host.kv_cache_dict is before


def test_a_compiled_model_gives_the_same():
    """Trap 11: our functions are left out of compilation."""
    torch.compiler.reset()
    plain, host = LongCatVideoPipeline(1), LongCatVideoPipeline(1)
    config = small_config("quantwm")
    with skv.attach(plain, config=config):
        wanted = long_video(plain, [2, 2])
    host.dit = torch.compile(host.dit, backend="eager")
    with skv.attach(host, config=config) as caches:
        got = long_video(host, [2, 2])
        assert_packed_once(caches["main"])
    assert_equal(got, wanted)
    assert not notes_of(caches)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda host: delattr(host.dit.blocks[1].attn, "q_norm"), "without 'q_norm'"),
        (lambda host: setattr(host.dit, "blocks", 3), "expected ModuleList"),
        (
            lambda host: setattr(host, "_cache_clean_latents", lambda latents: None),
            "expected an argument 'cond_latents'",
        ),
    ],
)
def test_a_changed_host_is_refused_before_anything_happens(change, message):
    host = LongCatVideoPipeline()
    if message.endswith("ModuleList"):
        del host.dit.blocks
    change(host)
    before = state_of(*watched(host))
    with pytest.raises(HostError, match=rf"LongCat-Video: got .*{message}"), skv.attach(host):
        pass
    assert_same_state(before, state_of(*watched(host)))
