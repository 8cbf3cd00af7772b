"""Quality against bits: every method a point, one family a line, and what lies above the line.

    python -m benchmarks.curve rows.csv more.csv --family METHOD METHOD ... \\
        --rename "label=METHOD" --image docs/images/steady-curve.png

Reads what `steadykv compare --rows` wrote, plain or gzipped: PSNR over the frames that read packed
data, flicker error and top-1 shift against bits per element at the end, or with --mean over what
those frames have read, with their intervals. The
methods of --family, in any order, are joined by a line. Every method is drawn with its name, and of
all others between --bits it is printed where they lie: "above" the line is better and "below" is
worse, whichever way a measure goes, by linear interpolation between the line's points. A method
with more bits than all of the family is held to its last point, which is cheaper, and one with
fewer has no line to be held to. Its interval stands beside it, and whether that reaches the line.

A name from --rename stands for a long method, LABEL=METHOD; the label is what is drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.curve_figure import Measure, Point, draw
from benchmarks.files import csv_rows
from steadykv.evaluation.protocol import FLOORS

BITS = (1.9, 4.3)
MEASURES = (
    Measure("psnr", "PSNR against BF16 in dB: higher is better", 1),
    Measure("flicker_error", "Flicker error × 1000: lower is better", -1, 1000.0),
    Measure("top1_shift", "Top-1 shift in %: lower is better", -1, 100.0),
)


def read_points(
    rows: Sequence[Mapping[str, str]],
    measure: Measure,
    labels: Mapping[str, str],
    bits: str = "bits_per_element",
) -> list[Point]:
    """A point for each method that packs something; labels: method -> what it is called.

    bits: the column of the bits.
    """
    points = []
    for row in rows:
        method = row["method"]
        if method in FLOORS or row["keys"] == row["values"] == "bf16" or not row[measure.column]:
            continue
        bounds = [row.get(f"intervals.{measure.column}.{side}", "") for side in ("low", "high")]
        low, high = (measure.scale * float(text) if text else None for text in bounds)
        value = measure.scale * float(row[measure.column])
        label = labels.get(method, method)
        if not row.get(bits):
            raise SystemExit(
                f"{method} has no {bits}: its row is of an older run, leave out --mean"
            )
        points.append(Point(label, float(row[bits]), value, low, high))
    return points


def line_at(family: Sequence[Point], bits: float) -> float | None:
    """The family's line at so many bits; None to the left of it, its last point to the right."""
    ordered = sorted(family, key=lambda point: point.bits)
    if bits < ordered[0].bits:
        return None
    return float(np.interp(bits, [p.bits for p in ordered], [p.value for p in ordered]))


@dataclass(frozen=True)
class Finding:
    """Where a point lies: "below", "above", or "no line" where the family has no such bits.

    is_clear: whether its interval does not reach the line; None without an interval or a line.
    """

    point: Point
    line: float | None
    where: str
    is_clear: bool | None


def held_to_the_line(
    points: Sequence[Point], family: Sequence[Point], sign: int, bits: tuple[float, float] = BITS
) -> list[Finding]:
    """What each point within `bits` that is not of the family is to the line; "above" is better."""
    own = {point.label for point in family}
    findings = []
    for point in sorted(points, key=lambda p: p.bits):
        if point.label in own or not bits[0] <= point.bits <= bits[1]:
            continue
        line = line_at(family, point.bits)
        if line is None:
            findings.append(Finding(point, None, "no line", None))
            continue
        is_above = sign * (point.value - line) > 0
        near = point.low if (sign > 0) == is_above else point.high
        is_clear = None if near is None else (sign * (near - line) > 0) == is_above
        findings.append(Finding(point, line, "above" if is_above else "below", is_clear))
    return findings


