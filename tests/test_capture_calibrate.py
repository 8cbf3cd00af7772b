"""Calibrations of captures: all of a layer's spans, the frame of its keys, where it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from steadykv.cache import KVCache
from steadykv.capture import CaptureFile, Selection, calibrate, open_capture
from steadykv.codecs import Calibration
from steadykv.config import CacheConfig, parse_method, preset
from steadykv.errors import CalibrationError, ConfigError, PayloadError, SteadyKVError
from steadykv.evaluation.world_capture import capture_world

from .codecs import sample_tokens
from .worlds import tiny_episodes, tiny_world

CONFIG = preset("kvquant_calibrated")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> CaptureFile:
    """Two walks, both layers, two spans of 144 tokens, keys before RoPE."""
    path = tmp_path_factory.mktemp("capture") / "walks.safetensors"
    capture_world(
        tiny_world(), tiny_episodes(2), path, Selection(queries=0), frames=9, seed=3,
        key_rope="pre",
    )  # fmt: skip
    return open_capture(path)


@pytest.fixture(scope="module")
def fitted(file: CaptureFile) -> Calibration:
    return calibrate(file, CONFIG)


def grids_equal(one: Calibration, other: Calibration) -> bool:
    return one.grids.keys() == other.grids.keys() and all(
        torch.equal(t, other.grids[key].tensors[name])
        for key, grid in one.grids.items()
        for name, t in grid.tensors.items()
    )


def test_every_span_and_walk_of_a_layer_counts(file: CaptureFile, fitted: Calibration) -> None:
    by_hand: dict[tuple[int, str], list[torch.Tensor]] = {}
    for cell in file.cells:
        span = file.load(cell)
        by_hand.setdefault((cell[0], "key"), []).append(span.k)
        by_hand.setdefault((cell[0], "value"), []).append(span.v)
    assert grids_equal(fitted, Calibration.fit(by_hand, CONFIG))
    assert list(fitted.grids) == [(0, "key"), (0, "value"), (1, "key"), (1, "value")]
    assert {grid.tokens for grid in fitted.grids.values()} == {2 * 2 * 144}


def test_it_knows_where_it_came_from(fitted: Calibration, tmp_path: Path) -> None:
    assert fitted.key_rope == "pre"
    rows = [{"episode": f"walk-{number}", "seed": 3} for number in (0, 1)]
    assert fitted.source == {
        "file": "walks.safetensors",
        "model": "steadykv.world",
        "layers": [0, 1],
        "heads": [0, 1],
        "rows": rows,
    }
    fitted.save(tmp_path / "c")
    loaded = Calibration.load(tmp_path / "c")
    assert (loaded.key_rope, loaded.source) == (fitted.key_rope, fitted.source)
    assert grids_equal(loaded, fitted)
    moved = fitted.to("meta")
    assert (moved.key_rope, moved.source) == (fitted.key_rope, fitted.source)


@pytest.mark.parametrize(
    ("method", "sides"),
    [("kvquant_calibrated:bf16", {"key"}), ("qvg:kvquant_calibrated", {"value"})],
)
def test_a_side_that_needs_none_gets_none(file: CaptureFile, method: str, sides: set[str]) -> None:
    found = calibrate(file, parse_method(method))
    assert {tensor for _, tensor in found.grids} == sides


def test_layers_are_reported_and_held_one_by_one(file: CaptureFile) -> None:
    steps: list[tuple[int, int, int]] = []
    calibrate(file, CONFIG, on_layer=lambda *step: steps.append(step))
    assert steps == [(0, 2, 0), (1, 2, 1)]


def test_a_users_own_file_has_no_frame(tmp_path: Path) -> None:
    k = sample_tokens()
    save_file({"k": k, "v": k + 1}, str(tmp_path / "own"))
    found = calibrate(open_capture(tmp_path / "own"), CONFIG)
    assert (found.key_rope, found.source) == (None, {"file": "own"})
    assert grids_equal(found, Calibration.fit({(0, "key"): k, (0, "value"): k + 1}, CONFIG))
    for key_rope in ("pre", "post", None):
        found.check(CONFIG, (0,), 2, 64, key_rope)


def test_what_cannot_be_calibrated_is_refused(file: CaptureFile, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'qvg' needs no calibration; expected"):
        calibrate(file, preset("qvg"))
    k = sample_tokens()
    save_file({"k": k, "v": k * float("inf")}, str(tmp_path / "bad"))
    with pytest.raises(PayloadError, match="NaN or Inf"):
        calibrate(open_capture(tmp_path / "bad"), CONFIG)
    with pytest.raises(ConfigError, match="key_rope is 'both'"):
        Calibration.fit({(0, "key"): k}, CONFIG, key_rope="both")


# --- whether it fits ------------------------------------------------------------------------------


def test_a_calibration_that_does_not_fit_is_refused_by_name(fitted: Calibration) -> None:
    keys_only = CacheConfig(CONFIG.keys, preset("bf16").values)
    values_only = CacheConfig(preset("qvg").keys, CONFIG.values)
    fitted.check(CONFIG, range(2), 2, 32, "pre")
    fitted.check(CONFIG, range(2), 2, 32)
    fitted.check(values_only, range(2), 2, 32, "post")  # the frame is one of keys
    cases: list[tuple[str, CacheConfig, range, int, int, str | None]] = [
        ("keys before their rotary embedding, got keys after it", CONFIG, range(2), 2, 32, "post"),
        ("--key-rope post", keys_only, range(2), 2, 32, "post"),
        ("layer 2 key: .* without it", CONFIG, range(3), 2, 32, "pre"),
        ("layer 0 key: .* 2 heads of 32, got 3 of 32", CONFIG, range(2), 3, 32, "pre"),
        ("layer 0 value: .* got 2 of 64", values_only, range(2), 2, 64, "pre"),
        (
            r"calibrated for bits=2 \(got 3\)",
            preset("kvquant_calibrated", bits=3),
            range(2),
            2,
            32,
            "pre",
        ),
    ]
    for words, config, layers, heads, head_dim, key_rope in cases:
        with pytest.raises(CalibrationError, match=words) as error:
            fitted.check(config, layers, heads, head_dim, key_rope)
        assert "expected" in str(error.value)
        assert "\n" not in str(error.value)
    KVCache(2, 2, 32, 48, CONFIG, calibration=fitted)  # a cache does not know its keys' frame


@pytest.mark.parametrize(
    "change", [{"key_rope": "both"}, {"key_rope": 1}, {"source": []}, {"source": None}], ids=str
)
def test_headers_that_lie_are_refused(
    fitted: Calibration, change: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "c"
    fitted.save(path)
    with safe_open(str(path), framework="pt") as opened:
        header = json.loads(opened.metadata()["steadykv.calibration"])
    tensors = load_file(path)
    save_file(tensors, path, {"steadykv.calibration": json.dumps(header | change)})
    with pytest.raises(CalibrationError, match=r"has key_rope .* and source .*: expected"):
        Calibration.load(path)
    for name in ("key_rope", "source"):  # as an earlier release wrote it
        del header[name]
    save_file(tensors, path, {"steadykv.calibration": json.dumps(header)})
    loaded = Calibration.load(path)
    assert (loaded.key_rope, loaded.source) == (None, {})


def test_a_file_that_cannot_be_written_is_said(fitted: Calibration, tmp_path: Path) -> None:
    with pytest.raises(SteadyKVError, match=r"could not write .*; free space or choose another"):
        fitted.save(tmp_path / "no" / "folder")
    fitted.save(tmp_path / "c")
    assert (tmp_path / "c").stat().st_mode & 0o444 == 0o444, "others may read what any file lets"
