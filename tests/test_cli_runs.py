"""`demo` and `compare` for real, on a tiny world: results, interruption, a disk that is full."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from steadykv.cli.main import main
from steadykv.evaluation.results import read_metrics
from steadykv.report.video import decode_mp4
from steadykv.world.episodes import save_episodes
from steadykv.world.weights import save_world
from tests.worlds import TINY, broken_world, tiny_episodes, tiny_world


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that put the tiny world in place of the shipped one."""
    folder = tmp_path_factory.mktemp("world")
    save_world(folder / "world.safetensors", TINY, tiny_world().state_dict(), {})
    save_episodes(folder / "walks.zip", tiny_episodes(3))
    options = {"--world": "world.safetensors", "--walks": "walks.zip"}
    return [word for name, file in options.items() for word in (name, str(folder / file))]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


RESULTS = {"metrics.json", "metrics.csv", "rollouts.json", "token_shift.json", "progress.json"}


def test_demo(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "demo"
    code = main(["demo", *files, "--frames", "9", "--episode", "2", "--centroids", "8",
                 "--methods", "kivi", "quantwm:bf16", "--out", str(out)])  # fmt: skip
    assert code == 0
    shown = capsys.readouterr()
    videos = {"bf16.mp4", "kivi.mp4", "quantwm-bf16.mp4", "floor.mp4", "side_by_side.mp4"}
    frames = {name.replace(".mp4", ".npz") for name in videos - {"side_by_side.mp4"}}
    assert names(out) == RESULTS | videos | frames | {"report.html", "runs.jsonl"}
    for name in videos:
        assert len(decode_mp4(out / name)) == 3 + 9
    rows = read_metrics(out)
    assert [row["method"] for row in rows] == ["bf16", "kivi", "quantwm:bf16", "floor"]
    assert rows[0]["configuration"]["episodes"] == ["walk-2"]
    for needed in ("KIVI", "QuantWM : BF16", "noise floor", f"{rows[1]['psnr']:.1f}"):
        assert needed in shown.out
    assert shown.out.rstrip().endswith(f"report: {out / 'report.html'}")
    page = (out / "report.html").read_text()
    assert "steadykv demo --world" in page
    assert page.count("data:video/mp4;base64,") == 3
    assert "KIVI (" in shown.err  # progress, which leaves stdout to the results


def test_compare_as_json(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "out", tmp_path / "rows.csv"
    code = main(["compare", *files, "--frames", "6", "--episodes", "2", "--seeds", "2",
                 "--methods", "qvg,bf16:qvg", "--centroids", "8", "--batch", "3", "--no-shift",
                 "--paired", "qvg", "--json", "--rows", str(table), "--out", str(out)])  # fmt: skip
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"] == read_metrics(out)
    assert found["report"] == str(out / "report.html")
    assert Path(found["report"]).exists()
    assert all(Path(path).exists() for path in found["videos"].values())
    row = found["metrics"][1]
    assert (row["n_episodes"], row["n_seeds"], row["n_rollouts"]) == (2, 2, 4)
    assert row["intervals"]["psnr"][0] <= row["psnr"] <= row["intervals"]["psnr"][1]
    assert row["top1_shift"] is None
    with table.open() as file:
        written = list(csv.DictReader(file))
    assert [line["method"] for line in written] == ["bf16", "qvg", "bf16:qvg", "floor"]
    assert float(written[1]["psnr"]) == row["psnr"]


@pytest.mark.parametrize(
    ("arguments", "got", "expected"),
    [
        (["--frames", "7"], "got 7", "multiple of 3 up to 57; try 6"),
        (["--frames", "9999"], "got 9999", "up to 57; try 57"),
        (["--frames", "3"], "6 frames", "at least 3 more"),
        (["--episode", "3"], "[3]", "from 0 to 2"),
        (["--world", "no-such-file"], "no-such-file", "expected world weights"),
        (["--walks", "no-such-file"], "no-such-file", "expected episodes"),
        (["--out", "/dev/null/out"], "/dev/null/out", "choose another"),
    ],
)
def test_what_the_world_cannot_do_is_refused_in_one_line(
    arguments: list[str],
    got: str,
    expected: str,
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *files, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert got in shown.err
    assert expected in shown.err
    assert not list(tmp_path.iterdir()), "a refused run left something behind"


def start(
    files: list[str], out: Path, frames: int = 54, **options: object
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "steadykv.cli.main", "demo", *files, "--frames", str(frames),
               "--methods", "qvg", "quantwm", "--centroids", "8", "--out", str(out)]  # fmt: skip
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("wait_for", ["qvg.mp4", None], ids=["after a method", "at once"])
def test_ctrl_c_keeps_what_was_made(files: list[str], tmp_path: Path, wait_for: str | None) -> None:
    out = tmp_path / "out"
    running = start(files, out)
    deadline = time.monotonic() + 60
    if wait_for is None:
        # The first progress line: everything is imported and a walk has begun.
        assert running.stderr is not None
        running.stderr.readline()
    else:
        while not (out / wait_for).exists() and time.monotonic() < deadline:
            assert running.poll() is None, running.communicate()
            time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    printed, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert printed == ""
    last = said.splitlines()[-1]
    assert last.startswith("steadykv: interrupted; ")
    assert "Traceback" not in said
    if wait_for is None:
        assert "nothing was finished yet" in last
        assert not out.exists()
        return
    assert "qvg.mp4" in last
    assert not [name for name in names(out) if name.startswith(".")], "a temporary file stayed"
    assert "report.html" not in names(out)
    for path in out.glob("*.mp4"):
        assert len(decode_mp4(path)) == 3 + 54
    assert "bf16" in {row["method"] for row in read_metrics(out)}


@pytest.mark.parametrize("fits", [True, False], ids=["some fit", "nothing fits"])
def test_a_full_disk_ends_with_one_line(files: list[str], tmp_path: Path, fits: bool) -> None:
    """The system refuses files above a limit, as it does on a full disk; what fits is kept."""
    out = tmp_path / "out"
    # Twelve frames: 75 kB a video, and as much for each of three in the side-by-side one.
    most = 150_000 if fits else 10_000

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    running = start(files, out, frames=12, preexec_fn=limit)
    printed, said = running.communicate(timeout=120)
    assert running.returncode == 2, said
    assert printed == ""
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith("steadykv: could not write ")
    if not fits:
        assert "kept" not in last
        assert not out.exists()
        return
    assert f"; kept in {out}: bf16.mp4, " in last
    assert names(out) >= RESULTS | {"bf16.mp4", "qvg.mp4"}
    for path in out.iterdir():
        assert path.stat().st_size <= most
        assert not path.name.startswith(".")
        assert path.name in last
    assert [row["method"] for row in read_metrics(out)][:2] == ["bf16", "qvg"]


def run_refused(
    arguments: list[str], out: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit code and last line of a demo that says nothing on stdout."""
    code = main(["demo", *arguments, "--frames", "6", "--centroids", "8", "--out", str(out)])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    return code, shown.err.splitlines()[-1]


def test_weights_that_give_nan_end_with_one_line(
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steadykv.world.load_world", lambda *_, **__: broken_world())
    code, last = run_refused([*files, "--methods", "qvg"], tmp_path / "out", capsys)
    assert code == 2
    assert "non-finite keys/values" in last
    assert "chunk 1 with bf16" in last
    assert not (tmp_path / "out").exists()


def test_walks_of_another_frame_size_end_with_one_line(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    walks = tmp_path / "walks.zip"
    save_episodes(walks, tiny_episodes(1, config=replace(TINY, image_height=40)))
    code, last = run_refused([*files[:2], "--walks", str(walks)], tmp_path / "out", capsys)
    assert code == 2
    assert last.startswith("steadykv: ")
    assert "40" in last
    assert "expected" in last


@pytest.mark.parametrize("methods", [["bf16"], ["bf16:bf16"]])
def test_a_demo_without_packed_keys(
    methods: list[str], files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = main(["demo", *files, "--frames", "6", "--methods", *methods, "--out", str(out)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "token_shift.json" not in names(out)
    assert {row["top1_shift"] for row in read_metrics(out)} == {None}


def test_keys_and_values_add_a_method(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = main(["compare", *files, "--frames", "6", "--episodes", "2", "--centroids", "8",
                 "--methods", "bf16", "--keys", "kivi", "--values", "qvg", "--no-floor",
                 "--no-shift", "--out", str(out)])  # fmt: skip
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert [row["method"] for row in read_metrics(out)] == ["bf16", "kivi:qvg"]
    assert "intervals of the report are too narrow" in " ".join(shown.out.split())  # two episodes
    assert "×1000" in shown.out
    assert "too narrow" in (out / "report.html").read_text()


@pytest.mark.parametrize("seconds", [0.2, 0.8])
def test_ctrl_c_while_importing(files: list[str], tmp_path: Path, seconds: float) -> None:
    program = (
        "import sys; from steadykv.cli.main import main; print('ready', flush=True);"
        "sys.exit(main())"
    )
    arguments = ["demo", *files, "--frames", "54", "--out", str(tmp_path / "out")]
    running = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    time.sleep(seconds)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    # On a fast machine the later moment may come after a line of progress.
    lines = [line for line in said.splitlines() if not re.search(r"\(\d+/\d+\)$", line)]
    assert lines == ["steadykv: interrupted; nothing was finished yet"]
    assert not (tmp_path / "out").exists()
