"""How far apart are two methods of a comparison that is finished?

    python -m benchmarks.paired benchmarks/results/compare-h200-rollouts.json.gz qvg qvg4

A minus B, paired over walks and noise seeds, with the 95 % bootstrap interval that `steadykv
compare --paired B` would have reported: PSNR in dB over the frames that read packed data, flicker
error (full range 1) and top-1 shift, and whether that tells the two apart (docs/protocol.md). Reads
the `rollouts.json` of a result folder, or its gzip.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.files import json_of
from steadykv.evaluation.aggregate import RolloutRecord, paired_difference
from steadykv.evaluation.protocol import FLOOR, FrameWindow
from steadykv.evaluation.verdict import Judge

MEASURES = ("psnr", "flicker_error", "top1_shift")


def read_rollouts(path: Path) -> dict[str, list[RolloutRecord]]:
    """The rollouts of every method."""
    found: dict[str, list[RolloutRecord]] = {}
    for entry in json_of(path):
        lists = {name: tuple(v) for name, v in entry.items() if isinstance(v, list)}
        record = RolloutRecord(**(entry | lists))
        found.setdefault(record.method, []).append(record)
    return found


def of_method(path: Path, method: str) -> list[RolloutRecord]:
    """The rollouts of one method; ends the program if there are none."""
    found = read_rollouts(path)
    if method not in found:
        raise SystemExit(f"no rollouts of {method}: there are {', '.join(found)}")
    return found[method]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("a")
    parser.add_argument("b")
    parser.add_argument("--first-frame", type=int, default=6)
    parser.add_argument("--other", type=Path, help="where b is, if in another file")
    options = parser.parse_args(arguments)
    a = of_method(options.rollouts, options.a)
    b = of_method(options.other or options.rollouts, options.b)
    window = FrameWindow(options.first_frame, len(a[0].mse_by_frame))
    result = paired_difference(a, b, [window], resamples=2000)
    floor = read_rollouts(options.rollouts).get(FLOOR)
    judge = Judge({"a": a, "b": b} | ({FLOOR: floor} if floor else {}), [window])
    print(f"{options.a} minus {options.b}, frames {window.label}")
    for name in MEASURES:
        if name in result:
            low, high = result[name]["interval"]
            verdict = judge.verdict("a", "b", name)
            why = f" ({verdict.reason})" if verdict.reason else ""
            mean = result[name]["mean"]
            print(f"{name:14} {mean:+.4f}  ({low:+.4f} to {high:+.4f})  {verdict.word}{why}")


if __name__ == "__main__":
    main()
