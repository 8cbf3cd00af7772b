"""What a result file has to hold before a page is made of it: types, lengths, ranges, versions.

Files travel, are edited and are cut off. What is wrong is said in one line with the file and the
place in it; `steadykv report` reads nothing that was not checked here or in `check_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from steadykv.errors import PayloadError, SteadyKVError
from steadykv.evaluation.aggregate import RolloutRecord
from steadykv.evaluation.results import Row

__all__ = ["check_curves", "check_object", "check_records", "check_shift", "shown_as_one_line"]

DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What Python says of a file that has the wrong shape."""


@contextmanager
def shown_as_one_line(source: str) -> Iterator[None]:
    """Damage that only shows when a file is used: PayloadError naming ``source``."""
    try:
        yield
    except SteadyKVError:
        raise
    except DAMAGE as error:
        raise PayloadError(
            f"{source}: not what steadykv writes ({type(error).__name__}: {error}); expected a "
            "result folder as its command left it: measure again"
        ) from error


def is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether ``value`` is a finite number, and none of JSON's truth values, in that range."""
    return type(value) in (int, float) and least <= value <= most and abs(value) < math.inf


def is_count(value: Any, least: int = 0) -> bool:
    """Whether ``value`` is a whole number from ``least`` on."""
    return type(value) is int and value >= least


def expect(fits: bool, source: str, name: str, value: Any, expected: str) -> None:
    """Raise PayloadError naming file, place, got and expected unless it ``fits``."""
    if not fits:
        text = repr(value)
        got = text if len(text) <= 60 else f"{text[:56]} ..."
        raise PayloadError(f"{source}: {name} is {got}; expected {expected}")


def check_object(data: Any, source: str, version: int) -> None:
    """The object that a command wrote, of that version. Raises PayloadError."""
    expect(isinstance(data, dict), source, "the file", type(data).__name__, "an object")
    if data.get("version") != version or isinstance(data["version"], bool):
        raise PayloadError(
            f"{source} has version {data.get('version')!r}; expected {version}: read it with the "
            "release that wrote it"
        )


def check_records(records: Sequence[RolloutRecord], source: str, frames: int | None = None) -> None:
    """Rollouts with a value for every frame and step, in their ranges. Raises PayloadError.

    frames: of a video, where that is known; else what each rollout's squared errors say.
    """
    for index, record in enumerate(records):
        where = f"[{index}] ({record.method}, {record.episode}, seed {record.seed})."
        length = len(record.mse_by_frame) if frames is None else frames
        for name, count, least, most in (
            ("mse_by_frame", length, 0.0, 255.0**2),
            ("ssim_by_frame", length, -1.001, 1.001),  # sums are rounded
            ("flicker_by_step", length - 1, 0.0, 2.0),
        ):
            _check_list(getattr(record, name), source, where + name, count, least, most)
        for name in ("top1_shift", "top5_shift"):
            share = getattr(record, name)
            fits = share is None or is_number(share, 0, 1)
            expect(fits, source, where + name, share, "a share from 0 to 1, or null")


def _check_list(values: Any, source: str, name: str, count: int, least: float, most: float) -> None:
    is_list = isinstance(values, list | tuple)
    expect(is_list, source, name, values, f"a list of {count} numbers")
    expect(len(values) == count, source, f"the length of {name}", len(values), f"{count} numbers")
    for place, value in enumerate(values):
        if not is_number(value, least, most):
            expected = f"a number from {least:g} to {most:g}"
            expect(False, source, f"{name}[{place}]", value, expected)


def check_curves(rows: Sequence[Row], source: str) -> int:
    """The frames of a video by ``metrics.json``, whose curves have a value for each.

    Raises PayloadError.
    """
    total = 0
    for index, row in enumerate(rows):
        shared, where = row["configuration"], f"[{index}] ({row['method']})."
        for name in ("frames", "context_frames"):
            value = shared.get(name)
            expect(is_count(value, 1), source, f"{where}configuration.{name}", value, "a count")
        total = shared["frames"] + shared["context_frames"]
        _check_list(row["psnr_by_frame"], source, f"{where}psnr_by_frame", total, -1e3, 1e3)
        for label, value in row["psnr_windows"].items():
            fits = is_number(value)
            expect(fits, source, f"{where}psnr_windows.{label}", value, "a number")
        for low_high in (row["intervals"] or {}).get("psnr_by_frame", ()):
            fits = isinstance(low_high, list) and len(low_high) == 2
            expect(fits and all(map(is_number, low_high)), source,
                   f"{where}intervals.psnr_by_frame", low_high, "pairs of numbers")  # fmt: skip
    return total


def check_shift(found: Any, source: str, version: int, frames: int) -> None:
    """``token_shift.json`` of a video of ``frames`` frames. Raises PayloadError."""
    check_object(found, source, version)
    example = found.get("example")
    if example is None:
        return
    expect(isinstance(example, dict), source, "example", example, "an object or null")
    for name in ("layer", "head"):
        value = example.get(name)
        expect(is_count(value), source, f"example.{name}", value, "a number from 0 on")
    weight = example.get("attention_weight")
    expect(is_number(weight), source, "example.attention_weight", weight, "a number")
    expect("chosen" in example, source, "example", "without chosen", "how it was chosen")
    selected = example.get("selected")
    fits = isinstance(selected, dict) and selected.get("bf16") is not None
    expect(fits, source, "example.selected", selected, "a place for bf16 and every method")
    places: Mapping[str, Any] = {f"selected.{name}": place for name, place in selected.items()}
    for name, place in {"query": example.get("query"), **places}.items():
        if place is None and name != "query":
            continue
        expect(isinstance(place, dict), source, f"example.{name}", place, "a place")
        for part in ("token", "frame", "patch_row", "patch_column"):
            value = place.get(part)
            most = frames - 1 if part == "frame" else 10**9
            expect(is_count(value) and value <= most, source, f"example.{name}.{part}", value,
                   f"a number from 0 to {most}")  # fmt: skip
