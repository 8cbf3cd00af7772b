"""Interrupted and gone on with: the rows of a run that never stopped. And several runs merged."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steadykv.cli.main import main
from steadykv.cli.resuming import again, locked, read_frames, stands_alone
from steadykv.errors import ConfigError, PayloadError
from steadykv.evaluation.comparison import run_comparison
from steadykv.evaluation.results import read_metrics
from steadykv.evaluation.store import read_store
from steadykv.report.video import decode_mp4
from steadykv.world.episodes import save_episodes
from steadykv.world.weights import save_world
from tests.worlds import TINY, tiny_episodes, tiny_world

METHODS = ("bf16", "kivi", "qvg")


def run(folder: Path, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "frames": 6, "centroids": 8, "max_batch": 1, "resamples": 100, "paired_against": "kivi",
        "methods": METHODS, "world": tiny_world(), "episodes": tiny_episodes(2),
    }  # fmt: skip
    settings |= options
    return run_comparison(
        settings.pop("world"), settings.pop("episodes"), settings.pop("methods"),
        out_dir=folder, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_commit() -> Iterator[None]:
    """A checkout that is edited while its tests run counts as another place to go on in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steadykv.evaluation.provenance.git_commit", lambda: "0" * 40)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("whole") / "out"
    return run(folder), folder


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


class Stop(Exception):
    pass


def stop_at(step: str) -> Any:
    def watch(done: int, total: int, label: str) -> None:
        if label.startswith(step):
            raise Stop

    return watch


@pytest.mark.parametrize(
    ("step", "ran"),
    [
        # What runs after the interruption: finished methods do not, their reference does.
        ("kivi, rollouts 1", ["bf16", "token shift", "kivi", "qvg", "floor"]),
        ("floor, rollouts 1", ["bf16", "token shift", "floor"]),
        ("bf16, rollouts 2", []),
        ("qvg, rollouts 2", None),
    ],
)
def test_the_rows_are_those_of_an_uninterrupted_run(
    whole: tuple[Any, Path], tmp_path: Path, step: str, ran: list[str] | None
) -> None:
    folder = tmp_path / "out"
    with pytest.raises(Stop):
        run(folder, on_progress=stop_at(step))
    finished = json.loads((folder / "rollouts.json").read_text())
    steps: list[tuple[int, int, str]] = []
    result = run(folder, resume=True, on_progress=lambda *event: steps.append(event))
    labels = list(dict.fromkeys(label for _, _, label in steps))
    second = [f"{name}, rollouts 2-2 of 2"
              for name in ("bf16", "token shift", "kivi", "qvg", "floor")]  # fmt: skip
    if ran is None:
        assert labels == [second[0], second[1], second[3], second[4]]
    else:
        assert labels == [*(f"{name}, rollouts 1-1 of 2" for name in ran), *second]
    expected, original = whole
    assert without_times(result.rows) == without_times(expected.rows)
    assert result.records == expected.records
    assert result.shift == expected.shift
    assert read_metrics(folder) == result.rows
    for name in ("rollouts.json", "token_shift.json"):
        assert (folder / name).read_bytes() == (original / name).read_bytes()
    now = json.loads((folder / "rollouts.json").read_text())
    assert [entry for entry in now if entry in finished] == finished
    done = [event[0] for event in steps]
    assert done == sorted(done)
    assert (done[-1], {event[1] for event in steps}) == (2 * 5 * 2, {2 * 5 * 2})


def test_a_complete_run_runs_nothing(whole: tuple[Any, Path], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(whole[1], folder)
    result = run(folder, resume=True, on_progress=stop_at(""))
    assert result.rows == whole[0].rows  # times too: they were stored
    assert result.run == whole[0].run


def test_rollouts_that_the_progress_does_not_list_run_again(
    whole: tuple[Any, Path], tmp_path: Path
) -> None:
    """The process died between two files: `progress.json` is the last to be written."""
    folder = tmp_path / "out"
    shutil.copytree(whole[1], folder)
    path = folder / "progress.json"
    progress = json.loads(path.read_text())
    del progress["batches"][-2:]
    path.write_text(json.dumps(progress))
    result = run(folder, resume=True)
    assert without_times(result.rows) == without_times(whole[0].rows)
    assert len(result.records) == len(whole[0].records)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seeds": (0, 1)}, "seeds is [0, 1], there [0]"),
        ({"frames": 9}, "frames is 9, there 6"),
        ({"methods": ("bf16", "kivi")}, "methods is"),
        ({"centroids": 4}, "caches.qvg.keys.centroids is 4, there 8"),
        ({"paired_against": None}, 'paired_against is null, there "kivi"'),
        ({"floor": False}, 'floors is [], there ["floor"]'),
        ({"episodes": tiny_episodes(3).select([0, 2])}, "episodes is"),
        ({"max_batch": 2}, "max_batch is 2, there 1"),
    ],
)
def test_another_configuration_is_refused(
    whole: tuple[Any, Path], options: dict[str, Any], named: str
) -> None:
    before = {path: path.read_bytes() for path in whole[1].iterdir()}
    with pytest.raises(ConfigError, match="another configuration") as failure:
        run(whole[1], resume=True, on_progress=stop_at(""), **options)
    assert named in str(failure.value)
    assert "\n" not in str(failure.value)
    assert {path: path.read_bytes() for path in whole[1].iterdir()} == before


