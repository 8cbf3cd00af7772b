"""How a measured number is called, shown and drawn: the figures of `steadykv measure`'s page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from steadykv.report import plots

Data = Mapping[str, Any]
Values = list[float | None]

# A video that is judged and its colours: of the first, of the second and so on.
COLOURS = (3, 1, 2, 4, 5, 6, 7)

# A metric that needs no reference has a value for each video: its names end so.
FIRST, SECOND = "_a", "_b"


@dataclass(frozen=True)
class Known:
    """What a metric is called, and how it is read."""

    title: str
    unit: str
    meaning: str
    digits: int = 4


METRICS = {
    "psnr": Known("PSNR", "dB", "Closeness: more is closer, 6 dB more is half the error. ∞ is the "
                  "same picture.", 2),
    "ssim": Known("SSIM", "at most 1", "Structural similarity; 1 is the same picture."),
    "ms_ssim": Known("MS-SSIM", "at most 1", "SSIM over several sizes of detail; 1 is the same."),
    "lpips": Known("LPIPS", "0 is best", "Distance as a trained network sees it; 0 is the same."),
    "flicker_error": Known("flicker error", "0 is best", "How much the change from frame to frame "
                           "differs from the first video's; full range of a pixel is 1."),
    "flicker_index": Known("flicker index", "0 is calm", "Flicker of one video alone, with its "
                           "motion taken out."),
    "flicker_index_a": Known("flicker index", "first video", "Flicker of the first video alone, "
                             "with its motion taken out; 0 is calm."),
    "flicker_index_b": Known("flicker index", "second video", "The same of the second video."),
}  # fmt: skip


def known(name: str) -> Known:
    """What there is to say about a metric, of a later release as well."""
    title = name.replace("_", " ")
    return METRICS.get(name, Known(title, "", f"{title}, as `steadykv measure` names it."))


def number(value: Any) -> float | None:
    """A number of the file: JSON has no infinity, so it is the word "inf" there."""
    return None if value is None else float(value)


def show(name: str, value: Any) -> str:
    """A number of the summary as text; infinite is ∞, and what was not measured a dash."""
    found = number(value)
    if found is None:
        return "–"
    if math.isinf(found):
        return "∞" if found > 0 else "−∞"
    digits = known(name).digits
    unit = " dB" if known(name).unit == "dB" else ""
    # A small number keeps three digits: 0.0000 would say that it is none.
    small = found != 0 and abs(found) < 10**-digits
    return (f"{found:.2e}" if small else f"{found:.{digits}f}").replace("-", "−") + unit


def colour(index: int) -> int:
    """The series of the style sheet for a judged video."""
    return COLOURS[index % len(COLOURS)]


def figures(
    runs: Sequence[Data],
    labels: Sequence[str],
    shown: range | None = None,
    prefix: str = "by-frame",
) -> list[str]:
    """One figure a metric that has values by frame, one line a judged video.

    runs: measurements of the same frames of the same reference. shown: frames (of the reference)
    that the players play, shaded. Metrics of one video each share their figure; the reference's
    line is the first run's.
    """
    names = dict.fromkeys(name for data in runs for name in data["by_frame"])
    result: list[str] = []
    for name in names:
        if name.endswith(SECOND) and name.removesuffix(SECOND) + FIRST in names:
            continue
        other = name.removesuffix(FIRST) + SECOND if name.endswith(FIRST) else name
        is_pair = other != name and other in names
        lines = _lines(runs, other if is_pair else name)
        title = f"{known(name).title} of {labels[0] if len(labels) == 1 else 'each video'}"
        if is_pair:
            lines = [(values, 0) for values, _ in _lines(runs[:1], name)] + lines
            title = f"{known(name.removesuffix(FIRST)).title} of "
            title += "both videos" if len(labels) == 1 else "the reference (grey) and each video"
        if any(value is not None for line, _ in lines for value in line):
            figure, axes = _figure(name.removesuffix(FIRST) if is_pair else name, lines, runs[0],
                                   shown)  # fmt: skip
            name = f"{prefix}-{len(result)}"
            result.append(plots.inline_svg(figure, name, escape(f"{title} by frame"), axes))
    return result


def _lines(runs: Sequence[Data], name: str) -> list[tuple[Values, int]]:
    return [
        ([number(value) for value in data["by_frame"][name]], colour(index))
        for index, data in enumerate(runs)
        if name in data["by_frame"]
    ]


def _figure(
    name: str, lines: Sequence[tuple[Values, int]], data: Data, shown: range | None
) -> tuple[Figure, Axes]:
    """Lines of (values, colour); infinite ones stand at the upper edge, which the axis names."""
    found, start = known(name), data.get("start", 0)
    end = start + data["frames"]
    figure, axes = plots.blank_figure(5.2, 2.6, f"{found.title}, {found.unit}".rstrip(", "))
    every = [v for values, _ in lines for v in values if v is not None]
    finite = [v for v in every if math.isfinite(v)]
    low, top = min(finite, default=0.0), max(finite, default=1.0)
    edge = top + 0.15 * (top - low or 1.0)
    if shown is not None:
        axes.axvspan(shown.start - 0.5, shown.stop - 0.5, color=plots.LINE, alpha=0.45, zorder=0)
    for values, series in lines:
        heights = [math.nan if v is None else edge if v == math.inf else v for v in values]
        first = end - len(values)  # a value of a step belongs to its second frame
        axes.plot(range(first, end), heights, color=plots.colour_of(series),
                  linewidth=1.8, marker="o" if len(values) == 1 else None)  # fmt: skip
    if found.unit == "0 is best" and low >= 0:
        axes.set_ylim(0.0, 1.1 * top or 1.0)
    axes.set_xlim(start - 0.5, max(end, start + 1) - 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    if math.inf in every:
        ticks = [tick for tick in axes.get_yticks() if low <= tick <= top]
        axes.set_yticks([*ticks, edge], [*(f"{tick:g}" for tick in ticks), "∞"])
    axes.set_xlabel("frame")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    return figure, axes
