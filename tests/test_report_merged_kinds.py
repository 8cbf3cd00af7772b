"""`steadykv report` for measurements, captured tensors and benchmarks."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steadykv.capture import Selection
from steadykv.cli.main import main
from steadykv.cli.report_kinds import films_of
from steadykv.evaluation import video_excerpt
from steadykv.evaluation.merge_kinds import group_runs
from steadykv.evaluation.world_capture import capture_world
from tests.test_report_pages import Reader
from tests.videos import moving, noisy, write_video
from tests.worlds import tiny_episodes, tiny_world

QUICK = ["--no-ms-ssim", "--no-flicker-index"]
TIMES = ["bench", "--device", "cpu", "--heads", "1", "--queries", "24", "--seconds", "0",
         "--works", "decode", "--tokens"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real folders: three measurements (two of one reference), captures and times."""
    folder = tmp_path_factory.mktemp("runs")
    video = moving(12)
    for name, frames in {
        "a": video,
        "b": noisy(video),
        "c": noisy(video, 9),
        "d": video[:6],
    }.items():
        write_video(folder / f"{name}.mkv", frames)
    files = {name: str(folder / f"{name}.mkv") for name in "abcd"}
    capture_world(tiny_world(), tiny_episodes(1), folder / "walk.safetensors",
                  Selection(queries=30), frames=12)  # fmt: skip
    walk = str(folder / "walk.safetensors")
    commands = {
        "m-b": ["measure", files["a"], files["b"], *QUICK],
        "m-c": ["measure", files["a"], files["c"], *QUICK],
        "m-d": ["measure", files["d"], files["d"], *QUICK],
        "t-1": ["tensors", walk, "--methods", "kivi", "qvg", "--centroids", "8"],
        "t-2": ["tensors", walk, "--methods", "kivi", "qvg", "rtn", "--centroids", "4"],
        "b-1": [*TIMES, "96", "--methods", "qvg"],
        "b-2": [*TIMES, "96", "--methods", "qvg", "quantwm"],
        "b-3": [*TIMES, "192", "--methods", "qvg"],
    }
    for name, command in commands.items():
        assert main([*command, "--out", str(folder / name)]) == 0
    return folder


