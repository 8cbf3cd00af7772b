"""The tables of docs/memory.md are those of the committed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import memory_long, memory_table
from benchmarks.files import csv_rows

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("name", "window", "count"), [("memory-rooms", 24, 4), ("memory-rooms-bytes", 18, 3)]
)
def test_returns_are_as_the_rows_say(name: str, window: int, count: int) -> None:
    """The last `count` lines of a table; the copies of true frames are shown once."""
    text = memory_table.summary(csv_rows(RESULTS / f"{name}.csv.gz"), ("bf16", window))
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) > count
    for line in lines[-count:]:
        assert line in PAGE


def test_turning_is_as_the_rows_say() -> None:
    text = memory_long.table(csv_rows(RESULTS / "memory-rooms-turns.csv.gz"), ("bf16", 24))
    lines = [line for line in text.splitlines() if line.startswith("| bf16")]
    assert len(lines) == 4
    for line in lines:
        assert line in PAGE
