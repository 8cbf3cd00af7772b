"""What the rows of benchmarks.memory say: means over walks, and differences from one setting.

    python -m benchmarks.memory_table rows.csv --against bf16 24
    python -m benchmarks.memory_table rows.csv --against bf16 24 --away 0 12
    python -m benchmarks.memory_table long.csv --against bf16 18     # of benchmarks.memory_long

`--away LOW HIGH`: only moments whose views come back so many map units from where they were seen.
The moments and seeds of a walk are averaged first, so that every walk counts once; intervals (95 %)
are bootstrapped over walks. PSNR and LPIPS are against the true frames.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.files import csv_rows, in_one_line
from steadykv.errors import ConfigError
from steadykv.evaluation.bootstrap import bootstrap_interval
from steadykv.evaluation.protocol import FEW_EPISODES

Row = Mapping[str, Any]
Setting = tuple[str, int]
"""Method and window."""
MEASURES = (("psnr", "PSNR, dB", 2), ("lpips", "LPIPS", 4))


def setting_of(row: Row) -> Setting:
    return str(row["method"]), int(row["window"])


def by_walk(rows: Sequence[Row], measure: str) -> dict[Setting, dict[str, float]]:
    """The mean over each walk's moments and seeds."""
    found: dict[Setting, dict[str, dict[tuple[str, str], float]]] = {}
    for row in rows:
        walks = found.setdefault(setting_of(row), defaultdict(dict))
        walks[str(row["walk"])][str(row["start"]), str(row["seed"])] = float(row[measure])
    return {
        setting: {walk: float(np.mean(list(values.values()))) for walk, values in walks.items()}
        for setting, walks in found.items()
    }


def cell(values: Sequence[float], digits: int, sign: str = "") -> str:
    """A mean, with its interval if there are two walks."""
    text = f"{np.mean(values):{sign}.{digits}f}"
    if len(values) < 2:
        return text
    interval = bootstrap_interval(np.array(values)[:, None])
    low, high = (f"{float(bound):{sign}.{digits}f}" for bound in (interval.low, interval.high))
    return f"{text} ({low} to {high})"


def table(rows: Sequence[Row], against: Setting) -> str:
    """Markdown: a row a setting, in the order of the rows.

    Raises ConfigError if `against` has no rows, or another setting has other walks than it.
    """
    moments: dict[Setting, set[tuple[str, str, str]]] = {}
    for row in rows:
        rollout = str(row["walk"]), str(row["start"]), str(row["seed"])
        moments.setdefault(setting_of(row), set()).add(rollout)
    if against not in moments:
        known = ", ".join(f"{method} {window}" for method, window in moments)
        raise ConfigError(f"against: got {against[0]} {against[1]}, expected one of: {known}")
    for setting, rollouts in moments.items():
        if rollouts != moments[against]:
            raise ConfigError(
                f"{setting[0]} {setting[1]}: got {len(rollouts)} rollouts, expected the same "
                f"moments and seeds as {against[0]} {against[1]} has"
            )
    first = {setting: next(r for r in rows if setting_of(r) == setting) for setting in moments}
    titles = [title for _, title, _ in MEASURES]
    differences = [f"{title.partition(',')[0]}, difference" for title in titles]
    lines = [["method", "window", "MiB", *titles, *differences]]
    lines.append(["---"] * len(lines[0]))
    means = {name: by_walk(rows, name) for name, _, _ in MEASURES}
    for setting in moments:
        cells, apart = [], []
        for name, _, digits in MEASURES:
            own, base = means[name][setting], means[name][against]
            cells.append(cell(list(own.values()), digits))
            apart.append(cell([own[walk] - base[walk] for walk in own], digits, "+"))
        mebibytes = f"{float(first[setting]['resident_bytes']) / 2**20:.2f}"
        same = ["" for _ in apart] if setting == against else apart
        lines.append([setting[0], str(setting[1]), mebibytes, *cells, *same])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def within(rows: Sequence[Row], low: float, high: float) -> list[Row]:
    """Those whose views come back at least `low` and less than `high` map units away."""
    near = [row for row in rows if low <= float(row["away"]) < high]
    if not near:
        raise ConfigError(f"--away: got {low:g} {high:g}, expected a range in which some come back")
    return near


def caveats(walks: int) -> list[str]:
    """What to say of intervals over so many walks."""
    if walks >= FEW_EPISODES:
        return []
    return [f"{walks} walks are few: intervals are a hint, or there are none"]


def summary(rows: Sequence[Row], against: Setting) -> str:
    """The table, and how much it stands on."""
    own = [row for row in rows if setting_of(row) == against]
    walks = len({row["walk"] for row in own})
    lines = [
        table(rows, against),
        f"{walks} walks, {len({(row['walk'], row['start']) for row in own})} moments, "
        f"{len({row['seed'] for row in own})} seeds; differences are from {against[0]} with "
        f"{against[1]} frames",
    ]
    return "\n".join(lines + caveats(walks))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="CSV of one of the two, .gz or not")
    parser.add_argument("--against", nargs=2, default=["bf16", "24"], metavar=("METHOD", "WINDOW"))
    parser.add_argument("--away", nargs=2, type=float, metavar=("LOW", "HIGH"), help="map units")
    given = parser.parse_args(arguments)
    rows: Sequence[Row] = csv_rows(given.rows)
    against = given.against[0], int(given.against[1])
    columns = set(rows[0]) if rows else set[str]()
    is_long = "part" in columns
    needed = {"walk", "seed", "method", "window", "resident_bytes"}
    needed |= {"measure", "value"} if is_long else {"start", "psnr", "lpips"}
    needed |= {"away"} if given.away else set()
    if missing := needed - columns:
        raise ConfigError(
            f"{given.rows}: got no {', '.join(sorted(missing))}, expected those of "
            "benchmarks.memory or benchmarks.memory_long"
        )
    if given.away:
        rows = within(rows, *given.away)
    if is_long:
        from benchmarks import memory_long  # which imports this module

        print(memory_long.table(rows, against))
    else:
        print(summary(rows, against))


if __name__ == "__main__":
    in_one_line(main)
