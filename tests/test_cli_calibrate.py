"""`calibrate`, and what `tensors` and `compare` do with it, on a tiny world."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from steadykv.capture import calibrate, open_capture
from steadykv.cli.main import main
from steadykv.codecs import Calibration
from steadykv.config import preset
from steadykv.evaluation.results import read_metrics
from steadykv.evaluation.tensor_comparison import default_methods
from steadykv.world.episodes import save_episodes
from steadykv.world.weights import save_world
from tests.codecs import sample_tokens
from tests.worlds import TINY, tiny_episodes, tiny_world

CONFIG = preset("kvquant_calibrated")
METHODS = ["--methods", "kvquant", "kvquant_calibrated"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibrate")


@pytest.fixture(scope="module")
def world(folder: Path) -> list[str]:
    """Options that put the tiny world in place of the shipped one."""
    save_world(folder / "world.safetensors", TINY, tiny_world().state_dict(), {})
    save_episodes(folder / "walks.zip", tiny_episodes(4))
    options = {"--world": "world.safetensors", "--walks": "walks.zip"}
    return [word for name, file in options.items() for word in (name, str(folder / file))]


@pytest.fixture(scope="module")
def files(folder: Path, world: list[str]) -> dict[str, str]:
    """Captures of walks 0 (judged) and 1 to 2 (fitted), and calibrations of the latter."""
    captures = {
        "judged": ["--episodes", "1"],
        "fit": ["--first-walk", "1", "--episodes", "2"],
        "one layer": ["--first-walk", "1", "--layers", "1"],
        "one head": ["--first-walk", "1", "--heads", "0"],
        "other head": ["--episodes", "1", "--heads", "1"],
        "pre": ["--first-walk", "1", "--key-rope", "pre"],
    }
    found = {}
    for name, options in captures.items():
        found[name] = str(folder / f"{name}.safetensors")
        arguments = [*world, "--frames", "3", "--queries", "0", "--out", found[name]]
        assert main(["capture", *options, *arguments]) == 0
    for name in ("fit", "one layer", "one head", "pre"):
        found[f"{name} fitted"] = str(folder / f"{name} fitted.safetensors")
        calibrate(open_capture(found[name]), CONFIG).save(found[f"{name} fitted"])
    return found


# --- calibrate ------------------------------------------------------------------------------------


def test_calibrate(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "calibration.safetensors"
    assert main(["calibrate", files["fit"], "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert [entry.name for entry in tmp_path.iterdir()] == [out.name]
    loaded = Calibration.load(out)
    expected = calibrate(open_capture(files["fit"]), CONFIG)
    assert loaded.grids.keys() == expected.grids.keys()
    assert [row["episode"] for row in loaded.source["rows"]] == ["walk-1", "walk-2"]
    assert loaded.key_rope == "post"
    lines = [line.split() for line in shown.out.splitlines()]
    for (layer, tensor), grid in expected.grids.items():
        levels = [f"{level:+.3f}" for level in grid.tensors["stored_levels"].tolist()]
        assert [str(layer), tensor, "288", *levels] in lines
    assert f"--calibration {out}" in shown.out
    assert shown.out.rstrip().endswith(f"calibration: {out}")
    assert "compare needs all" not in shown.out
    assert "layer 1 (1/2)" in shown.err


def test_calibrate_as_json_in_a_dated_folder(
    files: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    method = "kvquant_calibrated@bits=3:bf16"
    assert main(["calibrate", files["one layer"], "--method", method, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"results/calibrate-[\d-]+/calibration.safetensors", found["file"])
    assert found["nbytes"] == Path(found["file"]).stat().st_size
    (grid,) = found["grids"]
    assert (grid["layer"], grid["tensor"], len(grid["levels"])) == (1, "key", 8)
    assert (found["method"], found["key_rope"], found["source"]["layers"]) == (method, "post", [1])


def test_a_part_of_a_model_is_said_to_be_one(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", files["one head"], "--out", str(tmp_path / "c")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "The capture has 1 of 2 heads: for tensors of the same ones; compare needs all" in shown


@pytest.mark.parametrize(
    ("arguments", "got", "expected"),
    [
        (["--method", "kvquant"], "'kvquant' needs no calibration", "kvquant_calibrated"),
        (["--method", "kvq"], "'kvq'", "known are"),
        (["--method", "kvquant_calibrated@rank=4"], "'rank'", "a field read here"),
        (["--out", "exists"], "--out: got exists, which exists", "choose a new file"),
        (["--out", "no/folder/file"], "no/folder", "is no folder"),
        (["--device", "tpu"], "'tpu'", "cpu, cuda"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_gets_one_line_and_code_two(
    arguments: list[str],
    got: str,
    expected: str,
    files: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exists").write_text("kept")
    assert main(["calibrate", files["fit"], *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert got in shown.err
    assert expected in shown.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["exists"]
    assert (tmp_path / "exists").read_text() == "kept"


def test_bad_captures_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    k = sample_tokens(tokens=2)
    save_file({"k": k, "v": k + 1}, "short")
    for name, words in (("absent", "no readable safetensors file"), ("short", "got 2 tokens")):
        assert main(["calibrate", name]) == 2
        shown = capsys.readouterr()
        assert words in shown.err.splitlines()[-1]
        assert [entry.name for entry in tmp_path.iterdir()] == ["short"]


# --- tensors --------------------------------------------------------------------------------------


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["tensors", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_tensors_of_other_walks(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*METHODS, "--calibration", files["fit fitted"], "--out", str(tmp_path / "out")]
    found = compared(capsys, files["judged"], *given)
    online, fixed = found["rows"]
    assert fixed["bits_per_element"] == online["bits_per_element"]
    assert fixed["key_error"] > online["key_error"]  # other walks, other ranges
    assert fixed["key_error"] < 2 * online["key_error"]
    assert fixed["configuration"]["calibration"] == {
        "file": "fit.safetensors", "key_rope": "post", "tokens": 288, "shared_walks": [],
    }  # fmt: skip
    assert "calibration" not in online["configuration"]
    assert not any("calibrated on walks" in note for note in found["notes"])


def test_tensors_of_the_same_walks_are_said_to_be_that(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*METHODS, "--calibration", files["fit fitted"], "--out", str(tmp_path / "out")]
    found = compared(capsys, files["fit"], *given)
    (note,) = (note for note in found["notes"] if "calibrated on walks" in note)
    assert note.startswith("kvquant_calibrated was calibrated on walks that it is judged on here")
    assert "walk-1; walk-2" in note


def test_a_calibration_adds_the_method_that_reads_it(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--calibration", files["one layer fitted"], "--out", str(tmp_path / "out")]
    found = compared(capsys, files["one layer"], *given)
    methods = [row["method"] for row in found["rows"]]
    assert methods == list(default_methods(is_calibrated=True))
    assert set(methods) == {*default_methods(), "kvquant_calibrated"}
    assert not found["skipped"]


@pytest.mark.parametrize(
    ("judged", "fitted", "methods", "words"),
    [
        ("judged", None, METHODS, ("'kvquant_calibrated' needs a calibration", "--calibration")),
        ("judged", "fit fitted", ["--methods", "kvquant"], ("none of kvquant reads it",)),
        ("judged", "one layer fitted", METHODS, ("layer 0 key: ", "a calibration without it")),
        ("judged", "one head fitted", METHODS, ("for 1 heads of 32, got 2 of 32",)),
        ("other head", "one head fitted", METHODS, ("on heads [0], got heads [1]",)),
        ("judged", "pre fitted", METHODS, ("keys before their rotary", "--key-rope post")),
        (
            "judged",
            "fit fitted",
            ["--methods", "kvquant_calibrated@bits=3"],
            ("calibrated for bits=2 (got 3)",),
        ),
        ("judged", "fit", METHODS, ("is not a calibration file",)),
        ("judged", "absent", METHODS, ("absent", "No such file")),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused_by_name(
    judged: str,
    fitted: str | None,
    methods: list[str],
    words: tuple[str, ...],
    files: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [] if fitted is None else ["--calibration", files.get(fitted, fitted)]
    assert main(["tensors", files[judged], *methods, *given]) == 2
    refused(capsys, tmp_path, *words)


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> None:
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.splitlines()[-1]
    assert last.startswith("steadykv: ")
    assert all(word in last for word in words), last
    assert not list(folder.iterdir()), "a refused run left something behind"


# --- compare --------------------------------------------------------------------------------------


def test_compare(
    files: dict[str, str], world: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = ["--calibration", files["fit fitted"], "--frames", "9", "--episodes", "2"]
    options = ["--first-walk", "2", "--no-floor", "--out", str(out)]
    code = main(["compare", *world, *METHODS, *given, *options])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    bf16, online, fixed = read_metrics(out)
    assert fixed["method"] == "kvquant_calibrated"
    assert fixed["bits_per_element"] == online["bits_per_element"]
    assert fixed["psnr"] != online["psnr"]
    assert fixed["top1_shift"] != online["top1_shift"]
    assert bf16["configuration"]["episodes"] == ["walk-2", "walk-3"]
    assert fixed["configuration"]["calibration"]["shared_walks"] == ["walk-2"]
    hint = "The calibration was fitted to walks of this comparison (walk-2)"
    assert hint in " ".join(shown.out.split())


@pytest.mark.parametrize(
    ("fitted", "arguments", "words"),
    [
        (None, METHODS, ("'kvquant_calibrated' needs a calibration", "--calibration FILE")),
        ("fit fitted", ["--methods", "kvquant"], ("none of bf16, kvquant reads it",)),
        ("one layer fitted", METHODS, ("layer 0 key: ", "a calibration without it")),
        ("one head fitted", METHODS, ("for 1 heads of 32, got 2 of 32",)),
        ("pre fitted", METHODS, ("keys before their rotary", "--key-rope post")),
        ("fit fitted", [*METHODS, "--key-rope", "pre"], ("--key-rope pre",)),
        ("absent", METHODS, ("absent", "No such file")),
        ("fit fitted", [*METHODS, "--first-walk", "3"], ("[3, 4]", "from 0 to 3")),
    ],
)
def test_what_does_not_fit_a_comparison_is_refused(
    fitted: str | None,
    arguments: list[str],
    words: tuple[str, ...],
    files: dict[str, str],
    world: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [] if fitted is None else ["--calibration", files.get(fitted, fitted)]
    assert main(["compare", *world, *arguments, *given, "--frames", "9", "--episodes", "2"]) == 2
    refused(capsys, tmp_path, *words)