def test_other_weights_walks_and_places_are_refused(
    whole: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = tiny_world()
    next(world.parameters()).data.flatten()[0] += 1.0
    with pytest.raises(ConfigError, match="world_sha256 is"):
        run(whole[1], resume=True, world=world)
    walks = copy.deepcopy(tiny_episodes(2))
    walks.actions[1, 3] ^= 1
    with pytest.raises(ConfigError, match="walks_sha256 is"):
        run(whole[1], resume=True, episodes=walks)
    monkeypatch.setattr("torch.__version__", "1.0")
    with pytest.raises(ConfigError, match=r'environment\.torch is "1\.0"'):
        run(whole[1], resume=True)


def test_a_damaged_folder_is_refused(whole: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no progress\.json"):
        run(tmp_path, resume=True)
    for number, (name, change) in enumerate(
        {
            "rollouts.json": lambda text: "[]",
            "progress.json": lambda text: text.replace('"version": 1', '"version": 2'),
            "token_shift.json": lambda text: text[:-20],
            r"progress.json is no .*\(it lacks 'seconds'\)": lambda text: text.replace(
                "seconds", "s"
            ),
        }.items()
    ):
        folder = tmp_path / str(number)
        shutil.copytree(whole[1], folder)
        path = folder / name.partition(" ")[0]
        path.write_text(change(path.read_text()))
        with pytest.raises(PayloadError, match=name):
            run(folder, resume=True)


# --- the command ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("world")
    save_world(folder / "world.safetensors", TINY, tiny_world().state_dict(), {})
    save_episodes(folder / "walks.zip", tiny_episodes(6))
    return ["--world", str(folder / "world.safetensors"), "--walks", str(folder / "walks.zip"),
            "--frames", "24", "--episodes", "2", "--batch", "1", "--centroids", "8",
            "--methods", "kivi", "qvg"]  # fmt: skip


def test_a_real_sigint_and_a_real_resume(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, store = tmp_path / "out", tmp_path / "store.jsonl"
    running = subprocess.Popen(
        [sys.executable, "-m", "steadykv.cli.main", "compare", *options, "--store", str(store),
         "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 90
    while not (out / "progress.json").exists() and time.monotonic() < deadline:
        assert running.poll() is None, running.communicate()
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "report.html" not in {path.name for path in out.iterdir()}
    assert not store.exists()

    def resume() -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "steadykv.cli.main", "compare", "--resume", str(out), "--json"],
            capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    found, _ = resume()
    whole = tmp_path / "whole"
    done = subprocess.run(
        [sys.executable, "-m", "steadykv.cli.main", "compare", *options, "--out", str(whole)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert without_times(found["metrics"]) == without_times(read_metrics(whole))
    assert (out / "rollouts.json").read_bytes() == (whole / "rollouts.json").read_bytes()
    for name in ("bf16", "kivi", "qvg", "floor"):
        frames = read_frames(out / f"{name}.npz")
        assert (frames == read_frames(whole / f"{name}.npz")).all()
        assert frames.shape == (27, 32, 48, 3) == decode_mp4(out / f"{name}.mp4")[:, ::4, ::4].shape
    page = (out / "report.html").read_text()
    assert page.count("data:video/mp4;base64,") == 3
    assert f"--out {out}" in page, "the page names the first command"
    kept = {name: (out / name).stat().st_mtime_ns for name in ("rollouts.json", "progress.json")}
    again_found, progress = resume()
    assert again_found["metrics"] == found["metrics"]
    assert "rollouts" not in progress, "something ran again"
    assert kept == {name: (out / name).stat().st_mtime_ns for name in kept}
    for place in (store, out / "runs.jsonl"):
        entries = read_store(place)  # once, although the run was finished twice
        assert [entry["row"]["method"] for entry in entries] == ["bf16", "kivi", "qvg", "floor"]
        assert entries[1]["configuration"]["episodes"] == ["walk-0", "walk-1"]

    # With options of its own, they have to be those of the folder.
    assert main(["compare", *options, "--episodes", "3", "--resume", str(out)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "episodes is" in last
    assert main(["compare", "--resume", str(out), "--out", str(tmp_path / "x")]) == 2
    assert "expected one of them" in capsys.readouterr().err
    with locked(out):
        busy = subprocess.run(
            [sys.executable, "-m", "steadykv.cli.main", "compare", "--resume", str(out)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert busy.returncode == 2
    assert "a run is still at work" in busy.stderr


def test_the_first_command_is_typed_again() -> None:
    words = ["compare", "--methods", "qvg", "kivi", "--out", "a b", "--frames=6"]
    expected = ["compare", "--methods", "qvg", "kivi", "--frames=6", "--json", "--resume", "f"]
    assert again(words, Path("f"), True) == expected
    assert again(["compare", "--out=x"], Path("f"), False) == ["compare", "--resume", "f"]
    assert stands_alone(["compare", "--resume=f", "--json"])
    assert not stands_alone(["compare", "--resume", "f", "--frames", "6"])
