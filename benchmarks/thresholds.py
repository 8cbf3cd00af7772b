"""Does a method reach its targets against QuantWM and QVG, with whole intervals?

    python -m benchmarks.thresholds results/run1 results/run2 --attention attention.csv \\
        --at-quantwm METHOD --at-qvg METHOD --out thresholds.csv

Reads result folders of `steadykv compare` (`rollouts.json` and `metrics.json`, plain or gzipped, or
a rollouts file by itself with the bits from `--rows`, what compare's own --rows wrote) and the rows
of `benchmarks.attention_output`. METHOD is a name as it stands in them; --at-quantwm is the method
that is to need no more bits than QuantWM, --at-qvg the one that is to need no more than QVG.

Per pair and measure: the difference of mean PSNR in dB over the frames that read packed data, or
the ratio of means of flicker error, top-1 shift and attention-output error, with its bootstrap
interval over walks (seeds nested, the same walks on both sides), and a verdict by where the whole
interval lies: "pass", "fail", or "not shown" where the threshold is inside it or there are too few
walks for an interval. Bits are those at the end of a rollout and have no interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.files import csv_rows, either, json_of
from benchmarks.paired import read_rollouts
from steadykv.errors import SteadyKVError
from steadykv.evaluation.aggregate import RolloutRecord, measures
from steadykv.evaluation.bootstrap import Interval, paired_interval, ratio_interval
from steadykv.evaluation.protocol import FEW_EPISODES, FLOORS, FrameWindow
from steadykv.evaluation.results import METRICS_FILE, ROLLOUTS_FILE, flatten, write_csv, write_json

MEASURES = ("psnr", "flicker_error", "top1_shift")
ATTENTION = "output_error"
WALKS, SEEDS = 64, 3
"""What the targets ask for at least."""


@dataclass(frozen=True)
class Target:
    """bits: whose bits are not to be exceeded; against: what the measure is compared with.

    bound: least difference in dB of PSNR, largest ratio of anything else.
    """

    bits: str
    against: str
    measure: str
    bound: float

    @property
    def is_ratio(self) -> bool:
        return self.measure != "psnr"

    @property
    def text(self) -> str:
        return f"<= {self.bound:g}" if self.is_ratio else f">= {self.bound:+g} dB"

    def verdict(self, low: float, high: float) -> str:
        """By where the whole interval lies."""
        if self.is_ratio:
            low, high = -high, -low
        bound = -self.bound if self.is_ratio else self.bound
        return "pass" if low >= bound else "fail" if high < bound else "not shown"


TARGETS = (
    Target("quantwm", "quantwm", "psnr", 2.5),
    Target("quantwm", "quantwm", "flicker_error", 0.75),
    Target("quantwm", "quantwm", "top1_shift", 0.85),
    Target("quantwm", "quantwm", ATTENTION, 0.70),
    Target("qvg", "quantwm", "psnr", -1.0),
    Target("qvg", "quantwm", "flicker_error", 1.1),
    Target("qvg", "quantwm", "top1_shift", 1.05),
    Target("qvg", "qvg", "psnr", 5.0),
    Target("qvg", "qvg", "flicker_error", 0.65),
    Target("qvg", "qvg", "top1_shift", 0.65),
    Target("qvg", "qvg", ATTENTION, 0.5),
)

Rollout = tuple[str, int]
"""Episode and seed."""
Values = NDArray[np.float64]

SAME = {
    "configuration.frames": "frames",
    "configuration.first_packed_frame": "first_frame",
    "configuration.key_rope": "key_rope",
    "configuration.world_sha256": "world_sha256",
    "configuration.cache.policy.span_chunks": "span_chunks",
}
"""What makes rollouts comparable: name in a row of compare -> in a row of attention_output."""


ORIGIN = ("steadykv", "commit", "torch", "device_name")


@dataclass
class Measured:
    """values: measure -> method -> rollout -> number. bits: by method. facts: see `SAME`.

    origins: commits, devices and versions that the rows come from. bare: a rollouts file that came
    by itself, which does not say what it was measured on.
    """

    values: dict[str, dict[str, dict[Rollout, float]]] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    origins: dict[str, set[str]] = field(default_factory=dict)
    bare: Path | None = None

    def add(self, measure: str, method: str, rollout: Rollout, value: float) -> None:
        """Ends the program where the same rollout came out differently before."""
        own = self.values.setdefault(measure, {}).setdefault(method, {})
        if own.setdefault(rollout, value) != value:
            raise SystemExit(
                f"{method}, {rollout[0]}, seed {rollout[1]}: {measure} is {own[rollout]} in one "
                f"file and {value} in another; give one of them"
            )

    def agree(self, row: Mapping[str, Any], names: Mapping[str, str], source: Path) -> None:
        """Ends the program where a row was measured on something else than the rows before."""
        for name, fact in names.items():
            value = str(row.get(name, ""))
            if value and self.facts.setdefault(fact, value) != value:
                raise SystemExit(
                    f"{source}: {fact} is {value}, in another file {self.facts[fact]}; "
                    "expected runs that can be compared"
                )

    def note(self, row: Mapping[str, Any]) -> None:
        """Remember where a row comes from."""
        for name in ORIGIN:
            if row.get(name):
                self.origins.setdefault(name, set()).add(str(row[name]))

    def add_run(self, run: Path, first_frame: int | None) -> None:
        """Rollouts of a result folder, or of a rollouts file."""
        if not run.exists():
            raise SystemExit(f"{run}: no such file or folder")
        if not run.is_dir():
            if self.bare is not None:
                raise SystemExit(
                    f"{run}: a second rollouts file beside {self.bare}, and neither says which "
                    "world it is of; give one, or the folders of the runs"
                )
            self.bare = run
        file = either(run, ROLLOUTS_FILE) if run.is_dir() else run
        if file is None:
            raise SystemExit(f"{run} holds no {ROLLOUTS_FILE}, nor its gzip")
        if run.is_dir() and (metrics := either(run, METRICS_FILE)) is not None:
            self.add_bits([flatten(row) for row in json_of(metrics)], metrics)
        first = first_frame or int(self.facts.get("first_frame", 0))
        if not first:
            raise SystemExit(f"{file}: which frame reads packed data first? Give --first-frame")
        for method, records in read_rollouts(file).items():
            if method not in FLOORS:
                self._add_records(method, records, first)

    def _add_records(self, method: str, records: Sequence[RolloutRecord], first: int) -> None:
        frames = len(records[0].mse_by_frame)
        if not 0 <= first < frames:
            raise SystemExit(f"{method}: --first-frame is {first}: expected 0 to {frames - 1}")
        window = FrameWindow(first, frames)
        found = measures(records, [window])
        for measure in MEASURES:
            for record, value in zip(records, found.get(measure, ()), strict=measure in found):
                self.add(measure, method, (record.episode, record.seed), float(value))

    def add_bits(self, rows: Sequence[Mapping[str, Any]], source: Path) -> None:
        """Bits at the end, from rows of compare with dotted names. Floors have no bits."""
        for row in rows:
            if row["method"] in FLOORS:
                continue
            self.note({name: row.get(f"environment.{name}") for name in ORIGIN})
            self.agree(row, SAME, source)
            bits = float(row["bits_per_element"])
            if self.bits.setdefault(row["method"], bits) != bits:
                raise SystemExit(
                    f"{source}: {row['method']} has {bits} bits, in another file "
                    f"{self.bits[row['method']]}; expected one method under one name"
                )

    def add_attention(self, path: Path) -> None:
        """Rows of `benchmarks.attention_output`."""
        for row in csv_rows(path):
            self.agree(row, {name: name for name in SAME.values()}, path)
            self.note(row)
            rollout = row["episode"], int(row["seed"])
            self.add(ATTENTION, row["method"], rollout, float(row[ATTENTION]))

    def pair(self, measure: str, method: str, against: str) -> tuple[Values, Values] | None:
        """[episodes, seeds] of both, of the episodes that have every seed; None without any."""
        own, other = (self.values.get(measure, {}).get(name, {}) for name in (method, against))
        shared = [rollout for rollout in own if rollout in other]
        seeds = sorted({seed for _, seed in shared})
        episodes = dict.fromkeys(episode for episode, _ in shared)
        whole = [e for e in episodes if all((e, s) in own and (e, s) in other for s in seeds)]
        if not whole:
            return None
        first, second = (
            np.array([[side[e, s] for s in seeds] for e in whole]) for side in (own, other)
        )
        return first, second


def judge(found: Measured, methods: Mapping[str, str], names: Mapping[str, str]) -> Iterator[Any]:
    """A row for each target. methods: whose bits -> the method to judge. names: of the others."""
    for bits, method in methods.items():
        own, limit = found.bits.get(method), found.bits.get(names[bits])
        row = {"at_bits_of": bits, "method": method, "bits": own, "bits_at_most": limit}
        known = own is not None and limit is not None
        met = known and own <= limit  # type: ignore[operator]
        yield row | {
            "against": names[bits], "measure": "bits", "kind": "value", "value": own,
            "threshold": f"<= {limit:.3f}" if limit is not None else "",
            "verdict": ("pass" if met else "fail") if known else "not measured",
        }  # fmt: skip
        for target in TARGETS:
            if target.bits == bits:
                yield row | _judged(found, target, method, names[target.against])


def _judged(found: Measured, target: Target, method: str, against: str) -> dict[str, Any]:
    kind = "ratio" if target.is_ratio else "difference"
    row: dict[str, Any] = {
        "against": against, "measure": target.measure, "kind": kind, "value": None,
        "threshold": target.text, "verdict": "not measured", "low": None, "high": None,
    }  # fmt: skip
    pair = found.pair(target.measure, method, against)
    if pair is None:
        return row
    episodes, seeds = pair[0].shape
    row |= {"episodes": episodes, "seeds": seeds, "verdict": "not shown"}
    for side, mean in zip(("of_method", "of_against"), pair, strict=True):
        row[side] = float(mean.mean())
    if episodes < 2:
        return row
    interval: Interval = (ratio_interval if target.is_ratio else paired_interval)(*pair)
    low, high = float(interval.low), float(interval.high)
    row |= {"value": float(interval.mean), "low": low, "high": high}
    if episodes >= FEW_EPISODES:
        row["verdict"] = target.verdict(low, high)
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the rows say, for a terminal."""
    lines, heading = [], None
    for row in rows:
        now = f"{row['method']}, at the bits of {row['at_bits_of']}"
        if now != heading:
            lines.append(now)
            heading = now
        spread = ""
        if row.get("low") is not None:
            spread = f"({row['low']:.3f} to {row['high']:.3f})"
        value = "" if row["value"] is None else f"{row['value']:.3f}"
        lines.append(
            f"  {row['measure']:<14} {row['kind'][:10]:<10} vs {row['against']:<10} {value:>8} "
            f"{spread:<20} {row['threshold']:<11} {row['verdict']}"
        )
    sizes = {(r["episodes"], r["seeds"]) for r in rows if "episodes" in r}
    for episodes, seeds in sorted(sizes):
        lines.append(f"{episodes} walks x {seeds} seeds")
        if episodes < WALKS or seeds < SEEDS:
            lines.append(f"  fewer than the {WALKS} x {SEEDS} that the targets ask for")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--rows", type=Path, nargs="*", default=[], help="CSV of compare --rows")
    parser.add_argument("--attention", type=Path, nargs="*", default=[], help="CSV rows")
    parser.add_argument("--at-quantwm", metavar="METHOD")
    parser.add_argument("--at-qvg", metavar="METHOD")
    parser.add_argument("--quantwm", default="quantwm", help="its name in the files")
    parser.add_argument("--qvg", default="qvg", help="its name in the files")
    parser.add_argument("--first-frame", type=int, help="PSNR and flicker from it on")
    parser.add_argument("--out", type=Path, help="the rows, as .csv or .json")
    given = parser.parse_args(arguments)
    chosen = {"quantwm": given.at_quantwm, "qvg": given.at_qvg}
    methods = {bits: method for bits, method in chosen.items() if method is not None}
    if not methods:
        parser.error("nothing to judge: give --at-quantwm, --at-qvg or both")
    found = Measured()
    for path in given.rows:
        found.add_bits(csv_rows(path), path)
    for run in given.runs:
        found.add_run(run, given.first_frame)
    for path in given.attention:
        found.add_attention(path)
    names = {"quantwm": given.quantwm, "qvg": given.qvg}
    for method in {*methods.values(), *names.values()} - found.values["psnr"].keys():
        raise SystemExit(f"no rollouts of {method}: there are {', '.join(found.values['psnr'])}")
    try:
        rows = list(judge(found, methods, names))
    except SteadyKVError as error:
        raise SystemExit(str(error)) from error
    print(table(rows))
    if given.first_frame:
        print(
            f"PSNR and flicker from frame {given.first_frame} on; top-1 shift and attention-output "
            "error of whole rollouts"
        )
    if given.out is not None:
        origins = {name: " ".join(sorted(values)) for name, values in found.origins.items()}
        rows = [row | found.facts | origins for row in rows]
        write = write_json if given.out.suffix == ".json" else write_csv
        write(given.out, rows)


if __name__ == "__main__":
    main()
