"""The comparison runner end to end on a tiny world: numbers, order, files, interruptions."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steadykv.errors import ConfigError, NonFiniteError, SteadyKVError
from steadykv.evaluation.aggregate import (
    RolloutRecord,
    complete_grid,
    paired_difference,
    summarise,
)
from steadykv.evaluation.collector import ComparisonResult
from steadykv.evaluation.comparison import run_comparison
from steadykv.evaluation.metrics import flicker_error, psnr, psnr_by_frame, ssim_by_frame
from steadykv.evaluation.protocol import FrameWindow, ShiftOptions
from steadykv.evaluation.results import as_read, check_rows, read_metrics
from steadykv.evaluation.rollouts import run_batch
from steadykv.world import rollout
from steadykv.world.weights import place
from tests.worlds import broken_world, tiny_episodes, tiny_world

METHODS = ("bf16", "qvg", "quantwm", "bf16:qvg")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[ComparisonResult, Path, list[Any]]:
    """Two episodes with two seeds, three of the four rollouts in one batch."""
    folder = tmp_path_factory.mktemp("run") / "out"
    progress: list[Any] = []
    torch.manual_seed(11)
    state = torch.get_rng_state()
    result = run_comparison(
        tiny_world(),
        tiny_episodes(2),
        METHODS,
        seeds=(0, 5),
        frames=12,
        centroids=8,
        max_batch=3,
        keep_videos=4,
        paired_against="qvg",
        resamples=200,
        out_dir=folder,
        on_progress=lambda *event: progress.append(event),
    )
    assert torch.equal(state, torch.get_rng_state())
    return result, folder, progress


def by_method(result: ComparisonResult) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in result.rows}


def test_rows_are_complete_and_equal_the_files(
    finished: tuple[ComparisonResult, Path, list[Any]],
) -> None:
    result, folder, _ = finished
    assert check_rows(result.rows) == read_metrics(folder)
    assert sorted(os.listdir(folder)) == [
        "metrics.csv",
        "metrics.json",
        "progress.json",
        "rollouts.json",
        "token_shift.json",
    ]
    assert [row["method"] for row in result.rows] == [*METHODS, "floor"]
    for row in result.rows:
        assert row["n_rollouts"] == row["planned_rollouts"] == 4
        assert (row["n_episodes"], row["n_seeds"]) == (2, 2)
        assert row["configuration"]["first_packed_frame"] == 6
        assert row["configuration"]["headline_window"] == "6-14"
        assert list(row["psnr_windows"]) == ["6-8", "6-11", "6-14"]
    records = json.loads((folder / "rollouts.json").read_text())
    assert len(records) == 5 * 4
    assert records == as_read([record.to_dict() for record in result.records])


def test_numbers_are_those_of_the_videos(
    finished: tuple[ComparisonResult, Path, list[Any]],
) -> None:
    result, _, _ = finished
    reference = result.videos["bf16"]
    assert reference.shape == (4, 15, 32, 48, 3)
    for method in ("qvg", "quantwm", "bf16:qvg"):
        row, video = by_method(result)[method], result.videos[method]
        assert row["psnr"] == pytest.approx(psnr(reference, video, 6).mean().item())
        early = psnr(reference, video, 6, 9).mean().item()
        assert row["psnr_windows"]["6-8"] == pytest.approx(early)
        assert row["ssim"] == pytest.approx(ssim_by_frame(reference, video)[:, 6:].mean().item())
        flicker = flicker_error(reference, video, 6).mean().item()
        assert row["flicker_error"] == pytest.approx(flicker)
        curve = psnr_by_frame(reference, video).clamp(max=100.0).mean(dim=0)
        assert row["psnr_by_frame"] == pytest.approx(curve.tolist())
        # Until frame 6 nothing was packed: the same noise gives the same pixels, bit for bit.
        assert row["first_changed_frame"] == 6
        assert torch.equal(reference[:, :6], video[:, :6])
        assert row["psnr_by_frame"][:6] == [100.0] * 6


def test_the_reference_is_perfect_and_the_floor_is_close(
    finished: tuple[ComparisonResult, Path, list[Any]],
) -> None:
    rows = by_method(finished[0])
    bf16, floor = rows["bf16"], rows["floor"]
    assert (bf16["psnr"], bf16["ssim"], bf16["flicker_error"]) == (100.0, 1.0, 0.0)
    assert (bf16["top1_shift"], bf16["identical_rollouts"]) == (0.0, 4)
    assert bf16["bits_per_element"] == 16.0
    assert bf16["compression"] == pytest.approx(1.0, rel=1e-3)  # a few counters beside the tokens
    assert bf16["first_changed_frame"] is None
    assert floor["psnr"] > rows["quantwm"]["psnr"] > rows["qvg"]["psnr"]
    assert floor["top1_shift"] is None
    assert floor["configuration"]["attention"] == "math"


def test_costs_are_per_rollout_and_counted_from_bytes(
    finished: tuple[ComparisonResult, Path, list[Any]],
) -> None:
    rows = by_method(finished[0])
    # 15 frames of 24 tokens, 2 layers, 2 heads of 32, keys and values, 2 bytes each.
    tokens = 15 * 24 * 2 * 2 * 32 * 2 * 2
    assert rows["bf16"]["resident_bytes"] == pytest.approx(tokens, rel=1e-3)
    for method in ("qvg", "bf16:qvg"):
        ratio = rows["bf16"]["resident_bytes"] / rows[method]["resident_bytes"]
        assert rows[method]["compression"] == pytest.approx(ratio, rel=1e-3)
        assert rows[method]["peak_bytes"] > rows[method]["resident_bytes"]
    for row in rows.values():
        assert sum(row["resident_parts"].values()) == row["resident_bytes"]
    assert rows["bf16"]["resident_parts"].get("codes", 0) == 0
    assert rows["quantwm"]["resident_parts"]["query_moment"] > 0
    # Two bits a number of the packed tokens of one rollout, keys and values.
    assert rows["qvg"]["resident_parts"]["codes"] % (24 * 2 * 2 * 32 * 2 // 4) == 0
    qvg, split = rows["qvg"], rows["bf16:qvg"]
    assert split["bits_per_element"] == pytest.approx((16 + qvg["bits_per_element"]) / 2)
    assert (split["keys"], split["values"]) == ("bf16", "qvg")
    assert (rows["quantwm"]["keys"], rows["quantwm"]["values"]) == ("quantwm", "qvg4")
    assert all(row["seconds"] > 0 and row["batch_rollouts"] == 3 for row in rows.values())


def test_shift_is_ordered_and_the_example_names_its_rollout(
    finished: tuple[ComparisonResult, Path, list[Any]],
) -> None:
    result, folder, _ = finished
    rows = by_method(result)
    assert rows["qvg"]["top1_shift"] > rows["quantwm"]["top1_shift"] > 0
    assert rows["bf16:qvg"]["top1_shift"] == 0.0
    stored = json.loads((folder / "token_shift.json").read_text())
    assert stored == result.shift
    assert stored["trajectory_is_reference"] is True
    assert stored["example"]["episode"] in ("walk-0", "walk-1")
    assert stored["example"]["seed"] in (0, 5)
    assert set(stored["example"]["selected"]) == {*METHODS}
    assert "chosen example" in stored["example"]["chosen"]


def test_intervals_and_pairs(finished: tuple[ComparisonResult, Path, list[Any]]) -> None:
    result, _, _ = finished
    rows = by_method(result)
    for row in rows.values():
        intervals = row["intervals"]
        for name in ("psnr", "ssim", "flicker_error"):
            low, high = intervals[name]
            assert low - 1e-9 <= row[name] <= high + 1e-9
        assert len(intervals["psnr_by_frame"]) == 15
        assert intervals["psnr_windows"].keys() == row["psnr_windows"].keys()
    assert rows["qvg"]["paired"] is None
    paired = rows["quantwm"]["paired"]
    assert paired["against"] == "qvg"
    assert paired["psnr"]["mean"] == pytest.approx(rows["quantwm"]["psnr"] - rows["qvg"]["psnr"])
    assert paired["psnr"]["interval"][0] > 0
    backwards = result.paired("qvg", "quantwm")
    assert backwards["psnr"]["mean"] == pytest.approx(-paired["psnr"]["mean"])
    assert "top1_shift" not in result.paired("floor", "qvg")
    with pytest.raises(ConfigError, match="no rollout of 'kivi'"):
        result.paired("kivi", "qvg")


def test_progress_only_grows_and_ends_at_its_total(
    finished: tuple[ComparisonResult, Path, list[Any]],
) -> None:
    _, _, progress = finished
    done = [event[0] for event in progress]
    totals = {event[1] for event in progress}
    # 2 batches x (reference, shift, qvg, quantwm, bf16:qvg, floor) x 4 chunks.
    assert totals == {2 * 6 * 4}
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, 48)
    assert {event[2].split(",")[0] for event in progress} == {
        "bf16",
        "token shift",
        "qvg",
        "quantwm",
        "bf16:qvg",
        "floor",
    }


def small_run(**options: Any) -> ComparisonResult:
    settings: dict[str, Any] = {"frames": 6, "centroids": 8, "shift": None, "floor": False}
    return run_comparison(tiny_world(), tiny_episodes(2), ("qvg", "kivi"), **settings | options)


def test_videos_arrive_as_they_are_made_and_only_those_kept() -> None:
    seen: list[tuple[str, str, int]] = []

    def on_video(method: str, episode: str, seed: int, video: torch.Tensor) -> None:
        assert video.shape == (9, 32, 48, 3)
        seen.append((method, episode, seed))

    result = small_run(keep_videos=1, on_video=on_video, max_batch=1)
    assert seen == [(method, "walk-0", 0) for method in ("bf16", "qvg", "kivi")]
    assert {method: len(videos) for method, videos in result.videos.items()} == {
        "bf16": 1,
        "qvg": 1,
        "kivi": 1,
    }
    assert result.shift is None
    assert all(row["top1_shift"] is None for row in result.rows)


def test_batches_do_not_change_the_noise() -> None:
    together, apart = (small_run(max_batch=size, keep_videos=2) for size in (2, 1))
    # Matrix products of another size may round differently; another noise would be far off.
    assert bool((psnr(together.videos["bf16"], apart.videos["bf16"]) > 60).all())
    assert not torch.equal(together.videos["bf16"][0], together.videos["bf16"][1])


def test_ctrl_c_keeps_every_finished_method(tmp_path: Path) -> None:
    def interrupt(done: int, total: int, label: str) -> None:
        if label.startswith("kivi, rollouts 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_run(max_batch=1, out_dir=tmp_path / "out", on_progress=interrupt)
    rows = {row["method"]: row for row in read_metrics(tmp_path / "out")}
    assert {name: row["n_rollouts"] for name, row in rows.items()} == {"qvg": 2, "kivi": 1}
    assert all(row["planned_rollouts"] == 2 for row in rows.values())
    assert rows["qvg"]["intervals"] is not None
    assert rows["kivi"]["intervals"] is None  # one episode says nothing about others
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


def test_a_full_disk_is_one_clear_error_and_earlier_results_stay(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk(done: int, total: int, label: str) -> None:
        if label.startswith("kivi"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))

    try:
        with pytest.raises(SteadyKVError, match=r"could not write .*free space"):
            small_run(max_batch=2, out_dir=tmp_path, on_progress=fill_disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [row["method"] for row in read_metrics(tmp_path)] == ["qvg"]
    assert len(json.loads((tmp_path / "rollouts.json").read_text())) == 2


def test_bad_requests_fail_before_anything_runs(tmp_path: Path) -> None:
    def never(done: int, total: int, label: str) -> None:
        raise AssertionError("a rollout was started")

    world, episodes = tiny_world(), tiny_episodes(2)
    with pytest.raises(ConfigError, match="unknown method"):
        run_comparison(world, episodes, ["qvq"], on_progress=never)
    with pytest.raises(ConfigError, match="more frames"):
        run_comparison(world, episodes, ["qvg"], frames=3, on_progress=never)
    with pytest.raises(ConfigError, match="none twice"):
        run_comparison(world, episodes.select([0, 0]), ["qvg"], on_progress=never)
    (tmp_path / "metrics.json").write_text("[]")
    with pytest.raises(ConfigError, match="already holds"):
        small_run(out_dir=tmp_path, on_progress=never)
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(SteadyKVError, match="could not make"):
        small_run(out_dir=blocked / "out", on_progress=never)


def test_a_shorter_shift_rollout_sees_the_same_trajectory() -> None:
    result = small_run(frames=9, shift=ShiftOptions(frames=6))
    assert result.shift is not None
    assert (result.shift["frames"], result.shift["trajectory_is_reference"]) == (6, True)
    assert result.rows[0]["configuration"]["shift"]["frames"] == 6


def test_nan_is_found_at_the_end_of_its_chunk() -> None:
    with pytest.raises(NonFiniteError, match=r"got [\d,]+ non-finite .* chunk 1 with bf16, expect"):
        run_comparison(broken_world(), tiny_episodes(1), ["qvg"], frames=6, centroids=8)


def test_nan_is_found_in_the_probed_rollout_too() -> None:
    """The world breaks between the reference and the probe."""
    world, broken = tiny_world(), broken_world()

    def break_it(done: int, total: int, label: str) -> None:
        if label.startswith("token shift"):
            world.load_state_dict(broken.state_dict())

    with pytest.raises(NonFiniteError, match="chunk 1 with the token shift"):
        run_comparison(
            world, tiny_episodes(1), ["qvg"], frames=6, centroids=8, on_progress=break_it
        )


def test_a_throwaway_rollout_comes_before_the_first_timed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []

    def watched(world: Any, rows: Any, cache: Any, frames: int, *more: Any, **options: Any) -> Any:
        seen.append((len(rows), frames))
        return rollout(world, rows, cache, frames, *more, **options)

    monkeypatch.setattr("steadykv.evaluation.rollouts.rollout", watched)
    small_run()
    assert seen == [(1, 3), (2, 6), (2, 6), (2, 6)]


def test_tokens_that_left_unpacked_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "dropped_dense_tokens" not in small_run().rows[0]["configuration"]

    def dropping(*arguments: Any, **options: Any) -> Any:
        video, cost = run_batch(*arguments, **options)
        return video, replace(cost, dropped_dense_tokens=48)

    monkeypatch.setattr("steadykv.evaluation.comparison.run_batch", dropping)
    assert small_run().rows[0]["configuration"]["dropped_dense_tokens"] == 48


def test_a_probe_that_ends_before_anything_is_packed_finds_no_shift() -> None:
    result = small_run(shift=ShiftOptions(frames=3))
    assert [row["top1_shift"] for row in result.rows] == [None, None]


@pytest.mark.cuda
def test_a_comparison_runs_on_cuda() -> None:
    result = run_comparison(
        place(tiny_world(), "cuda", torch.bfloat16),
        tiny_episodes(2),
        METHODS,
        frames=12,
        centroids=8,
        keep_videos=2,
    )
    rows = by_method(result)
    assert check_rows(result.rows)
    assert rows["bf16"]["environment"]["device"] == "cuda"
    assert rows["qvg"]["first_changed_frame"] == 6
    assert rows["qvg"]["top1_shift"] > rows["quantwm"]["top1_shift"] > 0
    assert result.shift is not None
    assert result.shift["trajectory_is_reference"] is True
    assert result.videos["qvg"].device.type == "cpu"


# --- statistics of records ------------------------------------------------------------------


def record(method: str, episode: str, seed: int, mse: float) -> RolloutRecord:
    return RolloutRecord(method, episode, seed, (0.0, mse, mse), (1.0, 0.9, 0.8), (mse, 0.0))


def test_identical_rollouts_count_as_the_ceiling() -> None:
    records = [record("qvg", "a", 0, 0.0), record("qvg", "b", 0, 65.025)]
    summary = summarise(records, [FrameWindow(1, 3)], confidence=0.95, resamples=200)
    assert summary["psnr"] == pytest.approx((100.0 + 30.0) / 2)
    assert summary["identical_rollouts"] == 1
    assert summary["first_changed_frame"] == 1
    assert summary["flicker_error"] == pytest.approx(65.025 / 4)
    assert np.isfinite(summary["intervals"]["psnr"]).all()


def test_only_rollouts_that_both_finished_are_paired() -> None:
    first = [record("x", e, s, 10.0) for e in "abc" for s in (0, 1)]
    second = [record("y", e, s, 20.0) for e in "abc" for s in (0, 1)][:-1]
    episodes, seeds, whole = complete_grid(second)
    assert (episodes, seeds, len(whole)) == (["a", "b"], [0, 1], 4)
    paired = paired_difference(first, second, [FrameWindow(1, 3)], resamples=200)
    assert paired["psnr"]["mean"] == pytest.approx(10 * np.log10(2))
    assert paired["psnr"]["interval"] == pytest.approx([10 * np.log10(2)] * 2)
    assert paired_difference(first, [], [FrameWindow(1, 3)]) == {}
