"""Verdicts on targets, from made-up rollouts whose answers are known."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import thresholds
from benchmarks.thresholds import ATTENTION, TARGETS, Target
from steadykv.evaluation.results import write_csv

WALKS = [f"walk-{i}" for i in range(8)]
SEEDS = (0, 1)
CONFIGURATION = {
    "frames": 6,
    "first_packed_frame": 2,
    "key_rope": "post",
    "world_sha256": "abc",
    "cache": {"policy": {"span_chunks": 2}},
}
# method -> bits, error in dB above QuantWM's, and flicker, shift and attention error in its units
METHODS = {
    "quantwm": (3.0, 0.0, 1.0, 1.0, 1.0),
    "qvg": (2.6, -5.0, 2.0, 1.5, 2.0),
    "fine": (2.9, 4.0, 0.5, 0.6, 0.5),
    "small": (2.6, 1.0, 0.9, 0.9, 0.9),
}


def rollouts(methods: Mapping[str, Any], noise: float = 0.02) -> list[dict[str, Any]]:
    """Walks that differ tenfold, and methods that differ as said, give or take some noise."""
    rng = np.random.default_rng(0)
    found = []
    for name, (_, decibels, flicker, shift, _) in methods.items():
        sizes = np.random.default_rng(1).uniform(0.3, 3.0, size=len(WALKS))
        for walk, size in zip(WALKS, sizes, strict=True):
            for seed in SEEDS:
                a, b, c = np.exp(noise * rng.normal(size=3))
                mse = 100.0 * size * 10 ** (-decibels / 10) * a
                found.append(
                    {"method": name, "episode": walk, "seed": seed,
                     "mse_by_frame": [0.0, 7.0] + [mse] * 4, "ssim_by_frame": [0.9] * 6,
                     "flicker_by_step": [9.0] + [0.01 * size * flicker * b] * 4,
                     "top1_shift": 0.3 * shift * c, "top5_shift": 0.2}
                )  # fmt: skip
    return found


def attention(path: Path, methods: Mapping[str, Any], **other: Any) -> Path:
    rows = [
        {"method": name, "episode": walk, "seed": seed, ATTENTION: 0.1 * numbers[4] * (1 + i),
         "frames": 6, "first_frame": 2, "key_rope": "post", "world_sha256": "abc",
         "span_chunks": 2, "commit": "f00"} | other
        for name, numbers in methods.items() for i, walk in enumerate(WALKS) for seed in SEEDS
    ]  # fmt: skip
    return write_csv(path, rows)


def run_folder(folder: Path, methods: Mapping[str, Any], **options: Any) -> Path:
    """As compare leaves it; gzipped, as it is committed."""
    folder.mkdir()
    rows = [
        {"method": name, "bits_per_element": numbers[0], "configuration": CONFIGURATION,
         "environment": {"commit": "beef"}}
        for name, numbers in methods.items()
    ]  # fmt: skip
    data = json.dumps(rollouts(methods, **options)).encode()
    (folder / "rollouts.json.gz").write_bytes(gzip.compress(data))
    (folder / "metrics.json").write_text(json.dumps(rows))
    return folder


def judged(tmp_path: Path, words: list[str]) -> dict[tuple[str, str, str], dict[str, str]]:
    out = tmp_path / "out.csv"
    thresholds.main([*words, "--out", str(out)])
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["at_bits_of"], row["against"], row["measure"]): row for row in rows}


def test_made_up_rows_get_the_right_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The baselines in one run, the methods in another, with a baseline of the former again.
    first = run_folder(tmp_path / "a", {k: METHODS[k] for k in ("quantwm", "qvg")})
    second = run_folder(tmp_path / "b", {k: METHODS[k] for k in ("fine", "small")})
    rows = attention(tmp_path / "attention.csv", METHODS)
    found = judged(tmp_path, [str(first), str(second), "--attention", str(rows),
                              "--at-quantwm", "fine", "--at-qvg", "small"])  # fmt: skip
    assert {k: row["verdict"] for k, row in found.items()} == {
        ("quantwm", "quantwm", "bits"): "pass",
        ("quantwm", "quantwm", "psnr"): "pass",  # +4 of +2.5
        ("quantwm", "quantwm", "flicker_error"): "pass",  # 0.5 of 0.75
        ("quantwm", "quantwm", "top1_shift"): "pass",  # 0.6 of 0.85
        ("quantwm", "quantwm", "output_error"): "pass",  # 0.5 of 0.7
        ("qvg", "qvg", "bits"): "pass",  # equal
        ("qvg", "quantwm", "psnr"): "pass",  # +1 of -1
        ("qvg", "quantwm", "flicker_error"): "pass",  # 0.9 of 1.1
        ("qvg", "quantwm", "top1_shift"): "pass",  # 0.9 of 1.05
        ("qvg", "qvg", "psnr"): "pass",  # +6 of +5
        ("qvg", "qvg", "flicker_error"): "pass",  # 0.45 of 0.65
        ("qvg", "qvg", "top1_shift"): "pass",  # 0.6 of 0.65
        ("qvg", "qvg", "output_error"): "pass",  # 0.45 of 0.5
    }
    row = found["quantwm", "quantwm", "psnr"]
    assert float(row["value"]) == pytest.approx(4.0, abs=0.1)
    assert float(row["low"]) < float(row["value"]) < float(row["high"])
    assert float(row["of_method"]) - float(row["of_against"]) == pytest.approx(float(row["value"]))
    assert (row["episodes"], row["seeds"], row["commit"]) == ("8", "2", "beef f00")
    # Walks differ tenfold, but on both sides alike.
    row = found["quantwm", "quantwm", "flicker_error"]
    assert float(row["value"]) == pytest.approx(0.5, rel=0.03)
    assert float(row["high"]) - float(row["low"]) < 0.05
    exact = found["qvg", "qvg", "output_error"]
    assert [float(exact[name]) for name in ("value", "low", "high")] == pytest.approx([0.45] * 3)
    printed = capsys.readouterr().out
    assert "fine, at the bits of quantwm" in printed
    assert "8 walks x 2 seeds\n  fewer than the 64 x 3" in printed


def test_the_three_verdicts_and_the_bits(tmp_path: Path) -> None:
    # Close to the thresholds in the mean, and noisy; and a few bits too many.
    methods = METHODS | {"middling": (3.001, 2.3, 0.75, 0.9, 0.70)}
    run = run_folder(tmp_path / "run", methods, noise=0.3)
    words = [str(run), "--at-quantwm", "middling"]
    found = judged(tmp_path, words)
    assert {k[2]: row["verdict"] for k, row in found.items()} == {
        "bits": "fail",
        "psnr": "not shown",
        "flicker_error": "not shown",
        "top1_shift": "not shown",
        "output_error": "not measured",
    }
    worse = judged(tmp_path, [str(run), "--at-quantwm", "qvg"])
    kinds = {k[2]: row["verdict"] for k, row in worse.items()}
    assert [kinds[name] for name in ("psnr", "flicker_error", "top1_shift")] == ["fail"] * 3


@pytest.mark.parametrize(
    ("low", "high", "psnr", "ratio"),
    [
        (2.5, 3.0, "pass", "fail"),
        (2.4, 3.0, "not shown", "fail"),
        (1.0, 2.4, "fail", "fail"),
        (1.0, 2.5, "not shown", "fail"),
        (0.5, 0.75, "fail", "pass"),
        (0.5, 0.76, "fail", "not shown"),
        (0.75, 0.9, "fail", "not shown"),
        (0.76, 0.9, "fail", "fail"),
    ],
)
def test_the_whole_interval_decides(low: float, high: float, psnr: str, ratio: str) -> None:
    assert Target("quantwm", "quantwm", "psnr", 2.5).verdict(low, high) == psnr
    assert Target("quantwm", "quantwm", "top1_shift", 0.75).verdict(low, high) == ratio


def test_only_walks_with_every_seed_on_both_sides_count(tmp_path: Path) -> None:
    run = tmp_path / "rollouts.json"
    records = [r for r in rollouts(METHODS)
               if (r["method"], r["episode"], r["seed"]) != ("fine", "walk-3", 1)]  # fmt: skip
    run.write_text(json.dumps(records))
    rows = write_csv(
        tmp_path / "rows.csv",
        [{"method": name, "bits_per_element": numbers[0]} for name, numbers in METHODS.items()],
    )
    words = [str(run), "--rows", str(rows), "--at-quantwm", "fine"]
    found = judged(tmp_path, [*words, "--first-frame", "2"])
    assert found["quantwm", "quantwm", "psnr"]["episodes"] == "7"
    assert found["quantwm", "quantwm", "bits"]["verdict"] == "pass"
    # From frame 1 on, a frame of equal error dilutes the difference.
    diluted = judged(tmp_path, [*words, "--first-frame", "1"])
    assert float(diluted["quantwm", "quantwm", "psnr"]["value"]) < 4.0
    with pytest.raises(SystemExit, match="Give --first-frame"):
        thresholds.main(words)
    few = [r for r in records if r["episode"] in WALKS[:3]]
    run.write_text(json.dumps(few))
    found = judged(tmp_path, [*words, "--first-frame", "2"])
    assert found["quantwm", "quantwm", "psnr"]["verdict"] == "not shown"


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", METHODS)
    words = [str(run), "--at-quantwm", "fine"]
    for name, value in (("key_rope", "pre"), ("world_sha256", "other"), ("span_chunks", 3)):
        rows = attention(tmp_path / "rows.csv", METHODS, **{name: value})
        with pytest.raises(SystemExit, match=f"{name} is {value}"):
            thresholds.main([*words, "--attention", str(rows)])
    other = run_folder(tmp_path / "other", {"fine": (2.9, 4.1, 0.5, 0.6, 0.5)})
    with pytest.raises(SystemExit, match=r"psnr is .* in one file"):
        thresholds.main([str(other), *words])
    (other / "rollouts.json.gz").unlink()
    with pytest.raises(SystemExit, match=r"holds no rollouts\.json"):
        thresholds.main([str(other), *words])
    with pytest.raises(SystemExit, match="no rollouts of finest: there are quantwm, qvg"):
        thresholds.main([str(run), "--at-qvg", "finest"])
    with pytest.raises(SystemExit):
        thresholds.main([str(run)])
    bare = str(run / "rollouts.json.gz")
    with pytest.raises(SystemExit, match="neither says which world it is of"):
        thresholds.main([bare, bare, "--at-quantwm", "fine", "--first-frame", "2"])


def test_targets_are_those_that_were_set() -> None:
    found = {(t.bits, t.against, t.measure): t.text for t in TARGETS}
    assert len(found) == len(TARGETS) == 11
    assert found["quantwm", "quantwm", "psnr"] == ">= +2.5 dB"
    assert found["qvg", "quantwm", "psnr"] == ">= -1 dB"
    assert found["qvg", "qvg", ATTENTION] == "<= 0.5"
