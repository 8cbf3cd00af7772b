"""`python -m benchmarks.horizon` on a tiny world: its rows, and frames that are taken again."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import horizon
from steadykv.evaluation.metrics import psnr
from steadykv.game import LEFT, RIGHT
from tests.worlds import TINY, tiny_episodes, tiny_world


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world and the walks of the tests in place of the shipped ones."""
    monkeypatch.setattr(horizon, "load_world", lambda **_: tiny_world())
    monkeypatch.setattr(horizon, "load_episodes", lambda rows: tiny_episodes(4).select(rows))


def test_rows_of_a_walk(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, raw = tmp_path / "rows.csv", tmp_path / "raw"
    threads = torch.get_num_threads()
    given = ["--walks", "1", "--methods", "floor", "qvg", "--frames", "60", "--sweep", "9"]
    horizon.main([*given, "--videos", str(raw), "--csv", str(path), "--threads", str(threads)])
    assert "walk 1, seed 0, qvg, 60 frames" in capsys.readouterr().out
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [*dict.fromkeys(row["method"] for row in rows)] == ["bf16", "floor", "qvg"]
    videos = {name: np.load(raw / f"1-{name}-9-0.npy") for name in ("bf16", "qvg")}
    assert len(videos["qvg"]) == TINY.chunk_frames + 60

    def of(method: str, measure: str) -> list[tuple[str, float]]:
        return [(row["part"], float(row["value"])) for row in rows
                if (row["method"], row["measure"]) == (method, measure)]  # fmt: skip

    curve = of("qvg", "psnr")
    assert [part for part, _ in curve] == ["6", "24", "42"]
    expected = float(psnr(*(videos[name][:63] for name in ("bf16", "qvg")), 24, 42))
    assert curve[1][1] == pytest.approx(expected)
    assert not of("bf16", "psnr")
    assert not of("bf16", "saturation.excess")
    assert of("qvg", "saturation.change")[0] == ("6", 0.0)
    for kind in ("within", "beyond"):
        pairs = dict(of("bf16", "revisit.pairs"))
        assert pairs[kind] > 10
        assert kind in dict(of("bf16", "revisit.same.psnr"))
    # Raw frames that are there are taken as they are, here those of qvg for bf16.
    np.save(raw / "1-bf16-9-0.npy", videos["qvg"])
    horizon.main([*given, "--videos", str(raw), "--csv", str(path), "--threads", str(threads)])
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {value for _, value in of("qvg", "psnr")} == {float("inf")}


def test_walks_and_seeds_of_one_batch_are_those_of_each_alone(tiny: None, tmp_path: Path) -> None:
    path, raw = tmp_path / "rows.csv", tmp_path / "raw"
    shape = ["--frames", "30", "--sweep", "9", "--threads", str(torch.get_num_threads())]
    horizon.main(["--walks", "1", "--seeds", "5", *shape, "--videos", str(raw)])
    alone = np.load(raw / "1-qvg-9-5.npy")
    for name in raw.iterdir():
        name.unlink()
    horizon.main(
        ["--walks", "0", "1", "--seeds", "4", "5", *shape, "--videos", str(raw), "--csv", str(path)]
    )
    assert np.abs(np.load(raw / "1-qvg-9-5.npy").astype(int) - alone).mean() < 0.5
    assert np.abs(np.load(raw / "1-qvg-9-4.npy").astype(int) - alone).mean() > 2.0
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    which = {(row["walk"], row["seed"], row["method"]) for row in rows}
    assert len(which) == 8
    for row in rows:
        if row["method"] == "qvg" and row["measure"] == "psnr" and row["part"] == "6":
            pair = (
                np.load(raw / f"{row['walk']}-{name}-9-{row['seed']}.npy")
                for name in ("bf16", "qvg")
            )
            expected = float(psnr(*(torch.from_numpy(video) for video in pair), 6, 24))
            assert float(row["value"]) == pytest.approx(expected)


def test_a_walk_keeps_its_true_frames_and_turns_after_them(tiny: None) -> None:
    world = tiny_world()
    walk = horizon.scripted_walks(world, [2], 12, 3)
    true = tiny_episodes(4).select([2])
    assert walk.names == true.names
    assert torch.equal(walk.frames, true.frames)
    turns = 2 * (3 * [LEFT] + 3 * [RIGHT])
    assert walk.actions[0].tolist() == true.actions[0, :3].tolist() + turns


def test_too_short_a_walk_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        horizon.main(["--frames", "30", "--sweep", "24"])
    assert "--frames 30 is less than three sweeps of 24" in capsys.readouterr().err
