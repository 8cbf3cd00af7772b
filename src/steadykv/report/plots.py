"""Figures as inline SVG that follow the page's light or dark theme.

Matplotlib draws with placeholder colours; they are replaced by CSS variables afterwards, and
everything that names another document (prolog, doctype, namespaces, metadata) is removed, so that
the SVG can stand inside HTML and loads nothing.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, DIM, LINE, PAPER = "#fe0101", "#fe0102", "#fe0103", "#fe0104"
SERIES_COUNT = 8  # distinct colours of the style sheet: variables --s0 … --s7
CEILING_DB = 60.0  # here the mean error is a quarter of one grey level: nothing to see above it


@dataclass(frozen=True)
class Curve:
    """One line by frame: ``mean[t]`` in dB, with an interval where ``low`` and ``high`` are given.

    ``colour`` is a series number of the style sheet, or None for the grey of the noise floor.
    """

    label: str
    mean: Sequence[float]
    colour: int | None
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Point:
    """One method in the plane of size and quality; ``low`` and ``high`` bound the quality."""

    label: str
    bits: float
    quality: float
    colour: int | None
    low: float | None = None
    high: float | None = None


def colour_of(series: int | None) -> str:
    """The placeholder colour of a series; None is the grey of the noise floor."""
    return DIM if series is None else f"#fe02{series % SERIES_COUNT:02x}"


def psnr_by_frame(curves: Sequence[Curve], first_frame: int, prefix: str = "psnr") -> str:
    """PSNR against the BF16 rollout by frame; ``first_frame`` numbers the first value.

    Values above the ceiling (identical frames) are drawn at it, which the axis says.
    """
    figure, axes = blank_figure(6.6, 3.7, "PSNR against BF16 in dB: higher is closer")
    ends: list[tuple[float, str, str]] = []
    for curve in curves:
        frames = range(first_frame, first_frame + len(curve.mean))
        values = [_cap(value) for value in curve.mean]
        is_floor = curve.colour is None
        axes.plot(
            frames,
            values,
            color=colour_of(curve.colour),
            linewidth=1.4 if is_floor else 2.0,
            linestyle=(0, (1, 2)) if is_floor else "-",
            solid_capstyle="round",
        )
        if curve.low is not None and curve.high is not None:
            low, high = [_cap(x) for x in curve.low], [_cap(x) for x in curve.high]
            axes.fill_between(
                frames, low, high, color=colour_of(curve.colour), alpha=0.16, linewidth=0
            )
        if values:
            ends.append((values[-1], curve.label, colour_of(curve.colour)))
    reached = [_cap(value) for curve in curves for value in curve.mean]
    lowest = min(reached, default=0.0)
    bottom, top = 5 * math.floor((lowest - 1) / 5), CEILING_DB + 1.5
    axes.set_ylim(bottom, top)
    ticks = list(range(int(bottom), int(CEILING_DB), 10 if CEILING_DB - bottom > 30 else 5))
    axes.set_yticks([*ticks, CEILING_DB], [*(str(tick) for tick in ticks), "60+"])
    axes.set_xlabel("frame")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    longest = max((len(curve.mean) for curve in curves), default=1)
    axes.set_xlim(first_frame - 0.5, first_frame + max(1, longest) - 0.5)
    label_ends(axes, ends, gap=(top - bottom) / 15)
    return inline_svg(figure, prefix, "PSNR against the BF16 rollout, frame by frame", axes)


def quality_by_bits(points: Sequence[Point], floor: float | None, prefix: str = "bits") -> str:
    """Quality (PSNR, dB) against bits per element; the front of undominated methods is joined.

    A point without an interval is hollow. What is above the ceiling is drawn at it, as "60+".
    """
    figure, axes = blank_figure(6.6, 3.7, "PSNR against BF16 in dB: higher is closer")
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bits, -p.quality)):
        if not front or point.quality > front[-1].quality:
            front.append(point)
    axes.step(
        [p.bits for p in front],
        [_cap(p.quality) for p in front],
        where="post",
        color=DIM,
        linewidth=1.0,
        linestyle=(0, (4, 3)),
        zorder=1,
    )
    for point in points:
        quality = _cap(point.quality)
        if point.low is not None and point.high is not None:
            axes.vlines(
                point.bits,
                _cap(point.low),
                _cap(point.high),
                color=colour_of(point.colour),
                linewidth=1.6,
                zorder=2,
            )
        colour = colour_of(point.colour)
        face = PAPER if point.low is None else colour
        axes.scatter([point.bits], [quality], s=52, facecolors=face, edgecolors=colour,
                     linewidths=1.8, zorder=3)  # fmt: skip
    if floor is not None and math.isfinite(floor):
        axes.axhline(_cap(floor), color=DIM, linewidth=1.4, linestyle=(0, (1, 2)))
        axes.text(
            0.005,
            _cap(floor),
            "noise floor" if floor <= CEILING_DB else f"noise floor, {floor:.1f} dB",
            transform=axes.get_yaxis_transform(),
            ha="left",
            va="bottom",
            color=DIM,
            fontsize=9,
        )
    bits = [p.bits for p in points] or [0.0, 16.0]
    values = [_cap(v) for p in points for v in (p.quality, p.low, p.high) if v is not None]
    if floor is not None:
        values.append(_cap(floor))
    span = max(max(bits) - min(bits), 0.5)
    axes.set_xlim(min(bits) - 0.08 * span, max(bits) + 0.22 * span)
    height = max(max(values, default=1.0) - min(values, default=0.0), 2.0)
    axes.set_ylim(
        min(values, default=0.0) - 0.12 * height, max(values, default=1.0) + 0.15 * height
    )
    _say_ceiling(axes, [floor, *(v for p in points for v in (p.quality, p.low, p.high))])
    _label_points(axes, points, height / 15)
    axes.set_xlabel("bits per stored number: lower is smaller")
    return inline_svg(figure, prefix, "Quality against size, one point a method")


def blank_figure(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """An empty plane in the page's placeholder colours."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=DIM, length=0, labelsize=10)
    axes.xaxis.label.set(color=DIM, fontsize=10)
    axes.set_title(title, loc="left", color=DIM, fontsize=10)
    return figure, axes


