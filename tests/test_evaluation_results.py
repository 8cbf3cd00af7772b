"""Windows, result rows and files: schema, atomicity, and what a full disk leaves behind."""

from __future__ import annotations

import csv
import json
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steadykv.cache import KVCache
from steadykv.config import CachePolicy, preset
from steadykv.errors import ConfigError, PayloadError, SteadyKVError
from steadykv.evaluation import results
from steadykv.evaluation.protocol import (
    FrameWindow,
    Protocol,
    ShiftOptions,
    first_packed_frame,
    frame_windows,
)
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.results import (
    REQUIRED_FIELDS,
    check_rows,
    read_metrics,
    write_bytes_atomically,
    write_csv,
    write_json,
    write_metrics,
)
from steadykv.evaluation.rollouts import BatchCost, join_costs, run_batch

from .worlds import tiny_episodes, tiny_world

SCHEMA = Path(__file__).resolve().parent.parent / "docs" / "results-schema.md"


def sample_row(**changes: Any) -> dict[str, Any]:
    """A row with a plausible value for every field."""
    examples = {int: 7, float: 1.25, str: "qvg", dict: {}, list: []}
    row = {name: examples[types[0]] for name, types in REQUIRED_FIELDS.items()}
    row |= {
        "version": 1,
        "psnr_windows": {"6-8": 34.5, "6-50": 31.0},
        "psnr_by_frame": [100.0, 33.0, 31.5],
        "intervals": {"psnr": [33.5, 35.5], "psnr_by_frame": [[99.0, 100.0]] * 3},
        "configuration": {"seeds": [0, 1], "cache": {"name": "qvg"}},
    }
    return row | changes