def report(findings: Sequence[Finding], measure: Measure) -> str:
    """A line a point, and the verdict of a panel."""
    lines = [measure.title.partition(":")[0]]
    for found in findings:
        point = found.point
        spread = "" if point.low is None else f"({point.low:.2f} to {point.high:.2f})"
        line = "" if found.line is None else f"line {found.line:.2f}"
        reach = {None: "", True: ", clear of it", False: ", its interval reaches it"}
        lines.append(
            f"  {point.bits:.3f} bits {point.value:8.2f} {spread:<18} {line:<11} "
            f"{found.where}{reach[found.is_clear]}  {point.label}"
        )
    better = sum(found.where == "above" for found in findings)
    open_ones = sum(found.where == "no line" for found in findings)
    judged = len(findings) - open_ones
    lines.append(f"  {better} of {judged} points above the line, {open_ones} to its left")
    return "\n".join(lines)


def renamed(texts: Sequence[str]) -> dict[str, str]:
    """ "LABEL=METHOD" as method -> label."""
    found = {}
    for text in texts:
        label, equals, method = text.partition("=")
        if not (label and equals and method):
            raise SystemExit(f"--rename: got {text!r}, expected LABEL=METHOD")
        found[method] = label
    if len(set(found.values())) < len(found):
        raise SystemExit("--rename: two methods have one label; expected one each")
    return found


def read_rows(paths: Sequence[Path], labels: Mapping[str, str]) -> list[dict[str, str]]:
    """Rows of all files, each method once: that of the first file. Ends the program if unequal."""
    rows: dict[str, dict[str, str]] = {}
    same = ("configuration.frames", "configuration.key_rope", "configuration.world_sha256",
            "n_episodes", "n_seeds")  # fmt: skip
    for path in paths:
        for row in csv_rows(path):
            first = rows.setdefault(row["method"], row)
            for name in same:
                expected = next(iter(rows.values())).get(name)
                if row.get(name) != expected:
                    raise SystemExit(f"{path}: {name} is {row.get(name)}, in the first file "
                                     f"{expected}; expected one comparison")  # fmt: skip
            if first["psnr"] != row["psnr"]:
                print(f"{path}: {row['method']} is left out, as an earlier file has it")
    unknown = labels.keys() - rows.keys()
    if unknown:
        raise SystemExit(f"no rows of {', '.join(unknown)}: there are {', '.join(rows)}")
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+", metavar="ROWS")
    parser.add_argument("--family", nargs="+", required=True, help="methods or their labels")
    parser.add_argument("--rename", nargs="*", default=[], metavar="LABEL=METHOD")
    parser.add_argument("--leave-out", nargs="*", default=[], help="methods that are no points")
    parser.add_argument("--bits", type=float, nargs=2, default=BITS, metavar=("LOW", "HIGH"))
    parser.add_argument("--mean", action="store_true", help="bits in the mean, not at the end")
    parser.add_argument("--image", type=Path, help="where the figure goes, a PNG")
    given = parser.parse_args(arguments)
    labels = renamed(given.rename)
    rows = read_rows(given.rows, labels)
    rows = [row for row in rows if row["method"] not in given.leave_out]
    known = {row["method"]: labels.get(row["method"], row["method"]) for row in rows}
    family = [known.get(name, name) for name in given.family]
    if wrong := set(family) - set(known.values()):
        raise SystemExit(f"--family: no rows of {', '.join(wrong)}: there are {', '.join(known)}")
    limits = tuple(given.bits)
    panels: dict[Measure, list[Point]] = {}
    floors = {}
    for measure in MEASURES:
        bits = "bits_per_element_mean" if given.mean else "bits_per_element"
        panels[measure] = points = read_points(rows, measure, labels, bits)
        own = [point for point in points if point.label in family]
        print(report(held_to_the_line(points, own, measure.sign, limits), measure))
        for row in rows:
            if row["method"] in FLOORS and row[measure.column] and measure.sign > 0:
                floors[measure.column] = measure.scale * float(row[measure.column])
    if given.image is not None:
        given.image.parent.mkdir(parents=True, exist_ok=True)
        margin = 0.03 * (limits[1] - limits[0])
        figure = draw(panels, family, (limits[0] - margin, limits[1] + margin), floors)
        figure.savefig(given.image, metadata={"Software": None})


if __name__ == "__main__":
    main()
