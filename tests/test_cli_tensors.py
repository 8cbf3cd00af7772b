"""`capture` and `tensors` for real, on a tiny world: files, refusals, interruption, the page."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from steadykv.capture import open_capture
from steadykv.cli.main import main
from steadykv.evaluation.store import read_store
from steadykv.evaluation.tensor_comparison import default_methods
from steadykv.report.text import method_title
from steadykv.world.episodes import save_episodes
from steadykv.world.weights import save_world
from tests.codecs import sample_queries, sample_tokens
from tests.worlds import TINY, tiny_episodes, tiny_world

FIGURES = {
    "size.png", "parts.png", "sides.png", "spans.png", "layers.png", "heads.png",
    "shift-steps.png", "shift-spans.png", "shift-layers.png",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that put the tiny world in place of the shipped one."""
    folder = tmp_path_factory.mktemp("world")
    save_world(folder / "world.safetensors", TINY, tiny_world().state_dict(), {})
    save_episodes(folder / "walks.zip", tiny_episodes(3))
    options = {"--world": "world.safetensors", "--walks": "walks.zip"}
    return [word for name, file in options.items() for word in (name, str(folder / file))]


@pytest.fixture(scope="module")
def captured(world: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capture") / "walk.safetensors"
    assert main(["capture", *world, "--frames", "12", "--queries", "30", "--out", str(path)]) == 0
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- capture --------------------------------------------------------------------------------


def test_capture(world: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "walk.safetensors"
    code = main(["capture", *world, "--frames", "18", "--layers", "1", "--heads", "0-1", "--spans",
                 "0,2", "--queries", "9", "--episodes", "2", "--seed", "7", "--key-rope", "pre",
                 "--out", str(out)])  # fmt: skip
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert names(tmp_path) == {"walk.safetensors"}
    file = open_capture(out)
    assert file.header is not None
    assert file.cells == ((1, 0), (1, 2))
    assert file.header.rows == ({"episode": "walk-0", "seed": 7}, {"episode": "walk-1", "seed": 7})
    assert (file.header.key_rope, file.header.query_seed) == ("pre", 7)
    assert file.header.model["weights"] == "world.safetensors"
    assert file.shape((1, 0), "q") == (2, 2, 9, 32)
    predicted = re.search(r"predicted: at most ([\d.]+) MiB \(1 layer, 2 heads, 2 spans of 144 "
                          r"tokens, up to 9 later queries each\)", shown.err)  # fmt: skip
    assert predicted is not None, shown.err
    assert out.stat().st_size <= 2**20 * (float(predicted[1]) + 0.005)
    assert shown.err.index("predicted") < shown.err.index("walking (1/6)")
    assert shown.out.rstrip().endswith(f"capture: {out}")
    assert f"steadykv tensors {out}" in shown.out


def test_capture_as_json_in_a_dated_folder(
    world: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["capture", *world, "--frames", "6", "--span-chunks", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"results/capture-[\d-]+/capture.safetensors", found["file"])
    assert [span["queries"] for span in found["spans"]] == [256, 216, 0]
    assert found["nbytes"] == Path(found["file"]).stat().st_size
    header = open_capture(found["file"]).header
    assert header is not None
    assert json.loads(json.dumps(header.to_dict())).items() <= found.items()


@pytest.mark.parametrize(
    ("arguments", "got", "expected"),
    [
        (["--layers", "2"], "layers: got 2", "expected 0 to 1"),
        (["--layers", "one"], "--layers: got 'one'", "such as 0,2,5-7"),
        (["--heads", "3-1"], "--heads: got '3-1'", "such as 0,2,5-7"),
        (["--spans", ""], "--spans: got ''", "or all"),
        (["--spans", "4"], "spans: got 4", "expected 0 to 1"),
        (["--queries", "-1"], "--queries: got '-1'", "greater than or equal to 0"),
        (["--max-bytes", "much"], "--max-bytes: got 'much'", "such as 800MB"),
        (["--max-bytes", "10kB"], "expected at most 10,000", "--max-bytes"),
        (["--frames", "7"], "got 7", "multiple of 3"),
        (["--span-chunks", "9"], "span_chunks is 9", "at most 5"),
        (["--key-rope", "none"], "--key-rope: got 'none'", "post"),
        (["--episodes", "9"], "episodes: got 9", "from 0 to 2"),
        (["--device", "tpu"], "'tpu'", "cpu, cuda"),
        (["--out", "no/folder/file"], "no/folder", "is no folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_captured_is_refused_in_one_line(
    arguments: list[str],
    got: str,
    expected: str,
    world: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["capture", *world, "--frames", "12", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    *before, last = shown.err.splitlines()
    assert all(line.startswith("predicted: ") for line in before)
    assert last.startswith("steadykv: ")
    assert got in last
    assert expected in last
    assert not list(tmp_path.iterdir()), "a refused run left something behind"


@pytest.mark.parametrize("command", ["capture", "tensors"])
def test_an_existing_out_is_refused(
    command: str, captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.write_text("kept")
    arguments = [str(captured)] if command == "tensors" else []
    assert main([command, *arguments, "--out", str(out)]) == 2
    assert f"--out: got {out}, which exists" in capsys.readouterr().err
    assert out.read_text() == "kept"


# --- tensors --------------------------------------------------------------------------------


def test_tensors(captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "new" / "out", tmp_path / "cells.csv"
    parts = tmp_path / "parts.csv"
    tables = ["--rows", str(table), "--parts", str(parts)]
    code = main(["tensors", str(captured), *tables, "--out", str(out)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert names(out) == FIGURES | {"tensors.json", "report.html", "runs.jsonl"}
    found = json.loads((out / "tensors.json").read_text())
    assert found["version"] == 1
    assert [row["method"] for row in found["rows"]] == list(default_methods())
    stored = read_store(out / "runs.jsonl")
    assert [entry["row"]["method"] for entry in stored] == list(default_methods())
    assert stored[0]["configuration"]["file"] == found["file"]
    assert stored[0]["environment"] == found["environment"]
    for row in found["rows"]:
        assert method_title(row["method"]) in shown.out
        assert f"{row['bits_per_element']:.3f}" in shown.out
        assert f"{row['output_error']:.4f}" in shown.out
    assert " ".join(found["notes"][0].split()) in " ".join(shown.out.split())
    assert shown.out.rstrip().endswith(f"report: {out / 'report.html'}")
    with table.open() as file:
        cells = list(csv.DictReader(file))
    with parts.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for name in ("by_head", "by_step"):
        assert name not in cells[0]
        expected = [(cell["layer"], part) for cell in found["cells"] for part in cell[name]]
        own = [line for line in lines if line[name.removeprefix("by_")]]
        assert [(int(line["layer"]), float(line["softmax_kl"])) for line in own] == [
            (layer, part["softmax_kl"]) for layer, part in expected
        ]
    assert len(cells) == len(found["cells"]) == 4 * len(default_methods())
    assert [cell["method"] for cell in cells] == [cell["method"] for cell in found["cells"]]
    assert float(cells[0]["bits_by_part.keys.codes"]) == 2.0
    page = (out / "report.html").read_text()
    assert f"steadykv tensors {captured}" in page
    for name in FIGURES:
        picture = np.asarray(Image.open(out / name).convert("RGB"))
        assert picture.shape[1] == 990
        assert (picture == 255).all(axis=2).mean() > 0.3  # on white
        assert not ((picture[..., 0] == 0xFE) & (picture[..., 1] <= 2)).any(), "a placeholder"


def test_tensors_as_json_with_chosen_methods(
    captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = main(["tensors", str(captured), "--methods", "qvg", "bf16:kivi", "--centroids", "3",
                 "--json", "--out", str(out)])  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    stored = json.loads((out / "tensors.json").read_text())
    assert {name: found[name] for name in stored} == stored
    assert [row["method"] for row in found["rows"]] == ["qvg", "bf16:kivi"]
    assert found["rows"][0]["configuration"]["cache"]["keys"]["centroids"] == 3
    assert found["report"] == str(out / "report.html")


def test_widths_reach_the_codec_through_the_list_of_methods(
    captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method = "quarot@group_size=16+dim_splits=16x16"
    arguments = ["--methods", f"kivi,{method}", "--json", "--out", str(tmp_path / "out")]
    assert main(["tensors", str(captured), *arguments]) == 0
    kivi, rotated = json.loads(capsys.readouterr().out)["rows"]
    assert (kivi["method"], rotated["method"]) == ("kivi", method)
    assert rotated["configuration"]["cache"]["keys"]["dim_splits"] == [16, 16]


def test_a_users_own_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    k = sample_tokens()
    save_file({"k": k, "v": k + 1, "q": sample_queries(k)}, str(tmp_path / "own.safetensors"))
    out = tmp_path / "out"
    arguments = ["--methods", "kivi", "--out", str(out)]
    assert main(["tensors", str(tmp_path / "own.safetensors"), *arguments]) == 0
    assert names(out) == {
        "tensors.json",
        "report.html",
        "runs.jsonl",
        "size.png",
        "parts.png",
        "sides.png",
        "heads.png",
    }
    assert "One method on one captured span" in (out / "report.html").read_text()
    assert "KIVI" in capsys.readouterr().out


def test_a_users_file_without_queries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    k = sample_tokens()
    save_file({"k": k, "v": k + 1}, str(tmp_path / "own"))
    out = tmp_path / "out"
    assert main(["tensors", str(tmp_path / "own"), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "the file has no q" in shown.out
    assert "top-1" not in shown.out
    assert names(out) == {"tensors.json", "report.html", "runs.jsonl", "size.png", "parts.png"}
    page = (out / "report.html").read_text()
    assert "the file has no q" in page
    assert "output, K" not in page


BAD_FILES = {
    "missing": (None, "got no readable safetensors file"),
    "folder": ("folder", "got a folder, expected a safetensors file"),
    "text": (b"this is no safetensors file at all", "got no readable safetensors file"),
    "one tensor": ({"k": sample_tokens()}, "it lacks v"),
    "wrong names": ({"x": sample_tokens()}, "got tensors x; expected k and v"),
    "NaN": ({"k": sample_tokens() * float("nan"), "v": sample_tokens()}, "NaN or Inf"),
    "unequal": ({"k": sample_tokens(), "v": sample_tokens(tokens=7)}, "v is [1, 2, 7, 64] BF16"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_gets_one_line_and_code_two(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, expected = BAD_FILES[name]
    path = tmp_path / "file"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.mkdir()
    elif content is not None:
        save_file(content, str(path))
    before = names(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["tensors", str(path), "--methods", "kivi"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith(f"steadykv: {path}: ")
    assert expected in shown.err
    assert names(tmp_path) == before, "a refused run left something behind"


@pytest.mark.parametrize(
    ("arguments", "got", "expected"),
    [
        (["--methods", "qvq"], "'qvq'", "quantwm"),
        (["--methods", "qvg", "qvg"], "'qvg', 'qvg'", "none twice"),
        (["--methods", ""], "unknown method ''", "known are"),
        (["--centroids", "0"], "'0'", "greater than or equal to 1"),
        (["--centroids", "70000"], "70000", "65536"),
        (["--device", "tpu"], "'tpu'", "cpu, cuda"),
        (["--rows", "no/such/rows.csv"], "no/such", "is no folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_gets_one_line_and_code_two(
    arguments: list[str],
    got: str,
    expected: str,
    captured: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tensors", str(captured), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("steadykv: ")
    assert got in shown.err
    assert expected in shown.err
    assert not list(tmp_path.iterdir())


# --- interruption ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["capture", "tensors"])
def test_ctrl_c_leaves_nothing(
    command: str, world: list[str], captured: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results" / "out"
    out.parent.mkdir()
    arguments = [*world, "--frames", "54"]
    if command == "tensors":
        k = torch.randn(1, 4, 3000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        spans = {f"layer0/span{i}/{part}": k + i for i in range(20) for part in "kv"}
        save_file(spans, str(tmp_path / "large"))
        arguments = [str(tmp_path / "large")]
    running = subprocess.Popen(
        [sys.executable, "-m", "steadykv.cli.main", command, *arguments, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert running.stderr is not None
    line = ""
    while not re.search(r"\(\d+/\d+\)$", line):  # the first step has begun
        assert running.poll() is None, running.communicate()
        line = running.stderr.readline().rstrip()
    running.send_signal(signal.SIGINT)
    printed, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert printed == ""
    assert said.splitlines()[-1] == "steadykv: interrupted; nothing was finished yet"
    assert "Traceback" not in said
    assert not list(out.parent.iterdir())
