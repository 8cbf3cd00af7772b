"""`steadykv plan`: the table, its width, JSON, the lists, and one line for every mistake."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from steadykv.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
SHOWN = re.compile(r"^```console\n\$ steadykv (plan [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

ASKED = ["plan", "--model", "lingbot-v2", "--frames", "93", "--resolution", "480p"]


@pytest.mark.parametrize("width", [80, 140])
def test_a_plan_fits_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([*ASKED, "--gpu", "rtx4090", "--weight-dtype", "fp8"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in shown.out
    assert any(line.startswith(" quantwm ") and "fits, " in line for line in lines)
    assert any(line.startswith(" bf16 ") and "too much" in line for line in lines)
    assert "weights 13.039 GiB, assumed: 14e9 parameters" in shown.out
    titles = next(line.split() for line in lines if line.split()[:1] == ["cache"])
    assert ("packing" in titles) == (width == 140)
    assert shown.err == ""


def test_without_a_gpu_there_is_no_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = ["--condition-frames", "73", "--methods", "bf16", "qvg", "quantwm"]
    assert main(["plan", "--model", "longcat", *options]) == 0
    shown = capsys.readouterr().out
    assert "21.709" in shown
    assert "3.625" in shown
    assert "6.88×" in shown
    assert "fits" not in shown


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "24GiB", "--parameters", "1.3B", "--methods", "qvg,quantwm:bf16", "--json"]
    assert main([*ASKED, *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in data["methods"]] == ["qvg", "quantwm:bf16"]
    assert data["weights_bytes"] == 2_600_000_000
    assert data["gpu"]["mib"] == 24 * 1024
    assert data["latents"] == 24


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"lingbot-world-v2-14b", "longcat-video-13.6b"} <= {m["id"] for m in data["models"]}
    assert {"rtx4090", "h200"} <= {gpu["id"] for gpu in data["gpus"]}
    assert main(["plan"]) == 0
    shown = capsys.readouterr().out
    assert "lingbot-world-v2-14b" in shown
    assert "rtx4090" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "lingbot-v3"], "lingbot-world-v2-14b"),
        (["--gpu", "rtx4080"], "rtx4090"),
        (["--resolution", "1080p"], "480x832 or 720x1280"),
        (["--parameters", "many"], "--parameters: got 'many'"),
        (["--frames", "0"], "'0'"),
        (["--span-chunks", "8"], "span_chunks is 8"),
        (["--methods", "nope"], "'nope'"),
    ],
)
def test_a_mistake_gets_one_line_and_code_two(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("steadykv: ")
    assert message in shown.err


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_columns_without_room_are_named(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cut off: each title is in the table or in the line that says what is not."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*ASKED, "--gpu", "rtx4090"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in shown
    title = next(n for n, line in enumerate(lines) if line.split()[:1] == ["cache"])
    table = set(lines[title].split())
    joined = " ".join(lines)
    missing = re.search(r"no room in \d+ characters for: (.*?);\s+--json", joined)
    named = set(re.split(r",\s+", missing[1])) if missing else set()
    every = {"bits", "packed", "dense", "queries", "held", "smaller", "window", "packing", "peak"}
    assert every <= table | named
    assert not every & table & named
    assert (missing is None) == (columns == 140)


@pytest.mark.parametrize(("page", "count"), [("README.md", 1), ("docs/plan.md", 3)])
def test_pages_show_what_the_command_prints(
    page: str,
    count: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = SHOWN.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(shown) == count
    for command, text in shown:
        assert main(shlex.split(command)) == 0
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert printed == text.splitlines()
