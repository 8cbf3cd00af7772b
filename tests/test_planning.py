"""`steadykv.plan`: the papers' sizes, the longest video, names as people write them, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

import steadykv as skv
from steadykv.config import PRESETS
from steadykv.hosts.adapter import Adapter
from steadykv.hosts.registry import adapters
from steadykv.planning.catalog import find_gpu, find_model, find_resolution, gpus, models
from steadykv.planning.planner import WEIGHT_BYTES

GIB, MIB = 2**30, 2**20
EVIDENCE = {"tried", "read", "inferred", "assumed"}


# --- the numbers of the papers ----------------------------------------------------------------


def test_longcat_as_in_the_quantwm_paper() -> None:
    """arXiv 2609.26425: 21.709 GiB become 3.625; QVG 6.88 times smaller."""
    found = skv.plan("longcat", condition_frames=73, presets=["bf16", "qvg", "quantwm"])
    assert found.condition_latents == 19
    assert found["bf16"].resident_bytes / GIB == pytest.approx(21.709, rel=1e-4)
    assert found["quantwm"].payload_bytes / GIB == pytest.approx(3.625, rel=1e-4)
    assert found["quantwm"].payload_bytes == 3_892_168_704
    assert found["quantwm"].statistics_bytes == 48 * 32 * (4 * 128**2 + 8)
    assert found["qvg"].payload_bytes == 48 * 70_587_904
    assert found["qvg"].compression == pytest.approx(6.88, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "options", "mib"),
    [
        ("self-forcing", {"frames": 669, "window_latents": 0}, 46_073),
        ("longcat", {"condition_frames": 73}, 22_272),
        ("hy-worldplay", {"frames": 205, "window_latents": 48}, 29_700),
        ("lingbot-v1", {"frames": 957, "resolution": "16:9", "shards": 8}, 35_360),
    ],
)
def test_bf16_sizes_of_quant_videogens_readme(
    model: str, options: dict[str, Any], mib: int
) -> None:
    """Its MB are MiB; the README agrees within 0.2 %."""
    found = skv.plan(model, presets=["bf16"], **options)
    assert found["bf16"].bf16_bytes / MIB == pytest.approx(mib, rel=2e-3)


def test_spans_of_quant_videogens_readme() -> None:
    """One layer, keys and values: 220.45 MiB in 7 spans of 24 latents, 141.18 in 5 of 8.

    The most is held before the seventh span is packed, when six are.
    """
    options: dict[str, Any] = {"frames": 669, "window_latents": 0, "span_chunks": 8}
    found = skv.plan("self-forcing", presets=["qvg"], **options)["qvg"]
    assert found.payload_bytes / 30 / MIB / 6 == pytest.approx(220.45 / 7, rel=1e-4)
    assert found.parts["waiting"] + found.parts["open"] == 24 * 287_539_200
    options = {"frames": 173, "window_latents": 40, "span_chunks": 2}
    found = skv.plan("hy-worldplay", presets=["qvg"], **options)["qvg"]
    assert found.payload_bytes / 30 / MIB == pytest.approx(141.18, abs=0.005)


@pytest.mark.parametrize(
    ("model", "options", "gib"),
    [
        ("causal-forcing", {}, 5.62),
        ("longcat", {}, 4.57),
        ("hy-worldplay", {}, 9.67),
        ("hy-worldplay-8b", {"branches": 1}, 25.71),
        ("hy-worldplay-8b", {}, 51.42),
        ("matrix-game 2", {}, 0.91),
        ("lingbot-v2", {"frames": 117}, 21.42),
        ("longlive", {"frames": 253}, 19.34),
        ("sglang", {"frames": 237}, 53.56),
        ("krea", {}, 3.3),
    ],
)
def test_bf16_sizes_of_the_hosts(model: str, options: dict[str, Any], gib: float) -> None:
    found = skv.plan(model, presets=["bf16"], **options)
    assert found["bf16"].bf16_bytes / GIB == pytest.approx(gib, abs=0.006)


# --- what fits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("self-forcing", {"window_latents": 0}),
        ("anyflow", {"weight_dtype": "int8"}),
        ("lingbot-v1", {"weight_dtype": "fp8"}),
    ],
)
@pytest.mark.parametrize("method", ["bf16", "quantwm"])
def test_the_longest_video_fits_and_the_next_does_not(
    model: str, options: dict[str, Any], method: str
) -> None:
    options = {**options, "gpu": "rtx4090", "presets": [method]}
    row = skv.plan(model, **options)[method]
    assert row.longest_latents
    assert row.longest_frames == 1 + 4 * (row.longest_latents - 1)
    assert row.longest_seconds == row.longest_frames / 16
    longest = skv.plan(model, frames=row.longest_frames, **options)
    assert longest.latents == row.longest_latents
    assert longest[method].fits
    assert not skv.plan(model, frames=row.longest_frames + 1, **options)[method].fits


@pytest.mark.parametrize("model", ["lingbot-v2", "matrix-game-2", "hy-worldplay", "flashdreams"])
def test_behind_the_window_nothing_grows(model: str) -> None:
    """So "any length" may be said after a few chunks."""
    methods = ["kivi", "quantwm"] if model == "flashdreams" else ["kivi_recent", "quantwm"]
    long = [skv.plan(model, frames=n, presets=methods) for n in (1201, 2001)]
    for method in methods:
        peaks = {found[method].cache_peak_bytes for found in long}
        assert len(peaks) == 1
        room = (peaks.pop() + long[0].dense_caches_bytes) / GIB
        just = skv.plan(model, presets=[method], gpu=f"{room + 0.01:.4f}GiB", weights_gib=0)
        less = skv.plan(model, presets=[method], gpu=f"{room - 0.01:.4f}GiB", weights_gib=0)
        assert just[method].longest_latents is None
        assert less[method].longest_latents is not None


def test_a_total_is_the_sum_of_what_is_named() -> None:
    found = skv.plan("lingbot-v2", gpu="a100-80gb", weights_gib=30, other_gib=2.5)
    for row in found.methods:
        assert row.resident_bytes == sum(row.parts.values())
        fixed = found.weights_bytes + found.dense_caches_bytes + found.other_bytes
        assert fixed == 32.5 * GIB + 40 * 512 * 40 * 128 * 4
        assert row.total_bytes == fixed + row.cache_peak_bytes
        assert row.free_bytes == 80 * GIB - row.total_bytes
        beside = max(row.window_bytes, row.encode_bytes)
        assert row.resident_bytes < row.cache_peak_bytes <= row.resident_bytes + beside
        assert row.fits == (row.free_bytes >= 0)
    assert found.weights_from == "given"


def test_a_host_offers_what_its_adapter_does() -> None:
    """By the names that a model and an adapter share."""
    known = {name: a for a in adapters() for name in (a.name, *a.aliases)}
    seen = set()
    for model in models():
        for name in {model.id, *model.aliases} & set(known):
            options = known[name].options
            assert ("packed" in model.attention_options) == ("attention" in options), model.id
            seen.add(known[name].name)
    # Aliases of LongLive 2, SGLang and FastVideo are planned as one of their models.
    assert seen >= {"self-forcing", "matrix-game-2", "lingbot-world", "hy-worldplay", "longlive2"}
    assert sum("packed" in model.attention_options for model in models()) == 6


def test_attention_from_the_packed_cache_needs_no_window() -> None:
    dense, packed = (
        skv.plan("lingbot-v2", presets=["qvg"], resolution="720p", attention=kind)["qvg"]
        for kind in ("dense", "packed")
    )
    window = 2 * 40 * 128 * 2 * 18 * 3600
    assert dense.window_bytes > window
    assert dense.attend_bytes == packed.attend_bytes > 128 * MIB
    assert dense.cache_peak_bytes - packed.cache_peak_bytes > 0.5 * (window - 128 * MIB)


def test_a_host_that_hands_over_everything_holds_it_in_bf16() -> None:
    found = skv.plan("hy-worldplay", presets=["qvg"])["qvg"]
    assert found.handed_over_bytes == found.bf16_bytes
    assert found.cache_peak_bytes > found.handed_over_bytes + found.resident_bytes


def test_branches_and_shards() -> None:
    one = skv.plan("self-forcing", presets=["quantwm"])["quantwm"]
    two = skv.plan("self-forcing", presets=["quantwm"], branches=2)["quantwm"]
    third = skv.plan("self-forcing", presets=["quantwm"], shards=3)["quantwm"]
    assert two.parts == {name: 2 * nbytes for name, nbytes in one.parts.items()}
    assert third.payload_bytes == pytest.approx(one.payload_bytes / 3)


@pytest.mark.parametrize("dtype", WEIGHT_BYTES)
def test_weights_are_an_assumption(dtype: str) -> None:
    found = skv.plan("longcat", presets=["bf16"], weight_dtype=dtype)
    assert found.weights_bytes == int(13.6e9 * WEIGHT_BYTES[dtype])
    assert found.weights_from.startswith("assumed: 13.6e9 parameters (in its name, inferred)")
    own = skv.plan("sana-wm", presets=["bf16"], gpu="h100", parameters=2e9)
    assert own.weights_bytes == 4_000_000_000
    assert "(given)" in own.weights_from


def test_weights_that_do_not_fit_alone_are_named() -> None:
    found = skv.plan("lingbot-v2", gpu="rtx4090")
    assert found.notes[0].startswith("what is not the cache is 2.48 GiB too much by itself")
    assert {row.longest_latents for row in found.methods} == {0}


def test_a_preset_that_a_window_refuses_is_left_out_unless_it_was_named() -> None:
    """Chunks of 21 latents in a window of 21: no chunk can be kept dense for being recent."""
    found = skv.plan("flashdreams", frames=201)
    assert "kivi_recent" not in {row.method for row in found.methods}
    assert found.notes[-1].startswith("left out: kivi_recent (recent_keep=1 with span_chunks=1")
    with pytest.raises(skv.ConfigError, match="recent_keep=1"):
        skv.plan("flashdreams", frames=201, presets=["kivi_recent"])


def test_as_json_and_as_text() -> None:
    found = skv.plan("lingbot-v2", gpu="h200")
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["methods"][0]["fits"] is True
    assert data["model"]["evidence"]["sizes"] == "read"
    assert isinstance(found, skv.Plan)
    text = str(found)
    assert all(row.method in text for row in found.methods)
    assert "(read)" in text
    assert {row.method for row in found.methods} == set(PRESETS) - {"kvquant_calibrated"}
    with pytest.raises(KeyError, match="planned are bf16"):
        found["nope"]


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("lingbot-v2", "lingbot-world-v2-14b"),
        ("LingBot World v2", "lingbot-world-v2-14b"),
        ("longcat", "longcat-video-13.6b"),
        ("LongCat-Video", "longcat-video-13.6b"),
        ("self forcing", "self-forcing-1.3b"),
        ("hy-worldplay", "hy-worldplay-wan-5b"),
        ("HY-World 1.5", "hy-worldplay-wan-5b"),
        ("matrix-game 2", "matrix-game-2-1.3b"),
        ("causal_forcing", "causal-forcing-chunkwise-1.3b"),
    ],
)
def test_models_as_people_write_them(name: str, model: str) -> None:
    assert find_model(name).id == model


@pytest.mark.parametrize("adapter", adapters(), ids=lambda adapter: adapter.name)
def test_what_attach_is_asked_for_can_be_planned(adapter: Adapter) -> None:
    """By every name; FastVideo's Matrix-Game 2 is the same model, whose own adapter offers more."""
    names = {adapter.name, *adapter.aliases} - {"fastvideo-matrix-game-2"}
    found = {find_model(name).id for name in names}
    assert found


