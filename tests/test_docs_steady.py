"""The targets' tables of docs/steady.md are what `benchmarks.thresholds` says of the rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import thresholds
from benchmarks.files import csv_rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "steady.md").read_text(encoding="utf-8")
FORM = "steady@centroids=16:steady@centroids=16+refinement=1"
BEFORE = "steady@centroids=16+refinement=1:steady@centroids=16"
# (a heading's columns, their rows, the method at each one's bits)
TABLES = {
    "## Targets": (
        ["steady-mazes", "steady-mazes-pre", "steady-rooms", "steady-rooms-pre"],
        {"quantwm": "steady", "qvg": FORM},
    ),
    "### Keys before RoPE": (
        ["steady-mazes-pre-values", "steady-rooms-pre-values"],
        {"qvg": BEFORE},
    ),
}
NAMES = {"quantwm": "quantwm", "qvg": "qvg"}
COLUMNS = [(title, at) for title, (names, _) in TABLES.items() for at in range(len(names))]


def shown(title: str, column: int) -> list[str]:
    """The cells of a column of the first table below a heading, without those that are empty."""
    part = PAGE.split(f"\n{title}\n")[1]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    table = lines[: next((i for i, line in enumerate(lines) if i and "| target |" in line), None)]
    cells = [[cell.strip() for cell in line[1:-1].split("|")][2 + column] for line in table[1:]]
    return [cell for cell in cells if cell]


@pytest.mark.parametrize(("title", "column"), COLUMNS)
def test_every_target_is_judged_as_the_page_says(title: str, column: int) -> None:
    names, methods = TABLES[title]
    stem = RESULTS / names[column]
    found = thresholds.Measured()
    found.add_bits(csv_rows(stem.with_suffix(".csv")), stem)
    found.add_run(Path(f"{stem}-rollouts.json.gz"), 6)
    found.add_attention(Path(f"{stem}-attention.csv.gz"))
    wanted = []
    for row in thresholds.judge(found, methods, NAMES):
        assert row["verdict"] in ("pass", "fail")
        if row["measure"] == "bits":
            assert row["verdict"] == "pass"
            continue
        value, low, high = row["value"], row["low"], row["high"]
        form = ".3f" if row["kind"] == "ratio" else ".2f"
        sign = "" if row["kind"] == "ratio" else "+"
        text = f"{value:{sign}{form}} ({low:{form}} to {high:{form}})"
        wanted.append(f"**{text}**" if row["verdict"] == "fail" else text)
    assert [re.sub("−", "-", cell) for cell in shown(title, column)] == wanted