def report(runs: Path, out: Path, *names: str) -> tuple[str, dict[str, Any]]:
    """The page and merged.json."""
    assert main(["report", *(str(runs / name) for name in names), "--out", str(out)]) == 0
    page = (out / "report.html").read_text("utf-8")
    ids = [found["id"] for _, found in Reader(page).tags if found.get("id")]
    assert len(ids) == len(set(ids))
    merged = json.loads((out / "merged.json").read_text())
    with (out / "merged.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == sum(len(group["rows"]) for group in merged["groups"])
    return page, merged


def test_videos_of_one_reference_play_on_one_page(runs: Path, tmp_path: Path) -> None:
    page, merged = report(runs, tmp_path / "out", "m-b", "m-c")
    assert merged["kind"] == "measure"
    (group,) = merged["groups"]
    assert [row["video"].rsplit("/", 1)[-1] for row in group["rows"]] == ["b.mkv", "c.mkv"]
    for name, row in zip(("m-b", "m-c"), group["rows"], strict=True):
        own = json.loads((runs / name / "measure.json").read_text())
        assert row["psnr"] == own["summary"]["psnr"]
        assert f"{own['summary']['psnr']:.2f} dB" in page
        assert f"steadykv measure {own['sources'][0]['path']}" in page
    assert "b.mkv and c.mkv measured against a.mkv" in page
    assert page.count('<figure class="screen') == 3
    figure = re.search(r"<svg[^>]*PSNR of each video by frame.*?</svg>", page, re.S)
    assert figure is not None
    assert {"--s1", "--s3"} <= set(re.findall(r"stroke: var\((--s\d)\)", figure[0]))


def test_the_players_show_the_worst_part_under_its_own_numbers(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 14 frames the tenth flickers; there is room for four of three videos."""
    video = moving(14)
    worse = video.copy()
    worse[9] = 255 - worse[9]
    for name, frames in {"e": video, "f": noisy(video), "g": worse}.items():
        write_video(tmp_path / f"{name}.mkv", frames)
    for name in "fg":
        pair = [str(tmp_path / f"{letter}.mkv") for letter in ("e", name)]
        assert main(["measure", *pair, *QUICK, "--start", "1", "--out", str(tmp_path / name)]) == 0
    monkeypatch.setattr(video_excerpt, "OWN_PIXELS", 6 * 48 * 64)
    (group,) = group_runs("measure", [tmp_path / "f", tmp_path / "g"])
    films, start = films_of(group)
    assert [len(film) for film in films] == [4, 4, 4]
    assert start < 9 < start + 3  # with the frames before and after it
    assert np.array_equal(films[0], video[start : start + 4])
    assert np.array_equal(films[2], worse[start : start + 4])
    page, _ = report(tmp_path, tmp_path / "out", "f", "g")
    assert json.loads(Reader(page).named("section")[0]["data-film"] or "")["start"] == start
    assert f"The players show frames {start} to {start + 3}, 4 of the 13" in page
    shown = Reader(page).named("figure", **{"class": "screen crisp"})[2]
    assert [value is None for value in json.loads(shown["data-psnr"] or "")] == [
        t != 9 for t in range(start, start + 4)
    ]  # None: identical


def test_without_the_videos_there_are_no_players(runs: Path, tmp_path: Path) -> None:
    """A file that changed since it was measured is not shown as if it were what was."""
    original = (runs / "c.mkv").read_bytes()
    write_video(runs / "c.mkv", noisy(moving(12), 20))
    try:
        page, merged = report(runs, tmp_path / "out", "m-b", "m-c")
    finally:
        (runs / "c.mkv").write_bytes(original)
    assert '<figure class="screen' not in page
    (note,) = merged["groups"][0]["notes"]
    assert re.search(r"no players: .*c\.mkv of m-c is gone or has changed", note)
    assert "is gone or has changed" in page
    assert "players have" not in page


def test_other_references_stand_apart(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, merged = report(runs, tmp_path / "m", "m-b", "m-d")
    assert [list(group["runs"]) for group in merged["groups"]] == [["m-b"], ["m-d"]]
    assert "Two groups of runs" in page
    assert "∞" in page
    assert "∞" in capsys.readouterr().out
    page, merged = report(runs, tmp_path / "b", "b-1", "b-3", "b-2")
    assert [list(group["runs"]) for group in merged["groups"]] == [["b-1", "b-2"], ["b-3"]]


def test_methods_of_several_runs_on_the_same_capture(runs: Path, tmp_path: Path) -> None:
    page, merged = report(runs, tmp_path / "out", "t-1", "t-2")
    (group,) = merged["groups"]
    methods = [(row["method"], row["run"]) for row in group["rows"]]
    assert methods == [("kivi", "t-1"), ("qvg", "t-1"), ("qvg@run=t-2", "t-2"), ("rtn", "t-2")]
    assert "Four methods on" in page
    assert "kivi is in t-1 and t-2 with the same numbers: shown once." in page
    assert "qvg of t-2 is another than that of t-1: here it is qvg@run=t-2." in page
    assert "QVG run=t-2" in page


def test_times_of_the_same_shape_stand_in_one_table(runs: Path, tmp_path: Path) -> None:
    page, merged = report(runs, tmp_path / "out", "b-1", "b-2")
    (group,) = merged["groups"]
    assert [(row["work"], row["method"]) for row in group["rows"]] == [
        ("copy", "machine"), ("matmul", "machine"), ("decode", "qvg"), ("decode", "qvg run=b-2"),
        ("decode", "quantwm"),
    ]  # fmt: skip
    assert re.search(r"b-2 had [\d.,]+ GB/s in copy", page)
    assert "QVG run=b-2" in page


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["m-b", "t-1"], r"several kinds: .*m-b \(measure\), .*t-1 \(tensors\); expected one kind"),
        (["m-b", "m-b"], "twice"),
        (["."], "holds none of metrics.json, measure.json"),
        (["m-b", "--paired", "qvg"], "--paired: got 'qvg' for runs of measure"),
    ],
)
def test_what_does_not_belong_together_gets_one_line(
    runs: Path, tmp_path: Path, names: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [
        name if name.startswith("--") or name == "qvg" else str(runs / name) for name in names
    ]
    assert main(["report", *places, "--out", str(tmp_path / "out")]) == 2
    assert re.search(said, capsys.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "out").exists()


def test_a_damaged_run_gets_one_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "tensors.json": '{"version": 1, "file": {}}',
        "bench.json": "[]",
        "measure.json": "{",
    }.items():
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(text)
        assert main(["report", str(folder), "--out", str(tmp_path / "out")]) == 2
        assert name in capsys.readouterr().err.splitlines()[-1]


def cut(name: str) -> Callable[[Any], None]:
    return lambda data: data["by_frame"].update({name: data["by_frame"][name][:4]})


@pytest.mark.parametrize(
    ("run", "change", "said"),
    [
        ("m-b", lambda data: data.update(version=2), "has version 2; expected 1"),
        ("m-b", lambda data: data.update(version="1"), "has version '1'; expected 1"),
        ("t-1", lambda data: data.update(version=2), "has version 2; expected 1"),
        ("b-1", lambda data: data.update(version=0), "has version 0; expected 1"),
        ("m-b", cut("psnr"), "length of by_frame.psnr is 4; expected 12 values"),
        ("m-b", lambda data: data.update(summary=None), "summary is None; expected an object"),
        ("m-b", lambda data: data["summary"].update(psnr=99.0), r"summary.psnr is 99.0; .* \d\d"),
        ("m-b", lambda data: data["summary"].update(ssim=None), "summary.ssim is None"),
        ("m-d", lambda data: data["summary"].update(psnr=99.0), "expected 'inf'"),
        ("m-b", lambda data: data["summary"].pop("ssim"), "summary is"),
        ("m-b", lambda data: data.update(fps=0), "fps is 0"),
        ("m-b", lambda data: data.update(frames=10**12), "expected 1000000000000 values"),
        ("m-b", lambda data: data.update(excerpt=3), "excerpt is 3"),
        ("m-b", lambda data: data["excerpt"].update(frames=99), "expected frames 0 to 11"),
        ("m-b", lambda data: data["by_frame"].update(flicker_error=["x"] * 11),
         r"by_frame.flicker_error\[0\] is 'x'"),
        ("m-b", lambda data: data["tails"]["psnr"].update(worst_frame=12), "worst_frame is 12"),
        ("t-1", lambda data: data.update(cells=[[]]), r"cells\[0\] is \[\]"),
        ("t-1", lambda data: data["rows"][0].pop("bits_per_element"), "not what steadykv writes"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself_gets_one_line(
    runs: Path,
    tmp_path: Path,
    run: str,
    change: Callable[[Any], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (name,) = (path.name for path in (runs / run).glob("*.json"))
    data = json.loads((runs / run / name).read_text())
    change(data)
    (tmp_path / run).mkdir()
    (tmp_path / run / name).write_text(json.dumps(data))
    assert main(["report", str(tmp_path / run), "--out", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"steadykv: {tmp_path / run}")
    assert re.search(said, line), line
    assert not (tmp_path / "out").exists()
