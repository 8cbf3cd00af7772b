"""`steadykv measure` for real: its files, its table, one line for every refusal, damaged files."""

from __future__ import annotations

import csv
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from steadykv.cli.main import main
from steadykv.evaluation.store import read_store
from tests.videos import damaged_packet, moving, noisy, write_video

VIDEO = moving(12)
FILES = {"measure.json", "report.html", "runs.jsonl"}
H264 = {"codec": "libx264", "pixel_format": "yuv420p"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("videos")
    return str(write_video(folder / "a.mkv", VIDEO)), str(
        write_video(folder / "b.mkv", noisy(VIDEO))
    )


def without_progress(text: str) -> list[str]:
    """The lines on stderr but those that say how far it is."""
    return [line for line in text.splitlines() if not re.fullmatch(r"[a-z ]+ \(\d+/\d+\)", line)]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_measure_writes_its_folder_and_prints_a_table(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "out", tmp_path / "rows.csv"
    code = main(["measure", *files, "--window", "5", "--out", str(out), "--rows", str(table)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert names(out) == FILES
    data = json.loads((out / "measure.json").read_text())
    assert data["frames"] == 12
    assert data["command"].startswith("steadykv measure ")
    psnr = data["summary"]["psnr"]
    assert re.search(rf"PSNR, dB +{psnr:.2f} +≤ [\d.]+ +[\d.]+ +frame \d+", shown.out), shown.out
    assert "flicker error" in shown.out
    assert "MS-SSIM was left out: the shorter side has 48 pixels, not 161" in shown.out
    assert [line.split()[0] for line in shown.out.splitlines() if "–" in line[:6]] == [
        "0–4", "5–9", "10–11",
    ]  # fmt: skip
    last = "report.html"
    assert shown.out.rstrip().endswith(str(out / last))
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 12
    assert [float(row["psnr"]) for row in rows] == data["by_frame"]["psnr"]
    assert rows[0]["flicker_error"] == ""


def test_measure_appends_a_row_to_its_store_and_to_a_shared_one(
    files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, shared = tmp_path / "out", tmp_path / "all.jsonl"
    page = ["--page-start", "4", "--page-frames", "5", "--page-width", "32"]
    quick = ["--no-ms-ssim", "--no-flicker-index", "--start", "2"]
    command = ["measure", *files, *quick, *page, "--out", str(out), "--store", str(shared)]
    assert main(command) == 0
    data = json.loads((out / "measure.json").read_text())
    (own,), (found,) = read_store(out / "runs.jsonl"), read_store(shared)
    assert own == found
    assert (own["kind"], own["command"]) == ("measure", data["command"])
    assert own["environment"] == data["environment"]
    assert own["row"]["summary"] == data["summary"]
    assert [source["path"] for source in own["row"]["sources"]] == list(files)
    assert own["configuration"] == {
        "start": 2, "end": None, "match": "exact", "shortest": False, "resize": False,
        "metrics": ["psnr", "ssim", "flicker_error"],
    }  # fmt: skip
    assert data["excerpt"] == {"start": 4, "frames": 5, "width": 32, "height": 24}
    monkeypatch.setenv("STEADYKV_STORE", str(shared))
    assert main(["measure", *files, *quick, "--out", str(tmp_path / "again")]) == 0
    runs = [entry["run"] for entry in read_store(shared)]
    assert len(set(runs)) == 2
    assert (tmp_path / "again" / "runs.jsonl").exists()


def test_measure_as_json_in_a_dated_folder(
    files: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["measure", files[0], files[0], "--json", "--lpips"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"results/measure-[\d-]+", found["folder"])
    assert names(Path(found["folder"])) == FILES
    expected = {"psnr": "inf", "ssim": 1.0, "lpips": 0.0, "flicker_error": 0.0}
    assert expected.items() <= found["summary"].items()


def test_identical_videos_print_infinity(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", files[0], files[0], "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"PSNR, dB +∞ +≤ ∞ +∞", shown)
    assert "A and B are the same file" in shown


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--start", "-1"], "--start: got -1"),
        (["--end", "0"], "--end: got 0"),
        (["--end", "99"], "--end: got 99, but only 12 frames"),
        (["--start", "12"], "--start: got 12"),
        (["--window", "0"], "--window: got 0"),
        (["--by-time", "--by-index"], "--by-time: got --by-index as well"),
        (["--device", "tpu"], "'tpu'"),
        (["--rows", "no/folder.csv"], "is no folder"),
        (["--page-frames", "0"], "--page-frames: got 0"),
        (["--page-start", "99"], "--page-start: got 99, expected a frame that was compared"),
        (["--store", "no/store.jsonl"], "--store: got no/store.jsonl"),
        (["--window", "many"], "--window: got 'many'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_mean_nothing_are_refused_in_one_line(
    files: tuple[str, str],
    arguments: list[str],
    needed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["measure", *files, *arguments]) == 2
    shown = capsys.readouterr()
    assert needed in shown.err
    assert len(without_progress(shown.err)) == 1
    assert names(tmp_path) == set()


def test_the_process_says_one_line_and_nothing_of_its_libraries(tmp_path: Path) -> None:
    """FFmpeg's own messages go past Python to the terminal; none must."""
    whole = write_video(tmp_path / "a.mkv", VIDEO, **H264, options={"crf": "5"})
    (tmp_path / "b.mkv").write_bytes(damaged_packet(whole, 6))
    paths = [str(whole), str(tmp_path / "b.mkv")]
    done = subprocess.run(
        [sys.executable, "-m", "steadykv", "measure", *paths, "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    lines = without_progress(done.stderr)
    assert len(lines) == 1, done.stderr
    assert re.match(r"steadykv: B \(.*b.mkv\): broken after \d+ frames? \(", lines[0])
    assert names(tmp_path) == {"a.mkv", "b.mkv"}


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, bytes cut off, zeroed, inserted or removed."""
    changed = bytearray(data)
    at = rng.randrange(len(changed))
    kind = rng.choice(["flip", "cut", "zero", "insert", "remove", "head"])
    if kind == "flip":
        for _ in range(rng.choice([1, 3, 20, 200])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del changed[at:]
    elif kind == "zero":
        end = min(len(changed), at + rng.choice([4, 64, 1000]))
        changed[at:end] = bytes(end - at)
    elif kind == "insert":
        changed[at:at] = rng.randbytes(rng.choice([1, 7, 300]))
    elif kind == "remove":
        del changed[at : at + rng.choice([1, 9, 500])]
    else:
        for _ in range(rng.choice([1, 3, 20])):
            changed[rng.randrange(min(400, len(changed)))] = rng.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("a.mp4", H264),
        ("a.mkv", H264),
        ("a.ts", H264),
        ("a.webm", {"codec": "libvpx-vp9", "pixel_format": "yuv420p"}),
        ("a.gif", {"codec": "gif", "pixel_format": "rgb8"}),
        ("a.avi", {"codec": "mjpeg", "pixel_format": "yuvj420p"}),
        ("a.mov", {"codec": "prores", "pixel_format": "yuv422p10le"}),
        ("a.png", {"codec": "apng", "pixel_format": "rgb24", "format": "apng"}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_damaged_files_end_with_a_result_or_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, settings: dict[str, object]
) -> None:
    """A dozen of each, at random but the same every time. A traceback would fail `main` itself.

    Every fourth has all its measures taken.
    """
    whole = write_video(tmp_path / name, VIDEO, **settings)  # type: ignore[arg-type]
    broken = tmp_path / f"broken{whole.suffix}"
    rng = random.Random(name)
    capfd.readouterr()
    codes = []
    for index in range(12):
        broken.write_bytes(damaged(whole.read_bytes(), rng))
        options = rng.choice([[], ["--shortest"], ["--by-index"], ["--by-time"], ["--end", "4"]])
        if index % 4:
            options = [*options, "--no-flicker-index", "--no-ms-ssim"]
        out = tmp_path / f"out-{index}"
        code = main(["measure", str(whole), str(broken), *options, "--json", "--out", str(out)])
        shown = capfd.readouterr()
        lines = without_progress(shown.err)
        if code == 0:
            assert json.loads(shown.out)["frames"] >= 1
            assert lines == []
        else:
            assert code == 2
            assert len(lines) == 1, shown.err
            assert lines[0].startswith("steadykv: ")
            assert shown.out == ""
        assert out.exists() == (code == 0)
        codes.append(code)
    assert 2 in codes
