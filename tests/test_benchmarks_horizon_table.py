"""`python -m benchmarks.horizon_table`: distances and means by hand."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pytest

from benchmarks import horizon_table

STATISTICS = {("bf16", 0): (10.0, 20.0), ("bf16", 1): (13.0, 21.0), ("qvg", 0): (11.0, 24.0),
              ("qvg", 1): (13.0, 20.0)}  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two seeds of one walk, two windows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["method", "measure", "part", "value", "walk", "seed"])
    writer.writeheader()

    def row(method: str, measure: str, part: object, value: float, seed: int) -> None:
        writer.writerow({"method": method, "measure": measure, "part": part, "value": value,
                         "walk": 7, "seed": seed})  # fmt: skip

    for (method, seed), values in STATISTICS.items():
        for part, value in zip((6, 54), values, strict=True):
            row(method, "mean_red.values", part, value, seed)
            if method == "qvg":
                row(method, "psnr", part, 30.0 + seed - part / 6, seed)
        row(method, "revisit.same.psnr", "within", 25.0 + seed, seed)
        row(method, "revisit.control.psnr", "within", 21.0, seed)
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(text.getvalue().encode()))
    return path


def test_the_table_by_hand(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    horizon_table.main([str(rows)])
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    head, found = lines[0], {line[0]: line[1:] for line in lines[2:]}
    assert head == ["measure", "bf16", "qvg", "bf16, other seed"]
    # |11 - 10| and |24 - 20|, then |13 - 13| and |20 - 21|; bf16 from itself |13 - 10|, |21 - 20|.
    bf16, qvg, other = found["mean_red, distance"]
    assert (bf16, qvg, other) == ("", "1.5", "2")
    assert found["PSNR from frame 6, dB"][1] == "29.5"
    assert found["PSNR from frame 54, dB"][1] == "21.5"
    assert found["revisits less controls within the window, dB"][0] == "4.5"


def test_the_committed_rows_are_read() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "horizon-h200.csv.gz"
    text = horizon_table.table(horizon_table.read(path))
    assert "| measure | bf16 | floor | qvg | quantwm | steady | bf16, other seed |" in text
