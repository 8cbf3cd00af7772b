"""The picture of `benchmarks.curve`: a panel a measure, every point named where it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

PAPER, INK, DIM, LINE, OWN = "#fbfbf9", "#1b1d22", "#666b76", "#e2e3e0", "#c25a00"
"""Of the report's style sheet: page, text, what is beside it, rules, its first strong colour."""
DPI = 150
"""Of the figure and of the file: names are placed in pixels."""


@dataclass(frozen=True)
class Measure:
    """column: in the rows. title: above its panel. sign: 1 where more is better, else -1."""

    column: str
    title: str
    sign: int
    scale: float = 1.0


@dataclass(frozen=True)
class Point:
    """One method in one panel; low and high are None without an interval."""

    label: str
    bits: float
    value: float
    low: float | None = None
    high: float | None = None


def draw(
    panels: Mapping[Measure, Sequence[Point]],
    family: Sequence[str],
    limits: tuple[float, float],
    floors: Mapping[str, float],
) -> Figure:
    """A panel a measure; family: labels of the line's points. floors: column -> noise floor."""
    figure = Figure(figsize=(9.6, 9.6), dpi=DPI, facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplot_mosaic([["psnr", "psnr"], ["flicker_error", "top1_shift"]],
                                   height_ratios=[1.25, 1])  # fmt: skip
    for measure, points in panels.items():
        axes = places[measure.column]
        style(axes, measure.title, "bits per stored number: lower is smaller")
        if measure.column == "flicker_error":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        shown = [p for p in points if limits[0] <= p.bits <= limits[1]]
        own = sorted((p for p in shown if p.label in family), key=lambda p: p.bits)
        axes.plot([p.bits for p in own], [p.value for p in own], color=OWN, linewidth=2.2)
        for point in shown:
            colour = OWN if point.label in family else INK
            if point.low is not None and point.high is not None:
                axes.vlines(point.bits, point.low, point.high, color=colour, linewidth=1.2)
            axes.plot([point.bits], [point.value], "o", color=colour, markersize=5, zorder=3)
        values = [p.value for p in shown]
        floor = floors.get(measure.column)
        # Far from every point it would only press them together.
        if floor is not None and floor < 1.5 * max(values) - 0.5 * min(values):
            axes.axhline(floor, color=DIM, linewidth=1.2, linestyle=(0, (1, 2)))
            axes.annotate("noise floor", (1, floor), xycoords=axes.get_yaxis_transform(),
                          ha="right", va="bottom", color=DIM, fontsize=8)  # fmt: skip
        axes.set_xlim(*limits)
        axes.margins(y=0.12)
    figure.draw_without_rendering()  # labels are placed in pixels, which the layout decides
    figure.set_layout_engine("none")
    for measure, points in panels.items():
        shown = [p for p in points if limits[0] <= p.bits <= limits[1]]
        _name_points(places[measure.column], shown, family)
    return figure


def style(axes: Axes, title: str, below: str) -> None:
    """As the report's figures look."""
    axes.set_facecolor(PAPER)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=DIM, length=0, labelsize=9)
    axes.set_xlabel(below, color=DIM, fontsize=9)
    axes.set_title(title, loc="left", color=DIM, fontsize=10)


def _name_points(axes: Axes, points: Sequence[Point], family: Sequence[str]) -> None:
    """Every name where it covers no point, interval or other name, tied to its point if far."""
    figure = axes.figure
    to_pixels = axes.transData.transform
    taken = []
    for point in points:
        x, y = to_pixels((point.bits, point.value))
        taken.append(Bbox.from_extents(x - 4, y - 4, x + 4, y + 4))
        if point.low is not None and point.high is not None:
            (_, low), (_, high) = to_pixels([(point.bits, v) for v in (point.low, point.high)])
            taken.append(Bbox.from_extents(x - 1, low, x + 1, high))
    own = sorted((p for p in points if p.label in family), key=lambda p: p.bits)
    for first, second in pairwise(own):  # the line, in short pieces
        ends = to_pixels([(p.bits, p.value) for p in (first, second)])
        for x, y in np.linspace(*ends, 40):
            taken.append(Bbox.from_extents(x - 2, y - 2, x + 2, y + 2))
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    inside = axes.get_window_extent(renderer).padded(12)
    for point in sorted(points, key=lambda p: (p.label not in family, -p.value)):
        is_own = point.label in family
        text = axes.annotate(
            point.label,
            (point.bits, point.value),
            xytext=(0, 0),
            textcoords="offset pixels",
            color=OWN if is_own else INK,
            fontsize=8,
            fontweight="bold" if is_own else "normal",
            ha="left",
            va="bottom",
        )
        size = text.get_window_extent(renderer)
        x, y = to_pixels((point.bits, point.value))
        moves = _offsets(size.width, size.height)
        best = moves[_costs(size, moves, taken, inside).argmin()]
        text.set_position(best)
        placed = Bbox.from_bounds(x + best[0], y + best[1], size.width, size.height)
        taken.append(placed)
        if np.hypot(placed.x0 + placed.width / 2 - x, placed.y0 + placed.height / 2 - y) > (
            size.width / 2 + 22
        ):
            corner = (np.clip(x, placed.x0, placed.x1), np.clip(y, placed.y0, placed.y1))
            start, end = axes.transData.inverted().transform([(x, y), corner])
            axes.plot(*zip(start, end, strict=True), color=DIM, linewidth=0.6, zorder=1)


def _offsets(width: float, height: float) -> NDArray[np.float64]:
    """Where a name's lower left corner may lie from its point, in pixels [places, 2]."""
    distance, turn = np.meshgrid(np.arange(7, 140, 7), np.arange(24) * np.pi / 12)
    right, up = distance * np.cos(turn), distance * np.sin(turn)
    x = right - width * (1 - np.cos(turn)) / 2
    y = up - height * (1 - np.sin(turn)) / 2
    return np.stack((x.ravel(), y.ravel()), axis=-1)


def _costs(
    size: Bbox, moves: NDArray[np.float64], taken: Sequence[Bbox], inside: Bbox
) -> NDArray[np.float64]:
    """How bad each place is: what it covers and how far it sticks out, then how far away it is."""
    low = moves + size.min - 1
    high = moves + size.max + 1
    others = np.array([box.extents for box in taken])
    covers = ((low[:, None] < others[:, 2:]) & (high[:, None] > others[:, :2])).all(-1).sum(-1)
    out = np.maximum(inside.min - low, high - inside.max).clip(0).max(-1)
    away = moves + [size.width / 2, size.height / 2]
    return 1000.0 * covers + 100.0 * out + np.hypot(away[:, 0] * 0.5, away[:, 1])
