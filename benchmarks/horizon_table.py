"""What the rows of `benchmarks.horizon` say about methods: a table over all walks and seeds.

    python -m benchmarks.horizon_table benchmarks/results/horizon-h200.csv.gz

PSNR against bf16 with the same seed in the first, the middle and the last window; then, for each
statistic of drift, the mean absolute distance from bf16 with the same seed, over windows and
rollouts, and beside it how far bf16 is from itself with another seed ("bf16, other seed"): a cache
does not drift more than the model does by itself where its number is no larger. Last, revisits less
their controls, within and beyond the window. In brackets the 95 % interval of the mean over walks,
where there are several.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from benchmarks.files import csv_rows
from steadykv.evaluation.bootstrap import bootstrap_interval

REFERENCE = "bf16"
SEEDS = "bf16, other seed"
Key = tuple[str, int, int]
"""Method, walk, seed."""
Curves = dict[str, dict[Key, dict[str, float]]]
"""By measure and rollout: part -> value."""


def read(path: Path) -> Curves:
    """The rows of a CSV file, gzipped or not."""
    curves: Curves = defaultdict(lambda: defaultdict(dict))
    for row in csv_rows(path):
        key = row["method"], int(row["walk"]), int(row["seed"])
        curves[row["measure"]][key][row["part"]] = float(row["value"])
    return curves


def distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Mean absolute difference over the windows of both."""
    parts = one.keys() & other.keys()
    return sum(abs(one[part] - other[part]) for part in parts) / len(parts)


def by_method(numbers: Mapping[Key, float]) -> dict[str, str]:
    """Mean over walks and seeds, with its interval over walks."""
    walks: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (method, walk, _), value in numbers.items():
        walks[method][walk].append(value)
    found = {}
    for method, values in walks.items():
        every = [value for own in values.values() for value in own]
        found[method] = f"{sum(every) / len(every):.3g}"
        if len(values) > 1:
            interval = bootstrap_interval(list(values.values()))
            found[method] += f" ({float(interval.low):.3g} to {float(interval.high):.3g})"
    return found


def psnr_windows(curves: Curves) -> dict[str, dict[Key, float]]:
    """PSNR of the first, the middle and the last window."""
    found: dict[str, dict[Key, float]] = {}
    rollouts = curves["psnr"]
    parts = list(next(iter(rollouts.values())))
    for part in (parts[0], parts[len(parts) // 2], parts[-1]):
        found[f"PSNR from frame {part}, dB"] = {key: own[part] for key, own in rollouts.items()}
    return found


def drifts(curves: Curves) -> dict[str, dict[Key, float]]:
    """Distances from bf16, of methods with the same seed and of bf16 with another."""
    found: dict[str, dict[Key, float]] = {}
    for name in (name for name in curves if name.endswith(".values")):
        own = curves[name]
        plain = {(walk, seed): c for (method, walk, seed), c in own.items() if method == REFERENCE}
        numbers = {
            key: distance(curve, plain[key[1:]])
            for key, curve in own.items()
            if key[0] != REFERENCE
        }
        for (walk, seed), (other, later) in combinations(plain, 2):
            if walk == other:
                numbers[SEEDS, walk, seed] = distance(plain[walk, seed], plain[other, later])
        found[f"{name.removesuffix('.values')}, distance"] = numbers
    return found


def revisited(curves: Curves) -> dict[str, dict[Key, float]]:
    """PSNR of revisits less that of their controls."""
    same, control = curves["revisit.same.psnr"], curves["revisit.control.psnr"]
    return {
        f"revisits less controls {kind} the window, dB": {
            key: same[key][kind] - control[key][kind]
            for key in same
            if kind in same[key] and kind in control.get(key, {})
        }
        for kind in ("within", "beyond")
    }


def table(curves: Curves) -> str:
    """Markdown: a row for each measure, a column for each method."""
    methods = list(dict.fromkeys(key[0] for key in curves["mean_red.values"]))
    columns = [*methods, SEEDS]
    rows = [["measure", *columns], ["---"] * (len(columns) + 1)]
    for name, numbers in (psnr_windows(curves) | drifts(curves) | revisited(curves)).items():
        cells = by_method(numbers)
        rows.append([name, *(cells.get(column, "") for column in columns)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="CSV of benchmarks.horizon, .gz or not")
    print(table(read(parser.parse_args(arguments).rows)))


if __name__ == "__main__":
    main()