def test_every_name_means_one_thing() -> None:
    for things, find in ((models(), find_model), (gpus(), find_gpu)):
        for thing in things:
            assert {find(name).id for name in (thing.id, thing.title, *thing.aliases)} == {thing.id}


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("rtx4090", "rtx4090"), ("RTX 4090", "rtx4090"), ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"), ("A100 80GB", "a100-80gb"), ("h100", "h100"),
        ("H200", "h200"), ("RTX PRO 6000", "rtx-pro-6000"), ("rtx a6000", "a6000"),
    ],
)  # fmt: skip
def test_gpus_as_people_write_them(name: str, gpu: str) -> None:
    assert find_gpu(name).id == gpu


@pytest.mark.parametrize(
    ("size", "mib"), [(24, 24576), ("24", 24576), ("47.5 GiB", 48640), ("24GB", 22888)]
)
def test_a_gpu_may_be_a_size(size: str | float, mib: int) -> None:
    assert find_gpu(size).mib == mib


@pytest.mark.parametrize(
    ("model", "text", "resolution"),
    [
        ("lingbot-v2", None, "480x832"), ("lingbot-v2", "480p", "480x832"),
        ("lingbot-v2", "832x480", "480x832"), ("lingbot-v2", "480*832", "480x832"),
        ("lingbot-v2", "720p", "720x1280"), ("lingbot-v2", "480p 16:9", "480p 16:9"),
        ("longcat", "720p", "768x1280"), ("hy-worldplay", "720p", "704x1280"),
        ("matrix-game-2", "360p", "352x640"),
    ],
)  # fmt: skip
def test_resolutions_as_people_write_them(model: str, text: str | None, resolution: str) -> None:
    assert find_resolution(find_model(model), text) == resolution