def label_ends(axes: Axes, ends: list[tuple[float, str, str]], gap: float) -> None:
    """(value, name, colour) at the right end of each line, pushed apart until none overlaps."""
    placed: list[float] = []
    low, high = axes.get_ylim()
    ordered = sorted(ends, key=lambda end: end[0])
    for value, _, _ in ordered:
        placed.append(max(value, placed[-1] + gap) if placed else max(value, low + gap / 2))
    overflow = placed[-1] - (high - gap / 2) if placed else 0.0
    for index in range(len(placed) - 1, -1, -1):
        ceiling = placed[index + 1] - gap if index + 1 < len(placed) else math.inf
        placed[index] = min(placed[index] - (overflow if overflow > 0 else 0), ceiling)
        if overflow > 0 and index and placed[index] - placed[index - 1] >= gap:
            overflow = 0.0
    right = axes.get_xlim()[1]
    for (_, label, colour), height in zip(ordered, placed, strict=True):
        axes.annotate(
            label,
            (right, height),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=10,
            fontweight="bold",
            annotation_clip=False,
        )


def _label_points(axes: Axes, points: Sequence[Point], gap: float) -> None:
    """Names beside the points; points of about the same place get names above each other."""
    left, right = axes.get_xlim()
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: _cap(p.quality)):
        height = _cap(point.quality)
        near = 0.2 * (right - left)
        while any(abs(x - point.bits) < near and abs(y - height) < gap for x, y in taken):
            height += gap / 4
        taken.append((point.bits, height))
        axes.annotate(
            point.label,
            (point.bits, height),
            xytext=(7, 4),  # above the line that joins the front
            textcoords="offset points",
            va="bottom",
            color=colour_of(point.colour),
            fontsize=10,
            fontweight="bold",
            annotation_clip=False,
        )


def _say_ceiling(axes: Axes, values: Sequence[float | None]) -> None:
    """Where something lies beyond the ceiling, the axis says that it is drawn at it."""
    if all(value is None or value <= CEILING_DB for value in values):
        return
    bottom, top = axes.get_ylim()
    step = (top - bottom) / 30
    ticks = [tick for tick in axes.get_yticks() if bottom <= tick < CEILING_DB - step]
    axes.set_yticks([*ticks, CEILING_DB], [*(f"{tick:g}" for tick in ticks), f"{CEILING_DB:g}+"])


def _cap(value: float) -> float:
    return CEILING_DB if math.isnan(value) else min(float(value), CEILING_DB)


def inline_svg(figure: Figure, prefix: str, label: str, frames: Axes | None = None) -> str:
    """A figure drawn in placeholder colours as SVG for a page; `prefix` keeps its ids apart.

    ``frames`` are axes whose x counts frames: the page links them to its players.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r"font(-family)?: [^;\"]*sans-serif", _font, text)
    for placeholder, variable in ((INK, "ink"), (DIM, "dim"), (LINE, "line"), (PAPER, "paper")):
        text = text.replace(placeholder, f"var(--{variable})")
    text = re.sub(r"#fe02(\w\w)", lambda match: f"var(--s{int(match[1], 16)})", text)
    size = re.search(r'viewBox="([^"]*)"', text)
    assert size is not None, "matplotlib always writes a viewBox"
    linked = "" if frames is None else f" data-frames='{_frame_plane(frames, size[1])}'"
    opening = f'<svg class="plot" role="img" aria-label="{label}" viewBox="{size[1]}"{linked}>'
    return re.sub(r"<svg[^>]*>", opening, text, count=1)


def _frame_plane(axes: Axes, view_box: str) -> str:
    """Edges of drawn axes in units of the view box, and the frames at the left and right one."""
    _, _, width, height = map(float, view_box.split())
    box = axes.get_position()
    first, last = axes.get_xlim()
    plane = {
        "left": box.x0 * width,
        "right": box.x1 * width,
        "top": (1 - box.y1) * height,
        "bottom": (1 - box.y0) * height,
        "first": first,
        "last": last,
    }
    return json.dumps({name: round(value, 3) for name, value in plane.items()})


def _font(match: re.Match[str]) -> str:
    """Keep size and weight of a ``font:`` shorthand, and take the page's own typeface."""
    if match[1]:
        return "font-family: inherit"
    size = re.search(r"[\d.]+px", match[0])
    weight = "font-weight: 700; " if "bold" in match[0] or " 700 " in match[0] else ""
    return f"{weight}font-size: {size[0] if size else '10px'}; font-family: inherit"
