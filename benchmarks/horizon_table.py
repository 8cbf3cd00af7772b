"""What the rows of `benchmarks.horizon` say about methods: two tables over all walks and seeds.

    python -m benchmarks.horizon_table benchmarks/results/horizon-h200.csv.gz

The first: PSNR against bf16 with the same seed in the first, the middle and the last window, also
less that of quantwm; for each statistic of drift, the mean absolute distance from bf16 with the
same seed, over windows and rollouts, beside how far bf16 is from itself with another seed ("bf16,
other seed"); last, revisits less their controls, within and beyond the window of frames.

The second asks whether a video changes more than bf16's does. Drift is a rollout's mean absolute
change from its own first window, over windows. bf16's column has its drift, the last one its seed
spread, the mean over walks of how far the drifts of two seeds are apart, and a method's the drift
beyond bf16: its own less that of bf16 with the same walk and seed. A packed method is "within"
where the whole interval lies below the spread, "beyond" where all of it lies above, else "not
shown", as with too few walks for an interval. That takes the spread as known. It is a mean over
walks too, so the rows below take each walk's spread off its drift beyond bf16: a whole interval
below zero says the same with the chance of both.

Methods pair with bf16 by walk and the number of the seed; bf16's own seeds pair by their order in
the rows, each with each later one. A method that lacks some walks is compared on those that it has
(the head says how many), and judged by the spread over all. In brackets the 95 % interval of the
mean over walks, seeds nested, where there are several walks.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TypeVar

from benchmarks.files import csv_rows
from steadykv.evaluation.bootstrap import bootstrap_interval
from steadykv.evaluation.protocol import FEW_EPISODES, FLOOR

REFERENCE = "bf16"
BASELINE = "quantwm"
SEEDS = "bf16, other seed"
Value = TypeVar("Value")
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
    rollouts = curves["mean_red.values"]
    for method, walk, seed in rollouts:
        if (REFERENCE, walk, seed) not in rollouts:
            raise SystemExit(
                f"{path} has walk {walk}, seed {seed} of {method} but not of {REFERENCE}; expected "
                "both: take whole files of benchmarks.horizon"
            )
    return curves


def distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Mean absolute difference over the windows of both."""
    parts = one.keys() & other.keys()
    return sum(abs(one[part] - other[part]) for part in parts) / len(parts)


@dataclass(frozen=True)
class Cell:
    """Mean over walks and seeds, with its interval over walks; no interval of a single walk."""

    mean: float
    low: float
    high: float
    walks: int

    def text(self, sign: str = "") -> str:
        """As the tables write it; ``sign`` "+" for differences."""
        mean = f"{self.mean:{sign}.3g}"
        return mean if self.walks < 2 else f"{mean} ({self.low:.3g} to {self.high:.3g})"


def by_method(numbers: Mapping[Key, float]) -> dict[str, Cell]:
    """A cell for each method, where a walk counts once however many seeds it has.

    In the order of their numbers: a bootstrap's draws go by place.
    """
    walks: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (method, walk, _), value in numbers.items():
        walks[method][walk].append(value)
    found = {}
    for method, values in walks.items():
        means = [sum(own) / len(own) for _, own in sorted(values.items())]
        if len(means) > 1:
            interval = bootstrap_interval([[mean] for mean in means])
            low, high = float(interval.low), float(interval.high)
        else:
            low, high = -math.inf, math.inf
        found[method] = Cell(sum(means) / len(means), low, high, len(means))
    return found