# --- windows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (CachePolicy(span_chunks=2), 6),
        (CachePolicy(span_chunks=1), 3),
        (CachePolicy(span_chunks=4), 12),
        (CachePolicy(span_chunks=2, recent_keep=1), 9),
        (CachePolicy(span_chunks=2, sink_keep=3), 9),
        (CachePolicy(span_chunks=1, sink_keep=1), 3),
        (CachePolicy(span_chunks=2, window_frames=12, sink_frames=3), 3),
    ],
)
def test_first_packed_frame_is_the_one_the_cache_packs_before(
    policy: CachePolicy, expected: int
) -> None:
    import torch

    assert first_packed_frame(policy, chunk_frames=3) == expected
    cache = KVCache(1, 1, 32, 48, preset("kivi").replace(policy=policy))
    chunk = torch.randn(1, 3 * 48, 1, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    start = 0
    while not cache.ledger().packed_tokens:
        cache[0].write(chunk, chunk, start)
        cache.commit()
        start += 3 * 48
    assert start // 48 == expected


def test_windows_grow_from_the_first_packed_frame() -> None:
    labels = [window.label for window in frame_windows(6, 51, 3)]
    assert labels == ["6-8", "6-11", "6-23", "6-47", "6-50"]
    assert [window.label for window in frame_windows(6, 12, 3)] == ["6-8", "6-11"]
    assert frame_windows(6, 7, 3) == (FrameWindow(6, 7),)
    assert [window.label for window in frame_windows(30, 99, 3)][-2:] == ["30-47", "30-98"]
    with pytest.raises(ConfigError, match="at least 3 more"):
        frame_windows(6, 6, 3)


def test_a_protocol_that_means_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown method 'qvq'"):
        Protocol(("bf16", "qvq"))
    for bad in (
        {"methods": ()},
        {"methods": ("qvg", "qvg")},
        {"methods": ("floor",)},
        {"seeds": ()},
        {"frames": 0},
        {"max_batch": 0},
        {"paired_against": "kivi"},
        {"shift": ShiftOptions(moving="kivi")},
    ):
        with pytest.raises(ConfigError):
            Protocol(**({"methods": ("qvg", "bf16")} | bad))


def test_every_method_gets_the_policy_and_keeps_what_is_its_own() -> None:
    policy = CachePolicy(span_chunks=2, window_frames=24)
    methods = ("qvg", "quantwm:bf16", "kivi_recent", "bf16")
    configs = Protocol(methods, policy=policy, centroids=32).configurations()
    assert {config.policy.span_chunks for config in configs.values()} == {2}
    assert {config.policy.window_frames for config in configs.values()} == {24}
    assert configs["qvg"].keys.centroids == configs["quantwm:bf16"].keys.centroids == 32
    assert (configs["qvg"].policy.recent_keep, configs["kivi_recent"].policy.recent_keep) == (0, 1)
    assert configs["quantwm:bf16"].values.is_dense
    assert [config.name for config in configs.values()] == list(methods)


# --- files ----------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [sample_row(), sample_row(method="floor", top1_shift=None, intervals=None)]
    path = write_metrics(tmp_path, rows)
    assert path == tmp_path / "metrics.json"
    assert read_metrics(path) == read_metrics(tmp_path) == rows
    assert sorted(os.listdir(tmp_path)) == ["metrics.csv", "metrics.json"]
    new_file = tmp_path / "other"
    new_file.touch()
    assert path.stat().st_mode == new_file.stat().st_mode


def test_csv_has_one_flat_row_per_method(tmp_path: Path) -> None:
    other = sample_row(method="floor", top1_shift=None, intervals=None)
    write_csv(tmp_path / "rows.csv", [sample_row(), other])
    with open(tmp_path / "rows.csv", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert first["psnr_windows.6-8"] == "34.5"
    assert (first["intervals.psnr.low"], first["intervals.psnr.high"]) == ("33.5", "35.5")
    assert first["configuration.cache.name"] == "qvg"
    assert first["configuration.seeds"] == "0 1"
    assert "psnr_by_frame" not in first
    assert (second["top1_shift"], second["intervals.psnr.low"]) == ("", "")


@pytest.mark.parametrize("name", REQUIRED_FIELDS)
def test_a_row_without_a_field_or_of_another_type_is_refused(name: str) -> None:
    row = sample_row()
    del row[name]
    with pytest.raises(PayloadError, match=f"lacks {name}"):
        check_rows([row])
    with pytest.raises(PayloadError, match=f"has {name} = True; expected"):
        check_rows([sample_row(**{name: True})])


def test_every_field_is_documented() -> None:
    text = SCHEMA.read_text(encoding="utf-8")
    missing = [name for name in REQUIRED_FIELDS if f"`{name}`" not in text]
    assert not missing
    for name in (results.METRICS_FILE, results.ROLLOUTS_FILE, results.SHIFT_FILE):
        assert f"`{name}`" in text


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match="could not read"):
        read_metrics(tmp_path)
    path = tmp_path / "metrics.json"
    for text, message in (
        ("{", "is no JSON"),
        ("{}", "expected a list"),
        ("[1]", "expected an object"),
        (json.dumps([sample_row(version=99)]), "version 99; expected 1"),
    ):
        path.write_text(text)
        with pytest.raises(PayloadError, match=message):
            read_metrics(path)


def test_infinite_and_undefined_numbers_never_reach_a_file(tmp_path: Path) -> None:
    for number in (float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="finite numbers"):
            write_json(tmp_path / "x.json", {"psnr": number})
    assert os.listdir(tmp_path) == []


# --- what goes wrong ------------------------------------------------------------------------


@pytest.fixture
def largest_file() -> Iterator[Any]:
    """Lets the system refuse files over a size: what a full disk or a quota looks like."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_earlier_file(tmp_path: Path, largest_file: Any) -> None:
    path = tmp_path / "metrics.json"
    write_bytes_atomically(path, b"earlier")
    largest_file(4096)
    with pytest.raises(SteadyKVError, match=r"could not write .*5,000 bytes.*free space") as e:
        write_bytes_atomically(path, bytes(5000))
    largest_file(resource.RLIM_INFINITY)
    assert "\n" not in str(e.value)
    assert path.read_bytes() == b"earlier"
    assert os.listdir(tmp_path) == ["metrics.json"]  # no temporary file is left behind


def test_ctrl_c_in_the_middle_of_a_write_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rollouts.json"
    write_bytes_atomically(path, b"earlier")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_bytes_atomically(path, b"later")
    assert path.read_bytes() == b"earlier"
    assert os.listdir(tmp_path) == ["rollouts.json"]


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(SteadyKVError, match="No such file or directory"):
        write_json(tmp_path / "absent" / "x.json", [])


def test_environment_names_versions_and_device() -> None:
    import torch

    found = environment("cpu")
    assert found["torch"] == torch.__version__
    assert found["device"] == "cpu"
    assert json.loads(json.dumps(found)) == found
    commit = found["commit"]
    assert commit is None or len(commit.removesuffix("-modified")) == 40


def test_provenance_names_the_version_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadykv.__version__", "9.9.9")
    assert environment("cpu")["steadykv"] == "9.9.9"


def test_every_configuration_field_is_documented() -> None:
    text = SCHEMA.read_text()
    for name in ("ssim_channels", "dropped_dense_tokens", "psnr_ceiling_db", "first_packed_frame"):
        assert f"`{name}`" in text or f"`configuration.{name}`" in text


def test_parts_add_up_however_they_are_rounded() -> None:
    def batch(parts: dict[str, int]) -> BatchCost:
        held = sum(parts.values()) or 20
        return BatchCost(3, 2.0, 16.0 * held, held, held, 16.0 * held, held, 1.0, 0, parts)

    batches = [batch({"codes": 10, "scales": 7, "open": 5}), batch({"codes": 11, "dense": 8})]
    cost = join_costs(preset("qvg"), batches)
    assert cost.resident_parts == {"codes": 4, "scales": 1, "open": 1, "dense": 1}
    assert sum(cost.resident_parts.values()) == cost.resident_bytes == round(41 / 6)
    # A run begun by a release that kept no parts, and resumed: what is known of half is not shown.
    assert join_costs(preset("qvg"), [*batches, batch({})]).resident_parts is None
    assert cost.bits_per_element_mean is None
    known = [
        replace(one, bits_per_element_mean=mean)
        for one, mean in zip(batches, (3.0, 2.0), strict=True)
    ]
    assert join_costs(preset("qvg"), known).bits_per_element_mean == 2.5
    assert join_costs(preset("qvg"), [*known, batches[0]]).bits_per_element_mean is None


@pytest.mark.parametrize("method", ["qvg", "steady"])
def test_mean_bits_are_those_that_chunks_have_read(method: str) -> None:
    """The end of a shorter rollout is what the next chunk of a longer one reads."""
    world, walks = tiny_world(), tiny_episodes(2)
    chunk = world.config.chunk_frames
    config = preset(method, centroids=8, span_chunks=2, window_frames=world.config.window_frames)
    first = first_packed_frame(config.policy, chunk)

    def cost_of(frames: int) -> BatchCost:
        return run_batch(world, walks, [0, 0], config, frames=frames, first_packed_frame=first)[1]

    read = [cost_of(frames).bits_per_element for frames in range(first - chunk, 6 * chunk, chunk)]
    cost = cost_of(6 * chunk)
    assert cost.bits_per_element_mean == pytest.approx(sum(read) / len(read))
    assert (cost.bits_per_element_mean > cost.bits_per_element + 0.1) is (method == "steady")
