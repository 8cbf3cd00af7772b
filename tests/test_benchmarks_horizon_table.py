"""`python -m benchmarks.horizon_table`: distances, drifts and verdicts by hand."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import horizon_table

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "horizon-h200.csv.gz"
STATISTICS = {("bf16", 0): (10.0, 20.0), ("bf16", 1): (13.0, 21.0), ("qvg", 0): (11.0, 24.0),
              ("qvg", 1): (13.0, 20.0)}  # fmt: skip
Row = tuple[str, str, object, float, int, int]
"""Method, measure, part, value, walk, seed."""


def written(folder: Path, rows: Iterable[Row]) -> Path:
    """A file as benchmarks.horizon writes it, gzipped."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["method", "measure", "part", "value", "walk", "seed"])
    writer.writerows(rows)
    path = folder / "rows.csv.gz"
    path.write_bytes(gzip.compress(text.getvalue().encode()))
    return path


def printed(path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, dict[str, str]]]:
    """By table: measure -> head of a column -> cell."""
    horizon_table.main([str(path)])
    found = []
    for block in capsys.readouterr().out.split("\n\n"):
        head, _, *lines = (
            [c.strip() for c in line[1:-2].split("|")] for line in block.splitlines()
        )
        found.append({line[0]: dict(zip(head[1:], line[1:], strict=True)) for line in lines})
    return found


def test_distances_and_revisits_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Row] = []
    for (method, seed), values in STATISTICS.items():
        for part, value in zip((6, 54), values, strict=True):
            rows.append((method, "mean_red.values", part, value, 7, seed))
            if method == "qvg":
                rows.append((method, "psnr", part, 30.0 + seed - part / 6, 7, seed))
                rows.append(("quantwm", "psnr", part, 20.0 + part, 7, seed))
        rows.append((method, "revisit.same.psnr", "within", 25.0 + seed, 7, seed))
        rows.append((method, "revisit.control.psnr", "within", 21.0, 7, seed))
    near, _ = printed(written(tmp_path, rows), capsys)
    # |11 - 10| and |24 - 20|, then |13 - 13| and |20 - 21|; bf16 from itself |13 - 10|, |21 - 20|.
    assert near["mean_red, distance"] == {
        "bf16, 1 walks": "", "qvg, 1 walks": "1.5", "bf16, other seed": "2"
    }  # fmt: skip
    assert near["PSNR from frame 6, dB"]["qvg, 1 walks"] == "29.5"
    assert near["PSNR from frame 54, dB"]["qvg, 1 walks"] == "21.5"
    assert near["PSNR from frame 6 above quantwm, dB"]["qvg, 1 walks"] == "3.5"
    assert near["PSNR from frame 54 above quantwm, dB"]["qvg, 1 walks"] == "-52.5"
    assert near["revisits less controls within the window, dB"]["bf16, 1 walks"] == "4.5"


# --- drift beyond bf16 ----------------------------------------------------------------------------

WALKS = range(8)
SPREADS = [2.0, 6.0] * 4
"""By walk, 4 in the mean: how far the drifts of bf16's two seeds are apart, to either side."""
BEYOND = {
    "inside": [1.0] * 8,
    "outside": [9.0] * 8,
    "less": [-9.0] * 8,
    "mean_below": [0.0, 6.0] * 4,
    "mean_above": [8.0, 2.0] * 4,
    "as_spread": SPREADS,
    "few": [1.0] * 5,
    "floor": [1.0] * 7,
}
"""Drift beyond bf16, by method and walk; of "floor", only rollouts with seed 1."""


def drift_of_bf16(walk: int, seed: int) -> float:
    return 20.0 + seed * SPREADS[walk] * (1 if walk // 2 % 2 else -1)


def drifting() -> list[Row]:
    """Three windows; changes to both sides, whose mean absolute one is the drift wanted."""
    drifts = {("bf16", walk, seed): drift_of_bf16(walk, seed) for walk in WALKS for seed in (0, 1)}
    for method, beyond in BEYOND.items():
        for walk, own in enumerate(beyond):
            for seed in (1,) if method == "floor" else (1, 0):
                drifts[method, walk, seed] = drift_of_bf16(walk, seed) + own
    rows: list[Row] = []
    for (method, walk, seed), drift in drifts.items():
        for part, change in ((6, 0.0), (54, -drift), (102, 2 * drift)):
            rows.append((method, "mean_red.change", part, change, walk, seed))
            rows.append((method, "mean_red.values", part, 50 + change, walk, seed))
        if method != "bf16":
            rows.append((method, "psnr", 6, 30.0, walk, seed))
    return rows


def test_drift_beyond_bf16_is_judged_by_its_whole_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, beyond = printed(written(tmp_path, drifting()), capsys)
    cells = {head.split(",")[0]: cell for head, cell in beyond["mean_red, drift"].items()}
    assert "floor, 7 walks, beyond bf16" in beyond["mean_red, drift"]
    assert cells["bf16"].startswith("20 (")
    assert cells["seed spread of bf16"].startswith("4 (")
    assert cells["inside"] == "+1 (1 to 1) within"
    assert cells["less"] == "-9 (-9 to -9) within"
    assert cells["outside"] == "+9 (9 to 9) beyond"
    # Means on one side of the spread of 4, an end of the interval on the other.
    assert cells["mean_below"].startswith("+3 (")
    assert cells["mean_below"].endswith(") not shown")
    assert cells["mean_above"].startswith("+5 (")
    assert cells["mean_above"].endswith(") not shown")
    assert cells["few"] == "+1 (1 to 1) not shown", "five walks make no interval"
    assert cells["floor"] == "+1 (1 to 1)", "paired with seed 1, and not judged"


def test_each_walks_own_spread_is_taken_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, beyond = printed(written(tmp_path, drifting()), capsys)
    found = beyond["mean_red, beyond less spread"]
    cells = {head.split(",")[0]: cell for head, cell in found.items()}
    assert cells["as_spread"] == "+0 (0 to 0)"
    assert cells["outside"].startswith("+5 (")
    assert cells["bf16"] == cells["seed spread of bf16"] == ""


def test_three_seeds_make_three_pairs() -> None:
    drifts = {("bf16", 3, 0): 1.0, ("bf16", 3, 1): 2.0, ("bf16", 3, 2): 5.0, ("bf16", 4, 0): 9.0}
    found = horizon_table.between_seeds(drifts, lambda one, other: abs(one - other))
    assert sorted(found.values()) == [1.0, 3.0, 4.0]


def test_the_order_of_the_rows_does_not_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = printed(written(tmp_path, drifting()), capsys)
    assert printed(written(tmp_path, reversed(drifting())), capsys) == tables


def test_a_rollout_without_its_bf16_is_refused(tmp_path: Path) -> None:
    rows = [row for row in drifting() if row[0] != "bf16" or row[4:] != (3, 1)]
    with pytest.raises(SystemExit, match="walk 3, seed 1 of inside but not of bf16"):
        horizon_table.main([str(written(tmp_path, rows))])


# --- the committed rows ---------------------------------------------------------------------------


def test_the_tables_of_the_page_are_the_commands() -> None:
    page = (ROOT / "docs" / "long-horizon.md").read_text(encoding="utf-8")
    section = page.split("## The embedded world\n")[1].split("\n## ")[0]
    quoted = [line for line in section.splitlines() if line.startswith("|")]
    lines = horizon_table.tables(horizon_table.read(ROWS)).splitlines()
    assert [line for line in quoted if line not in lines] == []
    judged = [line for line in lines if ", drift |" in line]
    assert len(judged) == 9
    assert set(judged) <= set(quoted), "the page leaves out a verdict"
