"""The tables of docs/memory.md are those of the committed rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import memory_curves, memory_long, memory_table
from benchmarks.files import csv_rows

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("name", "window", "count"),
    [
        ("", 24, 4),
        ("-buttons", 24, 2),
        ("-packed", 123, 5),
        ("-bytes-18", 18, 4),
        ("-bytes-24", 24, 4),
    ],
)
def test_returns_are_as_the_rows_say(name: str, window: int, count: int) -> None:
    """The last `count` lines of a table; the copies of true frames are shown once."""
    rows = csv_rows(RESULTS / f"memory-rooms{name}.csv.gz")
    text = memory_table.summary(rows, ("bf16", window))
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) > count
    for line in lines[-count:]:
        assert line in PAGE


@pytest.mark.parametrize("away", [(0, 12), (12, 24), (24, 36), (36, 48)])
def test_what_comes_back_near_by_is_as_the_rows_say(away: tuple[float, float]) -> None:
    rows = memory_table.within(csv_rows(RESULTS / "memory-rooms.csv.gz"), *away)
    text = memory_table.summary(rows, ("bf16", 24)).splitlines()
    short, long = ([c.strip() for c in line.split("|")] for line in text if "| bf16" in line)
    walks, moments = re.search(r"(\d+) walks, (\d+) moments", text[-1]).groups()
    line = f"| {moments} | {walks} | {short[4]} | {long[4]} | {long[6]} | {long[7]} |"
    assert line in PAGE


@pytest.mark.parametrize(("name", "count"), [("turns", 12), ("walking", 6)])
def test_long_rollouts_are_as_the_rows_say(name: str, count: int) -> None:
    text = memory_long.table(csv_rows(RESULTS / f"memory-rooms-{name}.csv.gz"), ("bf16", 18))
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == count
    for line in lines:
        assert line in PAGE


@pytest.mark.parametrize(("name", "count"), [("turns", 4), ("walking", 2)])
def test_drifts_are_as_the_rows_say(name: str, count: int) -> None:
    text = memory_curves.table(csv_rows(RESULTS / f"memory-rooms-{name}.csv.gz"), ("bf16", 18))
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == count
    for line in lines:
        assert line in PAGE
