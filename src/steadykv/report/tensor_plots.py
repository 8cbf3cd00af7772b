"""Figures about captured tensors, for the page (inline SVG) and as PNG files."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from steadykv.report import plots
from steadykv.report.text import method_title

Row = Mapping[str, Any]

MARKERS = "os^Dv"
# Colours of the light theme in page/page.css; a PNG cannot follow the reader's theme.
LIGHT = {"dim": "#666b76", "line": "#e2e3e0", "ink": "#1b1d22", "paper": "#fbfbf9"}
LIGHT_SERIES = (
    "#3d4350", "#c25a00", "#c2185b", "#0b6bbd", "#7a3fb8", "#0a7f6f", "#8a6a00", "#4a55c8",
)  # fmt: skip


@dataclass(frozen=True)
class Theme:
    """Colours of a figure: of lines and text, and of each series."""

    dim: str
    line: str
    ink: str
    paper: str
    series: tuple[str, ...]


PAGE = Theme(
    plots.DIM,
    plots.LINE,
    plots.INK,
    plots.PAPER,
    tuple(map(plots.colour_of, range(plots.SERIES_COUNT))),
)
PRINT = Theme(**LIGHT, series=LIGHT_SERIES)


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn in any theme. name: of its file; title: what it shows."""

    name: str
    title: str
    draw: Callable[[Theme], Figure]

    def svg(self) -> str:
        """For the page."""
        return plots.inline_svg(self.draw(PAGE), self.name, self.title)

    def png(self) -> bytes:
        """On white, 150 dots an inch."""
        figure = self.draw(PRINT)
        figure.patch.set(facecolor="white", alpha=1.0)
        buffer = io.BytesIO()
        FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
        return buffer.getvalue()


def series_of(rows: Sequence[Row]) -> dict[str, int]:
    """Colour number of each method; 0, the grey of the original, is left free."""
    count = plots.SERIES_COUNT - 1
    return {row["method"]: 1 + index % count for index, row in enumerate(rows)}


def drawings(rows: Sequence[Row], cells: Sequence[Row]) -> list[Drawing]:
    """Every figure that these results have numbers for."""
    has_queries = any(row["output_error"] is not None for row in rows)
    name, what = ("output_error", "attention-output error") if has_queries else (
        "key_error", "key error")  # fmt: skip
    found = [
        Drawing("size", f"Relative {what} by size", partial(_sizes, rows, name, what)),
        Drawing("parts", "Bits by part", partial(_parts, rows)),
    ]
    if has_queries:
        title = "Attention-output error by what is packed"
        found.append(Drawing("sides", title, partial(_sides, rows)))
    for key in ("span", "layer"):
        if len({cell[key] for cell in cells}) > 1:
            measure, text = ("key_error", "key error") if key == "span" else (name, what)
            draw = partial(_lines, rows, cells, key, measure, text)
            found.append(Drawing(f"{key}s", f"Relative {text} by {key}", draw))
    return found


