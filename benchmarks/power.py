"""How many episodes tell two methods apart, and what becomes of a difference in a long clip?

    python -m benchmarks.power
    python -m benchmarks.power --rollouts results/mine/rollouts.json --pairs quantwm:qvg qvg4:qvg

From finished rollouts (default: the committed 32 walks with 3 seeds each) this prints two tables.

**Episodes**: for every window, the standard deviation between walks of the paired difference in
PSNR (dB), with one noise seed a walk and with all of them, and the walks that are needed to find a
difference of 0.5, 1 and 2 dB: a two-sided 95 % interval excludes zero in 80 % of comparisons. That
is the smallest n with n >= ((t(0.975, n - 1) + t(0.80, n - 1)) * sd / difference)^2, and no fewer
than the 6 below which no verdict is given. "median" and "largest" run over all pairs of methods
that pack something.

**Clip**: pieces of the same rollouts: where the error of the whole clip comes from, and what the
noise floor (BF16 again, attention computed by another implementation) does meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.paired import read_rollouts
from steadykv.evaluation.aggregate import RolloutRecord, capped_psnr, complete_grid, measures
from steadykv.evaluation.bootstrap import student_quantile
from steadykv.evaluation.protocol import FEW_EPISODES, FLOOR, FLOORS, FrameWindow, frame_windows

ROLLOUTS = Path(__file__).parent / "results" / "compare-h200-rollouts.json.gz"
PAIRS = ("quantwm:qvg", "quantwm:qvg4", "quantwm:kivi", "steady:quantwm")
TARGETS_DB = (0.5, 1.0, 2.0)
CONFIDENCE, POWER = 0.95, 0.80
CHUNK = 3  # frames generated together
MOST = 100_000

Values = NDArray[np.float64]
Records = Mapping[str, Sequence[RolloutRecord]]


def episodes_needed(sd: float, difference: float) -> int:
    """Smallest count of walks that finds ``difference`` with 80 % power at 95 % confidence."""
    for count in range(FEW_EPISODES, MOST):
        quantiles = student_quantile(0.5 + CONFIDENCE / 2, count - 1)
        quantiles += student_quantile(POWER, count - 1)
        if count >= (quantiles * sd / difference) ** 2:
            return count
    return MOST


def psnr_by_walk(records: Sequence[RolloutRecord], window: FrameWindow) -> Values:
    """[walks, seeds] PSNR in dB over a window."""
    walks, _, whole = complete_grid(records)
    return measures(whole, [window])["psnr"].reshape(len(walks), -1)


def spread(first: Values, second: Values) -> tuple[float, float]:
    """Standard deviation between walks of the difference: with one seed, and with all seeds.

    The former is the root of the mean variance over the seeds.
    """
    gap = first - second
    one = float(np.sqrt(gap.var(axis=0, ddof=1).mean()))
    return one, float(gap.mean(axis=1).std(ddof=1))


def power_table(
    records: Records, windows: Sequence[FrameWindow], pairs: Sequence[tuple[str, str]]
) -> list[list[str]]:
    """Lines of the first table, its head first."""
    packing = [name for name in records if name not in (*FLOORS, "bf16")]
    seeds = len({record.seed for record in records[packing[0]]})
    wanted = [f"{target:g} dB" for target in TARGETS_DB]
    lines = [["frames", "pair", "gap", "sd, 1 seed", *wanted, f"sd, {seeds} seeds", *wanted]]
    for window in windows:
        values = {name: psnr_by_walk(records[name], window) for name in packing}
        all_spreads = np.array([spread(values[a], values[b]) for a, b in combinations(packing, 2)])
        entries = [
            (f"{a} - {b}", f"{(values[a] - values[b]).mean():+.2f}", spread(values[a], values[b]))
            for a, b in pairs
        ]
        for label, found in (
            ("median", np.median(all_spreads, axis=0)),
            ("largest", all_spreads.max(axis=0)),
        ):
            entries.append((label, "", (float(found[0]), float(found[1]))))
        for label, gap, sds in entries:
            cells = [window.label, label, gap]
            for sd in sds:
                cells += [f"{sd:.2f}", *(str(episodes_needed(sd, t)) for t in TARGETS_DB)]
            lines.append(cells)
    return lines


def clip_table(records: Records, first: int, pair: tuple[str, str]) -> list[list[str]]:
    """Lines of the second table, its head first: pieces of the clip, and all of it."""
    a, b = pair
    mse = {
        name: np.array([record.mse_by_frame for record in found]) for name, found in records.items()
    }
    total = mse[a].shape[1]
    ends = [first, *range(first + CHUNK, first + 4 * CHUNK, CHUNK), *range(24, total, 9), total]
    whole = {name: values[:, first:].sum() for name, values in mse.items()}
    lines = [["frames", f"{a} dB", f"{b} dB", "floor dB", f"sd of {a}", f"{a} above {b}",
              f"share of {a}'s error", f"floor below {a}'s mean"]]  # fmt: skip
    for start, end in [*pairwise(ends), (first, total)]:
        here = {name: capped_psnr(mse[name][:, start:end].mean(axis=1)) for name in (a, b, FLOOR)}
        share = mse[a][:, start:end].sum() / whole[a]
        below = (here[FLOOR] < here[a].mean()).mean()
        lines.append([
            f"{start}-{end - 1}", *(f"{here[name].mean():.1f}" for name in (a, b, FLOOR)),
            f"{here[a].std(ddof=1):.1f}", f"{100 * (here[a] > here[b]).mean():.0f} %",
            f"{100 * share:.1f} %", f"{100 * below:.0f} %",
        ])  # fmt: skip
    return lines


def show(lines: Sequence[Sequence[str]]) -> str:
    """Lines as a Markdown table."""
    head, *rest = lines
    rows = [head, ["---", *("--:" for _ in head[1:])], *rest]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=Path, default=ROLLOUTS)
    parser.add_argument("--first-frame", type=int, default=6)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="A:B")
    options = parser.parse_args(arguments)
    records = read_rollouts(options.rollouts)
    pairs = []
    for text in options.pairs:
        a, _, b = text.partition(":")
        if a not in records or b not in records:
            raise SystemExit(f"no rollouts of {text}: there are {', '.join(records)}")
        pairs.append((a, b))
    total = len(next(iter(records.values()))[0].mse_by_frame)
    windows = frame_windows(options.first_frame, total, CHUNK)
    print(show(power_table(records, windows, pairs)))
    if FLOOR in records:
        print()
        print(show(clip_table(records, options.first_frame, pairs[0])))


if __name__ == "__main__":
    main()