def test_every_number_says_how_sure_it_is() -> None:
    assert len(models()) == 31
    for model in models():
        assert set(model.evidence) == {"structure", "sizes", "parameters", "fps"}
        assert set(model.evidence.values()) <= EVIDENCE
        assert model.default_resolution in model.frame_tokens
        assert skv.plan(model.id)["bf16"].bf16_bytes > 0
    for gpu in gpus():
        assert gpu.source.startswith("https://")


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "lingbot-v3"}, "model is 'lingbot-v3': .* such as lingbot-world-v2-14b"),
        ({"model": "zzz"}, "model is 'zzz': .*steadykv plan` lists them"),
        ({"gpu": "a100"}, "gpu is 'a100': .*a100-40gb.* or a100-80gb|a100-80gb or a100-40gb"),
        ({"gpu": 0}, "above 0"),
        ({"resolution": "1080p"}, "resolution is '1080p': expected 480x832 or 768x1280"),
        ({"frames": 0}, "frames is 0: expected an integer from 1 on"),
        ({"frames": 9.5}, "frames is 9.5"),
        ({"presets": []}, "presets is empty"),
        ({"presets": ["qvg", "qvg"]}, "'qvg' twice"),
        ({"presets": ["nope"]}, "unknown method 'nope'"),
        ({"presets": ["kvquant_calibrated"]}, "size of its own: .*'kvquant'"),
        ({"shards": 7}, "shards is 7: expected a divisor of 32 heads"),
        ({"attention": "flash"}, "attention is 'flash': expected dense or packed"),
        (
            {"attention": "packed"},
            "'packed', which .* longcat-.* does not offer: .*'dense'",
        ),
        ({"window_latents": 3}, "longcat-video-13.6b has no window.* condition_frames instead"),
        ({"model": "anyflow", "sink_latents": 1}, "anyflow-far-14b has no window"),
        ({"model": "matrix-game-2", "window_latents": 0}, "without a window: .* its own 6"),
        ({"weight_dtype": "int3"}, "weight_dtype is 'int3'"),
        ({"weights_gib": -1}, "weights_gib is -1: expected a number from 0 on"),
        ({"other_gib": float("inf")}, "other_gib is inf"),
        ({"model": "self-forcing", "condition_frames": 73}, "leave it out"),
        ({"model": "sana-wm", "gpu": "h100"}, "parameters of sana-wm-refiner are not known"),
        ({"model": "lingbot-v2", "span_chunks": 8}, "span_chunks is 8"),
    ],
)
def test_a_mistake_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(skv.ConfigError, match=message) as error:
        skv.plan(**{"model": "longcat", **options})
    assert "\n" not in str(error.value)
