"""What `measure` adds up equals the metrics of whole videos, in memory of one size."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steadykv.errors import ConfigError
from steadykv.evaluation.measure import (
    METRICS,
    Measured,
    MeasureOptions,
    measure,
    measurement_data,
)
from steadykv.evaluation.metrics import flicker_by_step, psnr, psnr_by_frame, ssim_by_frame
from steadykv.evaluation.metrics.lpips import lpips_by_frame
from steadykv.evaluation.metrics.ms_ssim import ms_ssim_by_frame
from steadykv.evaluation.results import to_json
from steadykv.evaluation.video_excerpt import Excerpt, ExcerptOptions, worst_start
from steadykv.evaluation.video_pair import CHUNK_FRAMES, PairOptions, VideoPair
from tests.videos import Frames, moving, noisy, write_video

COUNT = 2 * CHUNK_FRAMES + 3  # the last chunk is a short one
FIRST = moving(COUNT, 162, 170)
SECOND = noisy(FIRST)
SECOND[5] = FIRST[5]  # one frame without any difference
SECOND[9] = np.clip(FIRST[9].astype(int) + 30, 0, 255)  # one that flashes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("videos")
    return write_video(folder / "a.mkv", FIRST), write_video(folder / "b.mkv", SECOND)


def measured(
    a: Path, b: Path, options: MeasureOptions | None = None, **pairing: Any
) -> tuple[Measured, dict[str, Any]]:
    chosen = options or MeasureOptions()
    with VideoPair(a, b, PairOptions(**pairing)) as pair:
        result = measure(pair, chosen)
        return result, measurement_data(result, chosen, pair, command="steadykv measure")


def test_numbers_are_those_of_the_whole_videos(files: tuple[Path, Path]) -> None:
    """Chunks must not show: every number equals the metric of all frames at once."""
    result, data = measured(*files, MeasureOptions(lpips=True, window=7))
    found = {name: np.array(data["by_frame"][name], float) for name in data["by_frame"]}
    assert set(found) >= {"psnr", "ssim", "ms_ssim", "lpips", "flicker_error"}
    assert np.array_equal(found["psnr"], psnr_by_frame(FIRST, SECOND).numpy())
    assert np.array_equal(found["ssim"], ssim_by_frame(FIRST, SECOND, "luma").numpy())
    assert np.array_equal(found["ms_ssim"], ms_ssim_by_frame(FIRST, SECOND).numpy())
    assert found["lpips"] == pytest.approx(lpips_by_frame(FIRST, SECOND).numpy(), abs=1e-6)
    assert np.array_equal(found["flicker_error"], flicker_by_step(FIRST, SECOND).numpy())
    summary = data["summary"]
    assert summary["psnr"] == pytest.approx(float(psnr(FIRST, SECOND)), abs=1e-12)
    assert summary["psnr"] < np.ma.masked_invalid(found["psnr"]).mean() - 1  # the flash counts
    for name in set(found) - {"psnr"}:
        assert summary[name] == pytest.approx(np.nanmean(found[name]), rel=1e-12)
    assert (data["by_frame"]["psnr"][5], found["ssim"][5], found["lpips"][5]) == ("inf", 1, 0)
    assert result.frames == data["frames"] == COUNT
    assert to_json(data)


def test_tails_name_the_worst_frame(files: tuple[Path, Path]) -> None:
    _, data = measured(*files)
    values = np.array(data["by_frame"]["psnr"], float)
    assert data["tails"]["psnr"]["worst_frame"] == 9
    assert data["tails"]["psnr"]["worst"] == values.min()
    flicker = data["tails"]["flicker_error"]
    assert flicker["worst_frame"] in (9, 10)  # into the flash, and out of it
    assert flicker["worst"] == max(data["by_frame"]["flicker_error"])
    # Of 19 frames at most one in twenty may be worse than the quantile: none is.
    assert data["tails"]["ssim"]["quantile"] == min(data["by_frame"]["ssim"])


def test_quantiles_are_values_that_five_per_cent_do_not_reach() -> None:
    result = Measured(0, 25.0, [], [])
    result.series = {
        "mse": array("d", [0.0] * 90 + [1.0] * 10),
        "ssim": array("d", [i / 100 for i in range(100)]),
        "lpips": array("d", [i / 100 for i in range(100)]),
    }
    result.times = array("d", range(100))
    tails = {name: result.tail(name) for name in result.metrics}
    assert tails["ssim"] == {"worst": 0.0, "worst_frame": 0, "quantile": 0.04}
    assert tails["lpips"] == {"worst": 0.99, "worst_frame": 99, "quantile": 0.94}
    worst = 10 * math.log10(255**2)
    assert tails["psnr"] == {
        "worst": pytest.approx(worst), "worst_frame": 90, "quantile": pytest.approx(worst)
    }  # fmt: skip


def test_windows_start_where_the_options_say(files: tuple[Path, Path]) -> None:
    _, data = measured(*files, MeasureOptions(window=4, ms_ssim=False), start=3, end=13)
    bounds = [(window["start"], window["end"]) for window in data["windows"]]
    assert bounds == [(3, 7), (7, 11), (11, 13)]
    for window in data["windows"]:
        start, end = window["start"], window["end"]
        assert window["psnr"] == pytest.approx(float(psnr(FIRST, SECOND, start, end)))
        steps = flicker_by_step(FIRST, SECOND)[max(start, 4) - 1 : end - 1]
        assert window["flicker_error"] == pytest.approx(float(steps.mean()))
    assert data["tails"]["psnr"]["worst_frame"] == 9
    assert len(data["by_frame"]["psnr"]) == 10
    assert len(data["by_frame"]["flicker_error"]) == 9


def test_rows_line_up_with_frames(files: tuple[Path, Path]) -> None:
    result, data = measured(*files, MeasureOptions(ms_ssim=False), start=2)
    rows = result.rows()
    assert [row["frame"] for row in rows] == list(range(2, COUNT))
    assert [row["seconds"] for row in rows] == pytest.approx([i / 10 for i in range(2, COUNT)])
    assert rows[0]["flicker_error"] is None
    assert [row["flicker_error"] for row in rows[1:]] == data["by_frame"]["flicker_error"]
    assert [row["psnr"] for row in rows] == data["by_frame"]["psnr"]
    assert rows[3]["psnr"] == "inf"


@pytest.mark.parametrize("lpips", [False, True])
def test_a_video_against_itself_is_exactly_the_same(files: tuple[Path, Path], lpips: bool) -> None:
    _, data = measured(files[0], files[0], MeasureOptions(lpips=lpips, window=5))
    expected = {"psnr": "inf", "ssim": 1.0, "ms_ssim": 1.0, "flicker_error": 0.0}
    expected |= {"lpips": 0.0} if lpips else {}
    assert {name: data["summary"][name] for name in expected} == expected
    for name, value in expected.items():
        assert set(data["by_frame"][name]) == {value}
        assert all(window[name] == value for window in data["windows"])
        assert data["tails"][name]["worst"] == value
    assert data["notes"] == ["A and B are the same file"]


def test_the_flicker_index_needs_no_reference(files: tuple[Path, Path]) -> None:
    from steadykv.evaluation.metrics import flicker

    _, data = measured(*files)
    for letter, video in zip("ab", (FIRST, SECOND), strict=True):
        first, *between, last = data["by_frame"][f"flicker_index_{letter}"]
        assert (first, last, len(between)) == (None, None, COUNT - 2)
        values = np.array(between)
        whole = flicker.flicker_index(torch.from_numpy(video)).numpy()
        assert values == pytest.approx(whole, rel=1e-6)
    assert data["summary"]["flicker_index_b"] > data["summary"]["flicker_index_a"]


def test_small_frames_leave_out_what_does_not_fit(tmp_path: Path) -> None:
    tiny = write_video(tmp_path / "tiny.mkv", FIRST[:2, :10, :40])
    other = write_video(tmp_path / "other.mkv", SECOND[:2, :10, :40])
    _, data = measured(tiny, other, MeasureOptions(lpips=True))
    assert {"ssim", "ms_ssim", "lpips"}.isdisjoint(data["summary"])
    assert [note.split(" was")[0] for note in data["notes"]][:3] == [
        "SSIM", "MS-SSIM", "LPIPS"
    ]  # fmt: skip


def test_one_frame_has_no_flicker(files: tuple[Path, Path]) -> None:
    _, data = measured(*files, start=4, end=5)
    assert data["summary"]["flicker_error"] is None
    assert data["tails"]["flicker_error"] is None
    assert data["by_frame"]["flicker_error"] == []
    assert isinstance(data["summary"]["psnr"], float)


def test_progress_counts_frames(files: tuple[Path, Path]) -> None:
    calls: list[tuple[int, int, str]] = []
    with VideoPair(*files, PairOptions(end=12)) as pair:
        measure(pair, MeasureOptions(ms_ssim=False), on_progress=lambda *call: calls.append(call))
    assert calls == [(8, 12, "measuring"), (12, 12, "measuring")]


def test_every_metric_is_described() -> None:
    assert {name for name, metric in METRICS.items() if metric.first == 0} == {
        "psnr", "ssim", "ms_ssim", "lpips"
    }  # fmt: skip
    with pytest.raises(ConfigError, match="--window: got 0"):
        MeasureOptions(window=0)


# --- the excerpt of the page ----------------------------------------------------------------


def chunks(excerpt: Excerpt) -> Excerpt:
    for start in range(0, COUNT, 4):
        excerpt.add(FIRST[start : start + 4], SECOND[start : start + 4])
    return excerpt


def test_an_excerpt_has_the_videos_own_pixels() -> None:
    size = FIRST.shape[2], FIRST.shape[1]
    whole = chunks(Excerpt(size))
    assert np.array_equal(whole.videos()[0], FIRST)
    assert np.array_equal(whole.videos()[1], SECOND)
    assert whole.to_dict() == {"start": 0, "frames": COUNT, "width": 170, "height": 162}
    scaled = chunks(Excerpt(size, ExcerptOptions(frames=10, width=85)))
    a, b = scaled.videos()
    assert a.shape == b.shape == (10, 81, 85, 3)
    means = SECOND[:10].reshape(10, 81, 2, 85, 2, 3).astype(float).mean(axis=(2, 4))
    assert np.abs(means - b).max() <= 0.5


@pytest.mark.parametrize(("start", "place"), [(3, 3), (7, 7), (0, 0)])
def test_an_excerpt_begins_where_it_was_asked_to(start: int, place: int) -> None:
    chosen = chunks(Excerpt((170, 162), ExcerptOptions(start=start, frames=5)))
    chosen.settle([0.0] * (COUNT - 1), ("none", "none"))
    assert np.array_equal(chosen.videos()[0], FIRST[place : place + 5])
    assert chosen.to_dict()["start"] == start


def test_an_excerpt_is_read_again_where_it_flickers_most(files: tuple[Path, Path]) -> None:
    """Frames 2 on are compared; the worst step leads into the ninth of them."""
    pairing = PairOptions(start=2)
    excerpt = Excerpt((170, 162), ExcerptOptions(frames=4), pairing)
    excerpt.add(FIRST[2:], SECOND[2:])
    flicker = [0.1] * (COUNT - 3)
    flicker[7] = 0.9
    excerpt.settle(flicker, (str(files[0]), str(files[1])))
    start = excerpt.to_dict()["start"]
    assert start < 2 + 8 < start + 4  # both frames of the step are there
    assert np.array_equal(excerpt.videos()[0], FIRST[start : start + 4])
    assert np.array_equal(excerpt.videos()[1], SECOND[start : start + 4])


def test_the_worst_part_has_the_worst_in_its_middle() -> None:
    flicker = np.full(999, 0.01)
    flicker[499:502] = 0.5
    assert abs(worst_start(flicker, 100) + 50 - 501) <= 1
    assert worst_start(flicker[:50], 100) == 0
    assert worst_start(np.zeros(999), 100) == worst_start([], 1) == 0
    assert worst_start([0.0, 1.0, 0.0], 1) == 2
    assert worst_start([float("nan"), 0.0, 0.0, 0.0, 1.0], 2) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": -1}, "--page-start: got -1"),
        ({"frames": 0}, "--page-frames: got 0"),
        ({"width": 3}, "--page-width: got 3"),
        ({"frames": 10**6}, r"--page-frames: got 1000000, expected at most 8366 of 170 x 162"),
        ({"start": 1}, "--page-start: got 1, expected a frame that is compared: 2 or later"),
        ({"start": 99}, "--page-start: got 99, expected a frame that was compared: 2 to 20"),
    ],
)
def test_excerpts_that_cannot_be(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chunks(Excerpt((170, 162), ExcerptOptions(**options), PairOptions(start=2))).settle(
            [], ("none", "none")
        )


# --- memory ---------------------------------------------------------------------------------

PEAK = """
import resource, sys
from steadykv.evaluation.measure import MeasureOptions, measure
from steadykv.evaluation.video_pair import PairOptions, VideoPair
with VideoPair(sys.argv[1], sys.argv[2], PairOptions()) as pair:
    frames = measure(pair, MeasureOptions(ms_ssim=False)).frames