def _sizes(rows: Sequence[Row], name: str, what: str, theme: Theme) -> Figure:
    """Error against bits: nearer the lower left corner is better."""
    figure, axes = empty_figure(f"relative {what}: lower is closer", theme)
    series = series_of(rows)
    points = [row for row in rows if row[name] is not None]
    for index, row in enumerate(points):
        colour = theme.series[series[row["method"]]]
        marker = MARKERS[index // (plots.SERIES_COUNT - 1) % len(MARKERS)]
        axes.scatter([row["bits_per_element"]], [row[name]], s=52, color=colour, marker=marker)
    bits = [row["bits_per_element"] for row in points] or [0.0]
    width = max(max(bits) - min(bits), 0.5)
    axes.set_xlim(min(bits) - 0.08 * width, max(bits) + 0.3 * width)
    highest = max((row[name] for row in points), default=1.0) or 1.0
    axes.set_ylim(0.0, 1.15 * highest)
    taken: list[tuple[float, float]] = []
    for row in sorted(points, key=lambda r: r[name]):
        x, height = row["bits_per_element"], row[name]
        while any(abs(x - a) < 0.25 * width and abs(height - b) < highest / 15 for a, b in taken):
            height += highest / 60
        taken.append((x, height))
        colour = theme.series[series[row["method"]]]
        axes.annotate(method_title(row["method"]), (x, height), xytext=(7, 0),
                      textcoords="offset points", va="center", color=colour, fontsize=10,
                      fontweight="bold", annotation_clip=False)  # fmt: skip
    axes.set_xlabel("bits per stored number: lower is smaller")
    return figure


def _parts(rows: Sequence[Row], theme: Theme) -> Figure:
    """Stacked bars, keys above values of each method."""
    figure, axes = empty_figure("bits per number of keys (K) and values (V)", theme, len(rows))
    parts = list(
        dict.fromkeys(p for row in rows for side in row["bits_by_part"].values() for p in side)
    )
    for index, row in enumerate(rows):
        for offset, (letter, side) in enumerate((("K", "keys"), ("V", "values"))):
            place, start = -index + 0.2 - 0.4 * offset, 0.0
            for part, bits in row["bits_by_part"][side].items():
                colour = theme.series[(1 + parts.index(part)) % len(theme.series)]
                axes.barh(place, bits, height=0.34, left=start, color=colour)
                start += bits
            axes.text(start, place, f" {letter} {start:.2f}", va="center", color=theme.dim,
                      fontsize=9)  # fmt: skip
    for index, part in enumerate(parts):
        axes.barh(0, 0, color=theme.series[(1 + index) % len(theme.series)], label=part)
    _legend(figure, axes, theme, min(4, len(parts)))
    _name_rows(axes, rows, theme)
    axes.margins(x=0.12)
    return figure


def _sides(rows: Sequence[Row], theme: Theme) -> Figure:
    """Three bars a method: only keys, only values, both packed."""
    figure, axes = empty_figure("relative error of the attention output", theme, len(rows))
    names = {"output_error_keys": "keys only", "output_error_values": "values only",
             "output_error": "both"}  # fmt: skip
    for offset, (name, label) in enumerate(names.items()):
        colour = theme.series[(3, 1, 0)[offset]]
        places = [-index + 0.27 - 0.27 * offset for index in range(len(rows))]
        errors = [row[name] or 0.0 for row in rows]
        axes.barh(places, errors, height=0.23, color=colour, label=label)
    _legend(figure, axes, theme, 3)
    _name_rows(axes, rows, theme)
    return figure


def _lines(
    rows: Sequence[Row], cells: Sequence[Row], key: str, name: str, what: str, theme: Theme
) -> Figure:
    """Mean of one measure by span or by layer, one line a method."""
    figure, axes = empty_figure(f"relative {what} by {key}: lower is closer", theme)
    series, ends = series_of(rows), []
    for index, row in enumerate(rows):
        by_key: dict[int, list[float]] = {}
        for cell in cells:
            if cell["method"] == row["method"] and cell[name] is not None:
                by_key.setdefault(cell[key], []).append(cell[name])
        if not by_key:
            continue
        numbers = sorted(by_key)
        means = [sum(by_key[number]) / len(by_key[number]) for number in numbers]
        number = series[row["method"]]
        marker = MARKERS[index // (plots.SERIES_COUNT - 1) % len(MARKERS)]
        axes.plot(numbers, means, color=theme.series[number], linewidth=1.8, marker=marker,
                  markersize=4)  # fmt: skip
        ends.append((means[-1], method_title(row["method"]), theme.series[number]))
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel(key)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.margins(x=0.02)
    low, high = axes.get_ylim()
    plots.label_ends(axes, ends, gap=(high - low) / 15)
    return figure


def empty_figure(title: str, theme: Theme, bars: int | None = None) -> tuple[Figure, Axes]:
    """An empty figure; `bars` groups of horizontal bars set its height."""
    height = 3.7 if bars is None else 1.3 + 0.62 * bars
    figure = Figure(figsize=(6.6, height), dpi=150, layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.line)
    axes.grid(axis="y" if bars is None else "x", color=theme.line, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.dim, length=0, labelsize=10)
    axes.xaxis.label.set(color=theme.dim, fontsize=10)
    axes.set_title(title, loc="left", color=theme.dim, fontsize=10)
    return figure, axes


def _legend(figure: Figure, axes: Axes, theme: Theme, columns: int) -> None:
    """Below the axes, where the layout makes room: above them it would lie on their title."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", frameon=False,
                  fontsize=9, labelcolor=theme.dim, ncols=columns)  # fmt: skip


def _name_rows(axes: Axes, rows: Sequence[Row], theme: Theme) -> None:
    """Method names at the left of their bars."""
    titles = [method_title(row["method"]) for row in rows]
    axes.set_yticks([-index for index in range(len(rows))], titles)
    for label in axes.get_yticklabels():  # colours stand for the bars here
        label.set(color=theme.ink, fontweight="bold")
    axes.set_ylim(-len(rows) + 0.45, 0.55)
