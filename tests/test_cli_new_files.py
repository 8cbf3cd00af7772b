"""Files beside the result folder: `--rows`, `--parts`, `--plot`, `--report`, `--store`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from steadykv.cli.main import main
from steadykv.cli.new_files import write_table
from steadykv.errors import ConfigError
from steadykv.evaluation import results
from steadykv.world.episodes import save_episodes
from steadykv.world.weights import save_world
from tests.videos import moving, noisy, write_video
from tests.worlds import TINY, tiny_episodes, tiny_world

ROWS = [{"method": "qvg", "psnr": 1.5}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tensors", "F", "--rows", "x.csv", "--parts", "./x.csv"], "--parts: got x.csv, which "
         "--rows names as well"),
        (["tensors", "F", "--rows", "x.csv", "--out", "x.csv"], "--rows: got x.csv, which --out"),
        (["measure", "A", "B", "--rows", "x.csv", "--store", "link/x.csv"], "--store: got link/"),
        (["compare", "--rows", "x.csv", "--store", "x.csv"], "--store: got x.csv, which --rows"),
        (["ablate", "policy", "--rows", "x.csv", "--store", "x.csv"], "--store: got x.csv"),
        (["bench", "--device", "cpu", "--plot", "x", "--report", "x"], "--report: got x, which "
         "--plot"),
        (["compare", "--store", "pipe"], "--store: got pipe, which is no regular file"),
        (["measure", "A", "B", "--rows", "dangling"], "--rows: got dangling, which exists"),
    ],
)  # fmt: skip
def test_outputs_that_cannot_be_are_refused_before_anything_runs(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to(tmp_path)
    Path("dangling").symlink_to(tmp_path / "later.csv")
    os.mkfifo("pipe")
    before = set(tmp_path.iterdir())
    assert main(words) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_somebody_made_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:

        def refuse(*names: Any) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "rows.csv"
    write_table(path, ROWS, "--rows")
    assert path.read_text() == "method,psnr\nqvg,1.5\n"
    write_table(path, ROWS, "--rows")  # the same: nothing is lost
    with pytest.raises(ConfigError, match=r"--rows: got .*rows\.csv, which another run has just"):
        write_table(path, [{"method": "kivi"}], "--rows")
    assert path.read_text() == "method,psnr\nqvg,1.5\n"
    assert list(tmp_path.iterdir()) == [path], "a temporary file stayed"


def test_of_two_runs_into_one_table_the_second_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file appears after the check at the start, as another process would make it."""
    video = moving(4)
    for name, frames in {"a": video, "b": noisy(video)}.items():
        write_video(tmp_path / f"{name}.mkv", frames)
    rows, out, store = (tmp_path / name for name in ("rows.csv", "out", "runs.jsonl"))
    written = results.write_json

    def late(*words: Any) -> Path:
        rows.write_text("of another run\n")
        return written(*words)

    monkeypatch.setattr(results, "write_json", late)
    files = [str(tmp_path / f"{name}.mkv") for name in "ab"]
    words = ["measure", *files, "--no-ms-ssim", "--no-flicker-index", "--out", str(out),
             "--rows", str(rows), "--store", str(store)]  # fmt: skip
    assert main(words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"--rows: got {rows}, which another run has just made" in said
    assert f"kept in {out}: measure.json" in said
    assert rows.read_text() == "of another run\n"
    assert store.read_text().count("\n") == 1, "what was measured is in the store"


def test_a_finished_run_goes_on_beside_its_own_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_world(tmp_path / "world", TINY, tiny_world().state_dict(), {})
    save_episodes(tmp_path / "walks", tiny_episodes(1))
    rows, out = tmp_path / "rows.csv", tmp_path / "out"
    words = ["compare", "--world", str(tmp_path / "world"), "--walks", str(tmp_path / "walks"),
             "--frames", "6", "--episodes", "1", "--no-shift", "--no-floor", "--methods", "kivi",
             "--rows", str(rows), "--out", str(out)]  # fmt: skip
    assert main(words) == 0
    before = rows.read_bytes()
    assert main(["compare", "--resume", str(out)]) == 0
    assert rows.read_bytes() == before
    rows.write_bytes(before + b"of another run\n")
    capsys.readouterr()
    assert main(["compare", "--resume", str(out)]) == 2
    assert f"--rows: got {rows}, which exists and does not" in capsys.readouterr().err
    assert rows.read_bytes() == before + b"of another run\n"
