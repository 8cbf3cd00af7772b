"""`steadykv vbench`: what is said without the package, and the plumbing to it.

The package itself needs weights from the network and other versions of numpy and transformers, so
that no test runs it. FAKE_VBENCH stands in for it with the call and the result file of version
0.1.5: it tests the plumbing alone, and no number of it means anything.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from steadykv.cli.main import main
from steadykv.evaluation.store import read_store
from steadykv.evaluation.vbench import DIMENSIONS

FAKE_VBENCH = """
import json
import os
from pathlib import Path

MODE = "MODE"

class VBench:
    def __init__(self, device, full_info_dir, output_path):
        self.device, self.full_info_dir, self.output_path = device, full_info_dir, output_path

    def evaluate(self, videos_path, name, prompt_list=[], dimension_list=None, local=False,
                 read_frame=False, mode="vbench_standard", **kwargs):
        print("chatter of the package")
        assert mode == "custom_input" and self.full_info_dir.endswith("VBench_full_info.json")
        if MODE == "download":
            raise RuntimeError("<urlopen error\\n name resolution failed>")
        results = {}
        for dimension in dimension_list:
            found = []
            for video in sorted(os.listdir(videos_path)):
                path = os.path.join(videos_path, video)
                value = int(Path(path).read_text()) / 100
                if dimension == "imaging_quality":
                    value *= 100
                found.append({"video_path": path, "video_results": value})
            if MODE == "partial":
                found.pop()
            if MODE == "nan":
                found[0]["video_results"] = float("nan")
            mean = sum(v["video_results"] for v in found) / len(found)
            results[dimension] = [mean / 100 if dimension == "imaging_quality" else mean, found]
        if MODE == "form":
            results = {d: v[0] for d, v in results.items()}
        path = os.path.join(self.output_path, name + "_eval_results.json")
        with open(path, "w") as file:
            json.dump(results, file)
"""


def install_fake(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (folder / "vbench.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "vbench", raising=False)


def videos(folder: Path) -> Path:
    """Files that only the stand-in can read: a number each."""
    folder.mkdir()
    for name, number in (("b.mp4", 80), ("a.MP4", 40), ("notes.txt", 1)):
        (folder / name).write_text(str(number))
    return folder


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vbench", raising=False)


@pytest.mark.skipif(importlib.util.find_spec("vbench") is not None, reason="vbench is installed")
def test_without_the_package_one_line_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["vbench", str(videos(tmp_path / "v")), "--device", "cpu"])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    line = shown.err.splitlines()[-1]
    assert "the package vbench is not installed; pip install torchvision vbench" in line
    assert "downloads its weights itself" in line


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import torch_that_is_missing", "needs torch_that_is_missing, which is missing"),
        ("raise AttributeError('np.float is gone')", "AttributeError: np.float is gone"),
        ("VBench = None", "vbench.py has no class VBench; pip install torchvision vbench"),
    ],
)
def test_a_package_that_cannot_be_imported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    said: str,
) -> None:
    install_fake(tmp_path, monkeypatch, source)
    assert main(["vbench", str(videos(tmp_path / "v")), "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_of_videos_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m steadykv vbench vbench/` finds the folder where it looks for the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget(monkeypatch)
    videos(tmp_path / "vbench")
    assert main(["vbench", "vbench", "--device", "cpu"]) == 2
    assert "the package vbench is not whole" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "results").exists()
    forget(monkeypatch)


def test_plumbing_with_a_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_fake(tmp_path, monkeypatch, FAKE_VBENCH)
    folder = videos(tmp_path / "v")
    single = tmp_path / "b.mp4"  # the same name as one in the folder
    single.write_text("60")
    out, store = tmp_path / "out", tmp_path / "all.jsonl"
    kept = ["--out", str(out), "--store", str(store)]
    assert main(["vbench", str(folder), str(single), "--device", "cpu", "--json", *kept]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)  # the package's chatter is not in it
    assert "chatter of the package" in shown.err
    assert list(found["dimensions"]) == list(DIMENSIONS)
    for one in found["dimensions"].values():
        assert one["score"] == pytest.approx(0.6)
        expected = {str(folder / "a.MP4"): 0.4, str(folder / "b.mp4"): 0.8, str(single): 0.6}
        assert one["videos"] == pytest.approx(expected)
    assert json.loads((out / "vbench.json").read_text())["dimensions"] == found["dimensions"]
    rows = [entry["row"] for entry in read_store(store)]
    assert [entry["row"] for entry in read_store(out / "runs.jsonl")] == rows
    assert [row["video"] for row in rows] == [*map(str, sorted(folder.glob("*.[mM][pP]4"))),
                                              str(single)]  # fmt: skip
    assert rows[0]["imaging_quality"] == pytest.approx(0.4)
    monkeypatch.chdir(tmp_path)
    options = ["--dimensions", "aesthetic_quality, imaging_quality", "--device", "cpu"]
    assert main(["vbench", str(single), *options]) == 0
    text = capsys.readouterr().out
    assert "imaging quality" in text
    assert "subject" not in text
    assert "0.6000" in text
    forget(monkeypatch)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("download", "could not measure subject_consistency (RuntimeError: <urlopen error name"),
        ("partial", "gave subject_consistency for 1 of 2 videos"),
        ("nan", "expected 0 to 1 for each"),
        ("form", "in another form than version 0.1.5"),
    ],
)
def test_no_number_without_a_whole_result(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    said: str,
) -> None:
    install_fake(tmp_path, monkeypatch, FAKE_VBENCH.replace('"MODE"', f'"{mode}"'))
    assert main(["vbench", str(videos(tmp_path / "v")), "--device", "cpu", "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err.splitlines()[-1]
    forget(monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.mp4"], "missing.mp4: got no file or folder"),
        (["empty"], "empty: got a folder without .mp4 or .gif files"),
        (["x.webm"], "x.webm: got a .webm file"),
        (["x.mp4", "--dimensions", "beauty"], "dimensions: got beauty"),
        (["x.mp4", "--dimensions", "imaging_quality,imaging_quality"], "each once"),
    ],
)
def test_mistakes_get_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("x.webm", "x.mp4"):
        (tmp_path / name).write_text("1")
    assert main(["vbench", *arguments]) == 2
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)
    assert said in shown.err
