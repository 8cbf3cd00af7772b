"""`python -m benchmarks.memory_long` on made-up walks and a tiny world."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import memory_long
from benchmarks.memory_walks import load_moments, read_tracks
from steadykv.errors import ConfigError
from steadykv.evaluation.aggregate import capped_psnr
from steadykv.evaluation.metrics.drift import frame_statistics
from steadykv.evaluation.metrics.lpips import lpips_by_frame
from tests.recorded_walks import walks_of_a_tiny_world


@pytest.fixture
def walks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return walks_of_a_tiny_world(tmp_path, monkeypatch)


def run(walks: Path, *more: str) -> list[dict[str, str]]:
    path = walks / "rows.csv"
    shared = ["--prime", "30", "--frames", "24", "--part", "8", "--stride", "4"]
    shared += ["--threads", str(torch.get_num_threads()), "--csv", str(path)]
    memory_long.main(["--walks", str(walks), *shared, *more])
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_part_of_every_walk_is_held_against_the_true_frames(
    walks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = walks / "raw"
    rows = run(walks, "--methods", "kivi", "--windows", "12", "48", "--videos", str(raw),
               "--count", "3", "--batch", "2")  # fmt: skip
    said = capsys.readouterr().out
    assert "NOT AS PLANNED" not in said
    assert "3 walks; differences are from bf16 with 12 frames" in said
    assert "| kivi | 48 |" in said
    values = {
        (r["walk"], r["method"], r["window"], r["measure"], r["part"]): float(r["value"])
        for r in rows
    }
    assert len(values) == len(rows) == 3 * 4 * 3 * (3 + 9)
    moments = memory_long.beginnings(walks, 30, 24, 3)
    _, true = load_moments(moments, 24)
    for one, clip in zip(moments, true, strict=True):
        assert one.start == 30  # a walk's own beginning
        for method, window in (("bf16", "12"), ("kivi", "48")):
            made = torch.from_numpy(np.load(raw / f"{one.track.name}-{method}-{window}-0.npy"))
            assert torch.equal(made[:30], clip[:30])
            for part in (0, 8, 16):
                inside = slice(30 + part, 38 + part)
                key = one.track.name, method, window
                error = (made[inside].double() - clip[inside].double()).square().mean().numpy()
                assert values[*key, "psnr", str(part)] == pytest.approx(float(capped_psnr(error)))
                distance = lpips_by_frame(clip[inside][::4], made[inside][::4]).mean()
                assert values[*key, "lpips", str(part)] == pytest.approx(float(distance), rel=1e-5)
                own, real = (frame_statistics(v[inside]) for v in (made, clip))
                ratio = own["gradient_energy"].mean() / real["gradient_energy"].mean()
                assert values[*key, "gradient_energy", str(part)] == pytest.approx(float(ratio))
            assert values[*key, "mean_red.excess", "0"] == 0


def test_windows_of_equal_bytes_are_those_of_the_memory_benchmark(walks: Path) -> None:
    rows = run(walks, "--methods", "kivi", "--windows", "12", "--equal-bytes", "--count", "1")
    (plain,) = {int(r["resident_bytes"]) for r in rows if r["method"] == "bf16"}
    ((window, size),) = {
        (int(r["window"]), int(r["resident_bytes"])) for r in rows if r["method"] == "kivi"
    }
    assert window > 12
    assert size <= plain


def test_seeds_are_averaged_before_walks() -> None:
    rows = [
        {"method": "bf16", "window": 24, "walk": walk, "seed": seed, "measure": "psnr", "part": 0,
         "value": value, "resident_bytes": 1}
        for walk, seed, value in (("a", 0, 10.0), ("a", 1, 20.0), ("b", 0, 30.0))
    ]  # fmt: skip
    assert memory_long.by_walk(rows, "psnr", 0) == {("bf16", 24): {"a": 15.0, "b": 30.0}}
    assert memory_long.by_walk(rows, "psnr", 8) == {}


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--frames", "90"], "got 90 frames, expected 120"),
        (["--windows", "25"], "--windows: got 25"),
        (["--against", "qvg", "24"], "--against: got qvg 24"),
    ],
)
def test_what_cannot_run_is_refused(walks: Path, more: list[str], word: str) -> None:
    assert len(read_tracks(walks)) == 4
    with pytest.raises(ConfigError, match=word):
        run(walks, "--methods", "bf16", "--windows", "12", *more)


@pytest.mark.parametrize("more", [["--stride", "3"], ["--stride", "0"], ["--part", "32"]])
def test_parts_that_do_not_come_out_even_are_refused(walks: Path, more: list[str]) -> None:
    with pytest.raises(SystemExit):
        run(walks, *more)