def psnr_windows(curves: Curves) -> dict[str, dict[Key, float]]:
    """PSNR of the first, the middle and the last window; also how far above quantwm's."""
    found: dict[str, dict[Key, float]] = {}
    rollouts = curves["psnr"]
    parts = list(next(iter(rollouts.values())))
    for part in dict.fromkeys((parts[0], parts[len(parts) // 2], parts[-1])):
        found[f"PSNR from frame {part}, dB"] = {key: own[part] for key, own in rollouts.items()}
        above = {
            key: own[part] - rollouts[(BASELINE, *key[1:])][part]
            for key, own in rollouts.items()
            if key[0] != BASELINE and (BASELINE, *key[1:]) in rollouts
        }
        if above:
            found[f"PSNR from frame {part} above {BASELINE}, dB"] = above
    return found


def between_seeds(
    own: Mapping[Key, Value], measure: Callable[[Value, Value], float]
) -> dict[Key, float]:
    """bf16 against itself, for every two seeds of a walk."""
    plain = [key for key in own if key[0] == REFERENCE]
    return {
        (SEEDS, one[1], number): measure(own[one], own[other])
        for number, (one, other) in enumerate(combinations(plain, 2))
        if one[1] == other[1]
    }


def distances(curves: Curves) -> dict[str, dict[Key, float]]:
    """Distances from bf16, of methods with the same seed and of bf16 with another."""
    found: dict[str, dict[Key, float]] = {}
    for name in (name for name in curves if name.endswith(".values")):
        own = curves[name]
        numbers = {
            key: distance(curve, own[(REFERENCE, *key[1:])])
            for key, curve in own.items()
            if key[0] != REFERENCE
        }
        found[f"{name.removesuffix('.values')}, distance"] = numbers | between_seeds(own, distance)
    return found


def verdict(beyond: Cell, spread: float) -> str:
    """Where the whole interval lies: "within" the spread, "beyond" it, or "not shown"."""
    if beyond.walks < FEW_EPISODES:
        return "not shown"
    return "within" if beyond.high < spread else "beyond" if beyond.low > spread else "not shown"


def drift_rows(curves: Curves) -> dict[str, dict[str, str]]:
    """Drift beyond bf16 with verdicts, for every statistic; then the same less the spread."""
    judged: dict[str, dict[str, str]] = {}
    less: dict[str, dict[str, str]] = {}
    for name in (name for name in curves if name.endswith(".change")):
        statistic = name.removesuffix(".change")
        drift = {
            key: sum(map(abs, windows.values())) / len(windows)
            for key, windows in curves[name].items()
        }
        beyond = {
            key: value - drift[(REFERENCE, *key[1:])]
            for key, value in drift.items()
            if key[0] != REFERENCE
        }
        spread = between_seeds(drift, lambda one, other: abs(one - other))
        bf16 = {key: value for key, value in drift.items() if key[0] == REFERENCE}
        cells = by_method(bf16 | spread)
        texts = {column: cell.text() for column, cell in cells.items()}
        for method, cell in by_method(beyond).items():
            texts[method] = cell.text("+")
            if method != FLOOR and SEEDS in cells:
                texts[method] += f" {verdict(cell, cells[SEEDS].mean)}"
        judged[f"{statistic}, drift"] = texts
        of_walk: dict[int, list[float]] = defaultdict(list)
        for (_, walk, _), value in spread.items():
            of_walk[walk].append(value)
        apart = {
            key: value - sum(of_walk[key[1]]) / len(of_walk[key[1]])
            for key, value in beyond.items()
            if key[1] in of_walk
        }
        less[f"{statistic}, beyond less spread"] = {
            method: cell.text("+") for method, cell in by_method(apart).items()
        }
    return judged | less


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


def markdown(
    head: Sequence[str], rows: Mapping[str, Mapping[str, str]], names: Sequence[str]
) -> str:
    """A row for each measure, a column for each of ``names``, which ``head`` writes."""
    lines = [["measure", *head], ["---"] * (len(head) + 1)]
    lines += [[name, *(cells.get(column, "") for column in names)] for name, cells in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(curves: Curves) -> str:
    """Markdown: a row for each measure, a column for each method."""
    walks: dict[str, set[int]] = defaultdict(set)
    for method, walk, _ in curves["mean_red.values"]:
        walks[method].add(walk)
    heads = [f"{method}, {len(own)} walks" for method, own in walks.items()]
    numbers = psnr_windows(curves) | distances(curves) | revisited(curves)
    near = {
        name: {column: cell.text() for column, cell in by_method(own).items()}
        for name, own in numbers.items()
    }
    columns = [*walks, SEEDS]
    beyond = [
        head if head.startswith(f"{REFERENCE},") else f"{head}, beyond bf16" for head in heads
    ]
    return "\n\n".join(
        (
            markdown([*heads, SEEDS], near, columns),
            markdown([*beyond, "seed spread of bf16"], drift_rows(curves), columns),
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="CSV of benchmarks.horizon, .gz or not")
    print(tables(read(parser.parse_args(arguments).rows)))


if __name__ == "__main__":
    main()
