"""The SANA-WM refiner in the real diffusers package: a sink and a history that grows by copies."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.hosts.packages import require

require("diffusers", "transformers")

import steadykv as skv  # noqa: E402
from steadykv.errors import HostError  # noqa: E402
from tests.hosts import sana_wm_refiner as host  # noqa: E402
from tests.hosts.checks import (  # noqa: E402
    QUANTIZING,
    assert_ledger_is_real,
    assert_same_state,
    peak_bytes,
    small_config,
    state_of,
)
from tests.hosts.sana_wm_refiner import DIM, FRAME, HEADS, LAYERS  # noqa: E402

MODULE = sys.modules[host.SanaWMRefinerKVCache.__module__]


@pytest.fixture(scope="module")
def pipeline():
    return host.pipeline_of(host.model_of())


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": 9, "last": 2},
        {"blocks": 9, "sink_size": 2, "kv_max_frames": 7},  # the history is no multiple of blocks
        {"blocks": 4, "block_size": 2},
        {"blocks": 4, "kv_max_frames": 1},  # the history is never trimmed
    ],
)
def test_bf16_is_bit_identical_in_two_runs(pipeline, options):
    wanted = [host.run(pipeline, seed=seed, **options) for seed in (1, 2)]
    with skv.attach(pipeline, preset="bf16") as caches:
        got = [host.run(pipeline, seed=seed, **options) for seed in (1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert list(caches.branches) == ["sink", "history"]


@pytest.mark.parametrize("rope", ["split", "interleaved"])
def test_the_model_can_be_attached_instead_of_the_pipeline(rope):
    pipeline = host.pipeline_of(host.model_of(rope_type=rope, gated_attn=True))
    wanted = host.run(pipeline, 5)
    with skv.attach(pipeline.transformer, preset="bf16"):
        assert torch.equal(host.run(pipeline, 5), wanted)


@pytest.mark.parametrize("method", QUANTIZING)
def test_get_concatenate_store_packs_only_the_new_block(pipeline, method):
    wanted = host.run(pipeline, 10)
    with skv.attach(pipeline, config=small_config(method)) as caches:
        got = host.run(pipeline, 10)
        assert_ledger_is_real(caches)
    assert not torch.equal(got, wanted)
    assert torch.isfinite(got).all()
    for sink, history in zip(caches["sink"], caches["history"], strict=True):
        assert sink.encoded_tokens == FRAME
        assert history.encoded_tokens == 30 * FRAME
        # Ten frames are attended; the block that they begin in is not over.
        assert history.spans() == [(20 * FRAME, 30 * FRAME)]
        assert history.held() == [(18 * FRAME, 30 * FRAME)]
        assert history.status().dense_tokens == sink.status().dense_tokens == 0


def test_trimming_touches_no_bytes(pipeline):
    cache = host.SanaWMRefinerKVCache(LAYERS)
    with skv.attach(pipeline, config=small_config("qvg")) as caches:
        inject(pipeline.transformer, cache, "capture_pre_rope")
        layer = cache.get(1)
        blocks = [[host.normal(1, 3 * FRAME, HEADS * DIM, seed=s) for s in (n, -n)] for n in (1, 2)]
        layer.store_history(*blocks[0])
        layer.store_history(
            *(torch.cat(x, 1) for x in zip(layer.get_history(), blocks[1], strict=True))
        )
        side = caches["history"][1]
        before = [segment.data for segment in side.keys.segments]
        k, v = layer.get_history()
        layer.store_history(k[:, -5 * FRAME :].clone(), v[:, -5 * FRAME :].clone())
        assert [segment.data for segment in side.keys.segments] == before
        assert side.spans() == [(FRAME, 6 * FRAME)]
        for read, kept in zip(layer.get_history(), (k, v), strict=True):
            assert torch.equal(read, kept[:, FRAME:])
        assert side.encoded_tokens == 6 * FRAME
        # Something else than the end of what is held is stored, whole.
        layer.store_history(k[:, : 2 * FRAME], v[:, : 2 * FRAME])
        assert side.held() == [(0, 2 * FRAME)]
        layer.clear()
        assert layer.get_history() is None
        assert side.held() == []


def inject(model, cache, mode, frames=1):
    """One pass over zeros."""
    count = frames * FRAME
    rotary = model.build_rotary_emb_for_absolute_positions(
        batch_size=1, frame_positions=list(range(frames)), height=host.SIDE, width=host.SIDE,
        device="cpu", fps=24.0,
    )  # fmt: skip
    cache.sink_pe = rotary
    x = host.normal(1, count, 8, seed=3)
    return model(
        hidden_states=x, encoder_hidden_states=host.normal(1, 6, 32, seed=4),
        timestep=torch.zeros(1, count), video_rotary_emb=rotary, kv_cache=cache,
        kv_cache_mode=mode, return_dict=False,
    )[0]  # fmt: skip


def test_queries_meet_the_sink_before_rope_and_the_history_after_it(pipeline, monkeypatch):
    seen = []
    original = MODULE.dispatch_attention_fn

    def attention(q, k, v, **kwargs):
        if k.shape[1] != 6:  # not of text
            seen.append(q)
        return original(q, k, v, **kwargs)

    monkeypatch.setattr(MODULE, "dispatch_attention_fn", attention)
    before_rope = []
    norms = [block.attn1.norm_q for block in pipeline.transformer.transformer_blocks]
    hooks = [n.register_forward_hook(lambda m, a, out: before_rope.append(out)) for n in norms]
    with skv.attach(pipeline, config=small_config("quantwm")) as caches:
        host.run(pipeline, 3)
    for hook in hooks:
        hook.remove()
    passes = 1 + 3 * 4  # the sink, then three steps and a clean pass over each block
    assert len(seen) == len(before_rope) == passes * LAYERS

    def moment(queries):
        q = torch.cat(queries, 1).unflatten(2, (HEADS, -1))[0].float()
        return torch.einsum("shd,she->hde", q, q) / q.shape[0]

    for number in range(LAYERS):
        found = caches["sink"][number].stats.for_encoding(9)
        assert found.count.flatten().tolist() == [FRAME] * HEADS
        torch.testing.assert_close(found.moment[0], moment([before_rope[number]]))
        found = caches["history"][number].stats.for_encoding(9)
        assert found.count.flatten().tolist() == [3 * 4 * 3 * FRAME] * HEADS
        rotated = [q.flatten(2) for q in seen[LAYERS + number :: LAYERS]]
        torch.testing.assert_close(found.moment[0], moment(rotated))


def test_an_untouched_host_comes_back(pipeline):
    before = state_of(pipeline, pipeline.transformer, MODULE)
    with skv.attach(pipeline, config=small_config("quantwm")):
        host.run(pipeline, 2)
        assert len(pipeline.transformer._forward_pre_hooks) == 1
    assert_same_state(before, state_of(pipeline, pipeline.transformer, MODULE))

    def fail():
        with skv.attach(pipeline, config=small_config("quantwm")):
            host.run(pipeline, 2, kv_max_frames="many")

    with pytest.raises(ValueError, match="many"):
        fail()
    assert_same_state(before, state_of(pipeline, pipeline.transformer, MODULE))


def test_what_is_read_between_passes_catches_no_queries(pipeline):
    """The pipeline reads the history to append to it; the next attention may be another one."""
    cache = host.SanaWMRefinerKVCache(LAYERS)
    with skv.attach(pipeline, config=small_config("quantwm")) as caches:
        inject(pipeline.transformer, cache, "capture_pre_rope")
        cache.get(0).get_history()
        inject(pipeline.transformer, cache, "capture_pre_rope")
        assert list(caches.branches) == ["sink"]
        inject(pipeline.transformer, cache, "inject")
        assert list(caches.branches) == ["sink", "history"]


def test_an_earlier_cache_is_refused_and_stays_readable(pipeline):
    cache = host.SanaWMRefinerKVCache(LAYERS)
    with skv.attach(pipeline, config=small_config("rtn")):
        inject(pipeline.transformer, cache, "capture_pre_rope")
        cache.get(0).store_sink(*cache.get(0).get_captured_pre_rope())
    assert cache.get(0).get_sink()[0].shape == (1, FRAME, HEADS * DIM)
    with skv.attach(pipeline, config=small_config("rtn")):  # noqa: SIM117
        with pytest.raises(HostError, match="kv_cache of an earlier video or block"):
            inject(pipeline.transformer, cache, "inject")


def test_a_cache_that_is_filled_already_is_taken_over(pipeline):
    model = pipeline.transformer
    cache = host.SanaWMRefinerKVCache(LAYERS)
    inject(model, cache, "capture_pre_rope")
    for number in range(LAYERS):
        layer = cache.get(number)
        layer.store_sink(*layer.get_captured_pre_rope())
        layer.store_history(*(host.normal(1, 2 * FRAME, HEADS * DIM, seed=s) for s in (6, 7)))
    wanted = inject(model, cache, "inject")
    plain = cache.get(0)
    with skv.attach(pipeline, preset="bf16"):
        assert torch.equal(inject(model, cache, "inject"), wanted)
    assert plain.get_sink() is plain.get_history() is None  # its memory is free


def test_no_second_layer_is_dense_at_a_time():
    layers, blocks = 6, 3
    pipeline = host.pipeline_of(host.model_of(layers=layers))
    options = {"kv_max_frames": 7, "size": (8, 8), "sigmas": (0.9, 0.0)}  # one step
    frame = 64 * HEADS * DIM * 2 * 2  # K and V of a layer, BF16
    resident = []

    def run_packed():
        with skv.attach(pipeline, config=small_config("rtn")) as caches:
            host.run(pipeline, blocks, **options)
            resident.append(caches.nbytes)

    dense = peak_bytes(lambda: host.run(pipeline, blocks, **options))
    used = peak_bytes(run_packed)
    # The untouched run holds six frames and the sink in all layers. Ours holds them packed, and for
    # a moment one layer's: what was read, what it is joined to, and what it is compared with.
    assert resident[0] < layers * 7 * frame / 3
    assert used < dense - layers * 7 * frame + resident[0] + 3 * 7 * frame


@pytest.mark.parametrize("preset", ["bf16", "rtn"])
def test_frames_of_880_tokens(preset):
    pipeline = host.pipeline_of(host.model_of(layers=1, heads=1))
    size = {"size": (22, 40), "kv_max_frames": 5}
    wanted = host.run(pipeline, 3, **size)
    with skv.attach(pipeline, preset=preset) as caches:
        got = host.run(pipeline, 3, **size)
    assert torch.equal(got, wanted) == (preset == "bf16")
    history = caches["history"][0]
    assert history.geometry.frame_tokens == 880
    assert history.spans() == [(5 * 880, 9 * 880)]
    assert preset == "bf16" or history.encoded_tokens == 9 * 880


def test_a_changed_host_is_refused_before_anything_happens():
    model = host.model_of(layers=1)
    del model.transformer_blocks[0].attn1.heads
    before = state_of(model, MODULE)
    with (
        pytest.raises(HostError, match=r"SANA-WM refiner: got .*attn1 without 'heads'.*docs"),
        skv.attach(model),
    ):
        pass
    assert_same_state(before, state_of(model, MODULE))
    model.forward = lambda hidden_states, cache: None
    with pytest.raises(HostError, match="expected an argument 'kv_cache' and"):  # noqa: SIM117
        with skv.attach(model):
            pass


def error(got, wanted):
    return float((got - wanted).float().norm() / wanted.float().norm())


@pytest.mark.parametrize("rope", ["split", "interleaved"])
def test_keys_of_the_history_before_rope(rope, monkeypatch):
    """Each head turns in its own way; the history is trimmed, a second video has other frames."""
    pipeline = host.pipeline_of(host.model_of(rope_type=rope))
    wanted = host.run(pipeline, 6, kv_max_frames=7)
    runs = {
        "bf16": (skv.preset("bf16"), "before_rope"),
        "dense": (small_config("rtn", sink_keep=200), "before_rope"),
        "after": (small_config("rtn", bits=4), "after_rope"),
        "before": (small_config("rtn", bits=4), "before_rope"),
    }
    errors = {}
    for name, (config, place) in runs.items():
        before = state_of(pipeline, MODULE)
        with skv.attach(pipeline, config=config, store_keys=place) as caches:
            errors[name] = error(host.run(pipeline, 6, kv_max_frames=7), wanted)
            # Every block's tokens once, and the sink.
            tokens = 6 * host.BLOCK * FRAME
            assert all(layer.progress.newest == tokens for layer in caches["history"])
            host.run(pipeline, 3, seed=4, size=(6, 6))
            held = caches["history"][0].held()[-1]
        assert_same_state(before, state_of(pipeline, MODULE))
        if name in ("dense", "before"):
            assert caches.turns["history"].pieces[-1][1] == held[1]
            size = 8 * HEADS * DIM // 2 * sum(b - a for a, b in caches.turns["history"].pieces)
            assert caches.ledger().parts["turns"] == size
    assert errors["bf16"] == 0 < errors["dense"] < 0.02
    assert 0 < errors["before"] < 1.5 * errors["after"]
    turn = "steadykv.hosts.before_rope.KeyTurns.turn"
    monkeypatch.setattr(turn, lambda self, keys, ranges: keys)
    with skv.attach(pipeline, config=runs["dense"][0], store_keys="before_rope"):
        assert error(host.run(pipeline, 6, kv_max_frames=7), wanted) > 2 * errors["dense"]


def test_queries_meet_a_history_before_rope_before_it_too(pipeline, monkeypatch):
    seen, normed = [], []
    original = skv.LayerCache.observe_queries
    monkeypatch.setattr(
        skv.LayerCache, "observe_queries", lambda self, q: seen.append(q) or original(self, q)
    )
    norms = [block.attn1.norm_q for block in pipeline.transformer.transformer_blocks]
    hooks = [n.register_forward_hook(lambda m, a, out: normed.append(out)) for n in norms]
    config = small_config("quantwm")
    with skv.attach(pipeline, config=config, store_keys="before_rope"):
        host.run(pipeline, 3)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(normed)
    assert all(torch.equal(a.flatten(2), b) for a, b in zip(seen, normed, strict=True))
