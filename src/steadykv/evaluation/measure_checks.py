"""What ``measure.json`` has to hold before a page is made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from steadykv.evaluation.metrics.frames import PEAK
from steadykv.evaluation.result_checks import check_object, expect, is_count, is_number

__all__ = ["MEASURE_VERSION", "STEPS", "check_measurement"]

MEASURE_VERSION = 1
STEPS = {"flicker_error"}  # from one frame to the next: one value fewer than frames
SAME = 1e-6  # relative: a mean from the file's values and the one that was written


def check_measurement(data: Any, source: str) -> None:
    """Raises PayloadError unless every part of ``data`` is there and agrees with the others."""
    check_object(data, source, MEASURE_VERSION)
    for name, least in (("frames", 1), ("width", 1), ("height", 1), ("start", 0)):
        value = data.get(name)
        expect(is_count(value, least), source, name, value, f"a whole number from {least} on")
    fps = data.get("fps")
    expect(is_number(fps, 1e-3, 1e6), source, "fps", fps, "frames a second")
    sources = data.get("sources")
    fits = isinstance(sources, list) and len(sources) == 2
    expect(fits, source, "sources", sources, "the two videos")
    for place, video in enumerate(sources):
        fits = isinstance(video, dict) and isinstance(video.get("path"), str)
        expect(fits, source, f"sources[{place}]", video, "an object with a path")
    for name, kind in (("summary", dict), ("by_frame", dict), ("environment", dict)):
        value = data.get(name)
        expect(isinstance(value, kind), source, name, value, "an object")
    names = set(data["summary"]) ^ set(data["by_frame"])
    expect(not names, source, "summary", sorted(data["summary"]), "what by_frame has")
    for name, values in data["by_frame"].items():
        _check_values(name, values, data, source)
    _check_rest(data, source)


def _check_values(name: str, values: Any, data: Mapping[str, Any], source: str) -> None:
    """A value a frame (or step), and the mean that the summary has of them."""
    count = data["frames"] - (name in STEPS)
    where = f"by_frame.{name}"
    expect(isinstance(values, list), source, where, values, f"a list of {count} values")
    expect(len(values) == count, source, f"the length of {where}", len(values), f"{count} values")
    for place, value in enumerate(values):
        fits = value is None or is_number(value, -1e6, 1e6) or (name == "psnr" and value == "inf")
        expect(fits, source, f"{where}[{place}]", value, "a number or null")
    known = [math.inf if value == "inf" else value for value in values if value is not None]
    stated = data["summary"][name]
    mean = _mean(name, known)
    if mean is None or math.isinf(mean):
        fits = stated == (None if mean is None else "inf")
    else:
        fits = is_number(stated) and math.isclose(stated, mean, rel_tol=SAME, abs_tol=1e-9)
    said = {None: "null", math.inf: "'inf'"}.get(mean, mean)
    expect(fits, source, f"summary.{name}", stated, f"{said}, as by_frame has it")


def _mean(name: str, values: list[float]) -> float | None:
    """PSNR is that of the mean squared error."""
    if not values:
        return None
    if name != "psnr":
        return math.fsum(values) / len(values)
    mse = math.fsum(PEAK**2 * 10.0 ** (-max(value, -1e3) / 10) for value in values) / len(values)
    return math.inf if mse == 0 else 10 * math.log10(PEAK**2 / mse)


def _check_rest(data: Mapping[str, Any], source: str) -> None:
    """Parts that older files lack, or that may be empty."""
    begin, end = data["start"], data["start"] + data["frames"]
    excerpt = data.get("excerpt")
    if excerpt is not None:
        expect(isinstance(excerpt, dict), source, "excerpt", excerpt, "an object or null")
        for name in ("start", "frames", "width", "height"):
            value = excerpt.get(name)
            least = begin if name == "start" else 1
            expect(is_count(value, least), source, f"excerpt.{name}", value,
                   f"a whole number from {least} on")  # fmt: skip
        last = excerpt["start"] + excerpt["frames"]
        expect(last <= end, source, "excerpt", excerpt, f"frames {begin} to {end - 1}")
    tails = data.get("tails") or {}
    expect(isinstance(tails, dict), source, "tails", tails, "an object")
    for name, tail in tails.items():
        if tail is None:
            continue
        expect(isinstance(tail, dict), source, f"tails.{name}", tail, "an object or null")
        worst, frame = tail.get("worst"), tail.get("worst_frame")
        fits = is_number(worst) or worst == "inf"
        expect(fits, source, f"tails.{name}.worst", worst, "a number")
        fits = is_count(frame, begin) and frame < end
        expect(fits, source, f"tails.{name}.worst_frame", frame, f"a frame below {end}")
    notes = data.get("notes", [])
    fits = isinstance(notes, list) and all(isinstance(note, str) for note in notes)
    expect(fits, source, "notes", notes, "a list of text")
