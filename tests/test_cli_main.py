"""The command line without a run: parsing, help, versions, and one line for every mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import steadykv
from steadykv.cli.app import app
from steadykv.cli.common import claim, command_text, expand_lists, new_folder, report_failure
from steadykv.cli.main import main
from steadykv.cli.options import METHODS_HELP
from steadykv.config import PRESETS
from steadykv.errors import ConfigError


@pytest.mark.parametrize(
    ("typed", "expanded"),
    [
        (["demo", "--methods", "a", "b"], ["demo", "--methods", "a", "--methods", "b"]),
        (["demo", "--methods", "a,b:c"], ["demo", "--methods", "a", "--methods", "b:c"]),
        (
            ["demo", "--methods=a,b", "--json"],
            ["demo", "--methods", "a", "--methods", "b", "--json"],
        ),
        (
            ["--methods", "a", "--frames", "6", "--methods", "b"],
            ["--methods", "a", "--frames", "6", "--methods", "b"],
        ),
        (["demo", "--frames", "6"], ["demo", "--frames", "6"]),
        (["demo", "--methods"], ["demo", "--methods"]),
        ([], []),
    ],
)
def test_lists_of_methods(typed: list[str], expanded: list[str]) -> None:
    assert expand_lists(typed) == expanded


def test_the_command_can_be_typed_again() -> None:
    assert command_text(["demo", "--out", "a b"]) == "steadykv demo --out 'a b'"


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_waiting_threads_do_not_spin_unless_told_to(given: str | None, expected: str) -> None:
    """OpenMP reads it when torch loads, so that it has to be there before."""
    code = (
        "import os, sys; sys.argv = ['steadykv', '--version']; import steadykv.cli.main as c; "
        "assert 'torch' not in sys.modules; c.main(); print(os.environ['OMP_WAIT_POLICY'])"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {} if given is None else {"OMP_WAIT_POLICY": given}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == expected


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"steadykv {steadykv.__version__}\n"
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        shown = capsys.readouterr()
        commands = ("demo", "compare", "capture", "tensors", "env")
        assert all(command in shown.out for command in commands)
        assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "got", "expected"),
    [
        (["demo", "--methods", "bf16", "qvq"], "'qvq'", "quantwm"),
        (["demo", "--methods", "qvg:nope"], "'nope'", "quantwm"),
        (["demo", "--methods", "qvg", "qvg"], "'qvg', 'qvg'", "none twice"),
        (["compare", "--methods", "kvquant_calibrated"], "needs a calibration", "kvquant"),
        (["demo", "--methods"], "--methods", "requires an argument"),
        (["demo", "--frames", "many"], "'many'", "integer"),
        (["demo", "--frames=0"], "'0'", "greater than or equal to 1"),
        (["demo", "--seed", "-1"], "'-1'", "greater than or equal to 0"),
        (["demo", "--centroids", "70000"], "70000", "65536"),
        (["demo", "--device", "tpu"], "'tpu'", "cpu, cuda"),
        (["demo", "--nonsense"], "--nonsense", "--help"),
        (["demo", "more"], "more", "--help"),
        (["walk"], "walk", "--help"),
        (["demo", "--keys", "qvg"], "--keys: got 'qvg'", "add --values"),
        (["compare", "--values", "kivi"], "--values: got 'kivi'", "add --keys"),
        (["demo", "--keys", "qvg", "--values", "nope"], "'nope'", "quantwm"),
        (["compare", "--seeds", "0"], "'0'", "greater than or equal to 1"),
        (["compare", "--methods", "qvg", "floor"], "--methods: got 'floor'", "option of its own"),
        (["measure", "a", "b", "--device", "cpu:9"], "--device: got 'cpu:9'", "use --device cpu"),
        (["compare", "--seeds", "9" * 20], "99'", "less than or equal to 10000"),
        (["ablate", "policy", "--seeds", "1000000000"], "00'", "less than or equal to 10000"),
        (["compare", "--episodes", "1000000000", "--first-walk", "1"], "00'", "equal to 100000"),
        (["compare", "--dtype", "half"], "'half'", "bfloat16"),
        (["compare", "--paired", "rtn"], "'rtn'", "quantwm"),
        (["compare", "--rows", "no/such/folder.csv"], "no/such", "is no folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_gets_one_line_and_code_two(
    arguments: list[str],
    got: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("steadykv: ")
    assert got in shown.err
    assert expected in shown.err
    assert not list(tmp_path.iterdir()), "a refused run left something behind"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_an_existing_out_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    elif kind == "file":
        out.touch()
    else:
        out.symlink_to(tmp_path / "nowhere")
    assert main(["demo", "--out", str(out)]) == 2
    shown = capsys.readouterr()
    assert f"got {out}, which exists" in shown.err
    assert "expected a new folder" in shown.err


def test_an_existing_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("kept")
    assert main(["compare", "--out", str(tmp_path / "out"), "--rows", str(rows)]) == 2
    assert str(rows) in capsys.readouterr().err
    assert rows.read_text() == "kept"


def test_dated_folders_never_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = set()
    for _ in range(3):
        folder = new_folder(None, "demo")
        folder.mkdir(parents=True)
        made.add(folder)
    assert len(made) == 3
    assert all(str(folder).startswith("results/demo-20") for folder in made)


def test_env_as_json_names_versions_devices_and_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steadykv"] == steadykv.__version__
    assert found["packages"]["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu"
    assert {"op", "backend", "reason"} <= found["devices"][0]["ops"][0].keys()


def test_env_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "reference" in shown
    assert torch.__version__ in shown


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a user can mend becomes one line."""

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("steadykv.cli.env.describe", broken)
    with pytest.raises(ZeroDivisionError):
        main(["env"])


def test_help_names_every_preset() -> None:
    assert all(name in METHODS_HELP for name in PRESETS)


@pytest.mark.parametrize("command", ["compare", "demo", "capture", "tensors"])
def test_out_of_memory_names_only_options_of_the_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_failure(MemoryError("none left"), [command]) == 2
    named = set(re.findall(r"--[a-z]+", capsys.readouterr().err))
    known = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    assert named
    assert named <= {option for param in known for option in param.opts}
    assert ("--batch" in named) == (command == "compare")


def test_an_interrupt_that_the_parser_swallows_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("steadykv.cli.env.describe", interrupted)
    assert main(["env"]) == 130
    assert capsys.readouterr().err == "steadykv: interrupted\n"


def test_version_needs_no_torch() -> None:
    """Help, version and refused arguments must not wait for heavy imports."""
    program = (
        "import sys; from steadykv.cli.main import main; main(['--version']);"
        "print(sorted({'torch', 'matplotlib', 'av'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[1:] == ["[]"], done.stderr


@pytest.mark.parametrize(
    "typed", [["--methods", ""], ["--methods="], ["--methods", ","], ["--methods", "--frames", "6"]]
)
def test_an_empty_list_of_methods_is_refused(typed: list[str]) -> None:
    assert "" in expand_lists(["demo", *typed])


def test_a_folder_is_claimed_once(tmp_path: Path) -> None:
    claim(tmp_path / "results" / "one")
    with pytest.raises(ConfigError, match="another run"):
        claim(tmp_path / "results" / "one")