print(frames, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_bytes(a: Path, b: Path) -> tuple[int, int]:
    """Frames that were measured in a process of its own, and its resident peak."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(a), str(b)], capture_output=True, text=True, check=True
    )
    frames, peak = map(int, done.stdout.split())
    return frames, peak


def test_memory_does_not_depend_on_the_length(tmp_path: Path) -> None:
    """Six times the frames: 70 more of 320 x 192 pixels would be 13 MB a video."""
    loop = moving(2 * CHUNK_FRAMES, 192, 320)
    files: dict[int, tuple[Path, Path]] = {}
    for repeats in (1, 6):
        video: Frames = np.concatenate([loop] * repeats)
        files[repeats] = tuple(  # type: ignore[assignment]
            write_video(
                tmp_path / f"{repeats}-{crf}.mp4", video, codec="libx264",
                pixel_format="yuv420p", options={"crf": crf, "preset": "ultrafast"},
            )
            for crf in ("20", "35")
        )  # fmt: skip
    (few, small), (many, large) = (peak_bytes(*files[repeats]) for repeats in (1, 6))
    assert (few, many) == (len(loop), 6 * len(loop))
    assert abs(large - small) < 8 * 2**20, (small, large)


def test_measure_json_is_what_its_page_needs(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The fields that the schema names, as a reader of the file gets them."""
    _, data = measured(*files)
    read = json.loads(to_json(data))
    assert read["version"] == 1
    for source, path in zip(read["sources"], files, strict=True):
        assert source == {
            "path": str(path), "frames": COUNT, "width": 170, "height": 162, "fps": 10.0,
            "codec": "ffv1", "pixel_format": "bgr0", "rotation": 0,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }  # fmt: skip
    assert (read["frames"], read["fps"], read["command"]) == (COUNT, 10.0, "steadykv measure")
    assert set(read["summary"]) == set(read["by_frame"]) == set(read["tails"])
    assert {"torch", "commit", "device_name"} <= set(read["environment"])
