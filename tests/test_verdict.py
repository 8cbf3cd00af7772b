"""The rule that every output follows before it calls a difference one: both sides of bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.paired import read_rollouts
from steadykv.errors import ConfigError
from steadykv.evaluation.aggregate import RolloutRecord, paired_difference
from steadykv.evaluation.comparison import run_comparison
from steadykv.evaluation.metrics.frames import PEAK
from steadykv.evaluation.protocol import FEW_EPISODES, FrameWindow, Protocol
from steadykv.evaluation.verdict import Difference, Judge, Word, direction, judge
from steadykv.report import text
from steadykv.report.measures import is_best, measures
from steadykv.report.tables import paired_table
from steadykv.report.terminal import difference_table
from steadykv.world.weights import place
from tests.worlds import tiny_episodes, tiny_world

ROWS = Path(__file__).parent.parent / "benchmarks" / "results" / "compare-h200-rollouts.json.gz"
MANY = FEW_EPISODES


def difference(low: float | None, high: float | None, episodes: int = MANY) -> Difference:
    mean = 0.0 if low is None or high is None else (low + high) / 2
    return Difference(mean, low, high, episodes)


BEYOND = difference(-20.0, -10.0)  # of a PSNR: 10 to 20 dB farther from BF16 than the floor
WITHIN = difference(-1.0, 1.0)
CLOSER = difference(1.0, 2.0)


@pytest.mark.parametrize(
    ("pair", "word", "reason"),
    [
        (difference(1e-9, 2.0), Word.better, ""),
        (difference(0.0, 2.0), Word.not_told_apart, "contains 0"),
        (difference(-1e-9, 2.0), Word.not_told_apart, "contains 0"),
        (difference(-2.0, -1e-9), Word.worse, ""),
        (difference(-2.0, 0.0), Word.not_told_apart, "contains 0"),
        (difference(1.0, 2.0, MANY - 1), Word.not_told_apart, "5 episodes, fewer than 6"),
        (difference(None, None, 1), Word.not_told_apart, "no interval"),
        (None, Word.not_told_apart, "no interval"),
    ],
)
def test_the_interval(pair: Difference | None, word: Word, reason: str) -> None:
    found = judge("psnr", pair, BEYOND, BEYOND)
    assert found.word is word
    assert reason in found.reason
    assert bool(found.reason) == (word is Word.not_told_apart)


@pytest.mark.parametrize(
    ("own", "other", "word"),
    [
        (BEYOND, BEYOND, Word.better),
        (WITHIN, BEYOND, Word.better),  # at the floor, and the other is not
        (CLOSER, BEYOND, Word.better),
        (BEYOND, WITHIN, Word.not_told_apart),  # the worse one is at the floor: both are
        (WITHIN, WITHIN, Word.not_told_apart),
        (CLOSER, CLOSER, Word.not_told_apart),
        (BEYOND, difference(-3.0, -1e-9), Word.better),
        (BEYOND, difference(-3.0, 0.0), Word.not_told_apart),
        (BEYOND, None, Word.not_told_apart),  # no floor was measured
    ],
)
def test_the_floor(own: Difference, other: Difference | None, word: Word) -> None:
    found = judge("psnr", difference(0.1, 0.2), own, other)
    assert found.word is word
    mirrored = judge("psnr", difference(-0.2, -0.1), other, own)
    assert (mirrored.word is Word.worse) == (word is Word.better)
    assert mirrored.reason == found.reason


def test_less_flicker_is_better_and_the_shift_has_a_floor_of_zero() -> None:
    more = difference(0.1, 0.2)
    assert judge("flicker_error", more, more, more).word is Word.worse
    # More flicker than the floor is beyond it; less is not.
    assert judge("flicker_error", more, difference(-0.2, -0.1), None).reason == (
        "both are within the noise floor"
    )
    assert judge("top1_shift", more, None, None).word is Word.worse
    assert judge("top1_shift", difference(0.0, 0.2), None, None).word is Word.not_told_apart
    assert direction("psnr_windows.6-8") == 1
    with pytest.raises(KeyError):
        direction("seconds")


# --- from rollouts --------------------------------------------------------------------------

WINDOWS = [FrameWindow(1, 3)]


def rollouts(method: str, decibels: list[float]) -> list[RolloutRecord]:
    """One episode a value: two frames of that PSNR after an identical one."""
    found = []
    for episode, value in enumerate(decibels):
        mse = float(PEAK**2 / 10 ** (value / 10))
        found.append(
            RolloutRecord(
                method, f"walk-{episode}", 0, (0.0, mse, mse), (1.0, 0.9, 0.9), (mse, mse)
            )
        )
    return found


def judged(**decibels: list[float]) -> Judge:
    return Judge({name: rollouts(name, values) for name, values in decibels.items()}, WINDOWS)


def test_differences_are_those_of_paired_difference() -> None:
    records = read_rollouts(ROWS)
    windows = [FrameWindow(6, 9), FrameWindow(6, 51)]
    pair = {name: records[name] for name in ("quantwm", "qvg")}
    expected = paired_difference(pair["quantwm"], pair["qvg"], windows)
    found = Judge(pair, windows).differences("quantwm", "qvg")
    for name in ("psnr", "flicker_error", "top1_shift"):
        low, high = expected[name]["interval"]
        assert found[name].mean == pytest.approx(expected[name]["mean"])
        assert (found[name].low, found[name].high) == pytest.approx((low, high))
        assert found[name].episodes == 32
    assert found["psnr_windows.6-8"].mean == pytest.approx(expected["psnr_windows"]["6-8"]["mean"])


def test_a_difference_below_the_floor_is_no_win() -> None:
    """Both methods differ by exactly 1 dB in every walk: only the floor decides."""
    level = [30.0, 31.0, 33.0, 36.0, 32.0, 35.0]
    near = [value + 1.0 for value in level]
    high = [value + 10.0 for value in level]
    low = [value - 10.0 for value in level]
    above = judged(a=near, b=level, floor=high)
    assert above.verdict("a", "b", "psnr").word is Word.better
    assert above.verdict("b", "a", "psnr").word is Word.worse
    assert above.better_than("a")["psnr"] == ["b"]
    below = judged(a=near, b=level, floor=low)
    assert below.verdict("a", "b", "psnr").reason == "both are within the noise floor"
    assert below.better_than("a")["psnr"] == []
    assert judged(a=near, b=level).verdict("a", "b", "psnr").reason == "no noise floor was measured"


def test_every_floor_has_to_be_passed() -> None:
    level = [30.0, 31.0, 33.0, 36.0, 32.0, 35.0]
    sides = {
        "a": rollouts("a", [v + 1 for v in level]),
        "b": rollouts("b", level),
        "floor": rollouts("floor", [v + 9 for v in level]),
        "floor_fp32": rollouts("floor_fp32", [v - 9 for v in level]),
    }
    one = Judge(sides, WINDOWS, floors=("floor",))
    assert one.verdict("a", "b", "psnr").word is Word.better
    both = Judge(sides, WINDOWS)
    assert both.verdict("a", "b", "psnr").word is Word.not_told_apart
    assert both.better_than("a")["psnr"] == []


def test_only_shared_complete_episodes_count() -> None:
    level = [30.0, 31.0, 33.0, 36.0, 32.0, 35.0]
    a, b = rollouts("a", level), rollouts("b", level)[:-1]
    found = Judge({"a": a, "b": b}, WINDOWS).differences("a", "b")["psnr"]
    assert found.episodes == 5
    assert Judge({"a": a[:1], "b": b}, WINDOWS).differences("a", "b")["psnr"].low is None
    assert Judge({"a": a[5:], "b": b}, WINDOWS).differences("a", "b") == {}


def test_an_fp32_floor_is_rolled_out_in_fp32_and_judges_too() -> None:
    world = place(tiny_world(), "cpu", torch.bfloat16)
    result = run_comparison(
        world, tiny_episodes(6), ("bf16", "kivi", "rtn"), frames=6, shift=None, max_batch=6,
        centroids=8, resamples=200, floor_fp32=True,
    )  # fmt: skip
    assert next(world.parameters()).dtype == torch.bfloat16
    rows = {row["method"]: row for row in result.rows}
    assert list(rows) == ["bf16", "kivi", "rtn", "floor", "floor_fp32"]
    fp32, shared = rows["floor_fp32"], rows["floor"]["configuration"]
    assert shared["world_dtype"] == "bfloat16"
    assert (fp32["configuration"]["world_dtype"], fp32["configuration"]["cache_dtype"]) == (
        "float32",
        "float32",
    )
    assert fp32["resident_bytes"] > 1.99 * rows["bf16"]["resident_bytes"]
    assert fp32["psnr"] < 100.0
    assert text.packed_rows(result.rows) == [rows["kivi"], rows["rtn"]]
    with pytest.raises(ConfigError, match="floor_fp32=True"):
        Protocol(("floor_fp32",))


# --- what is printed ------------------------------------------------------------------------


def row(method: str, psnr: float, **more: Any) -> dict[str, Any]:
    codec = "bf16" if method in ("bf16", "floor") else method
    return {
        "method": method, "keys": codec, "values": codec, "bits_per_element": 3.0,
        "compression": 4.0, "compression_mean": 4.0, "resident_bytes": 10, "peak_bytes": 20,
        "psnr": psnr, "psnr_windows": {"1-2": psnr}, "ssim": 0.9, "flicker_error": 0.01,
        "top1_shift": None, "seconds": 1.0, "n_rollouts": 6, "n_episodes": 6,
        "identical_rollouts": 0, "intervals": None, "paired": None,
        "configuration": {"first_packed_frame": 1}, **more,
    }  # fmt: skip


def table_rows(verdict: str, beaten: list[str]) -> list[dict[str, Any]]:
    entry = {"mean": 5.0, "interval": [1.0, 9.0], "verdict": verdict, "reason": ""}
    paired = {"against": "qvg", "psnr_windows": {"1-2": entry}}
    best = {"psnr": beaten, "psnr_windows.1-2": beaten}
    return [
        row("quantwm", 35.0, paired=paired, better_than=best),
        row("qvg", 30.0, better_than={"psnr": []}),
        row("floor", 50.0, better_than={"psnr": ["qvg", "quantwm"]}),
    ]


@pytest.mark.parametrize(("verdict", "beaten"), [("better", ["qvg"]), ("not told apart", [])])
def test_terminal_tables_and_sentences_follow_the_verdict(verdict: str, beaten: list[str]) -> None:
    rows = table_rows(verdict, beaten)
    won = verdict == "better"
    psnr = next(measure for measure in measures(rows) if measure.is_psnr)
    assert is_best(psnr, rows[0], rows) == won
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(difference_table(rows))
    assert verdict in console.export_text()
    page = paired_table(rows, {"quantwm": 1, "qvg": 2}, "qvg")
    assert verdict in page
    assert ('class="best"' in page) == won
    sentence = text.second_sentence(rows)
    assert ("stays closest" in sentence) == won
    assert ("do not tell the methods apart" in sentence) != won


def test_of_three_the_tied_one_is_named() -> None:
    rows = [
        row("quantwm", 35.0, better_than={"psnr": ["qvg"]}),
        row("kivi", 34.9, better_than={"psnr": ["qvg"]}),
        row("qvg", 20.0, better_than={"psnr": []}),
    ]
    sentence = text.second_sentence(rows)
    assert "is nearest the original" in sentence
    assert "not told apart from KIVI; QVG strays farthest" in sentence


def test_without_verdicts_nothing_measured_is_best_but_sizes_are() -> None:
    rows = [row("quantwm", 35.0), row("qvg", 30.0, bits_per_element=2.0)]
    best = {m.title for m in measures(rows) for r in rows if is_best(m, r, rows)}
    assert best == {"bits"}


def test_the_committed_comparison() -> None:
    """QuantWM is better than QVG; Steady is not told apart from QuantWM."""
    records = read_rollouts(ROWS)
    found = Judge(records, [FrameWindow(6, 51)])
    assert found.verdict("quantwm", "qvg", "psnr").word is Word.better
    assert found.verdict("steady", "quantwm", "psnr").word is Word.not_told_apart
    assert np.isfinite([d.mean for d in found.differences("steady", "quantwm").values()]).all()
