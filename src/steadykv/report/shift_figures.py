"""Where packed keys lose the selected token: token shift by layer and head, by step and by span."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from steadykv.report import html, plots
from steadykv.report.tensor_plots import MARKERS, Drawing, Theme, empty_figure, series_of
from steadykv.report.text import method_title

Row = Mapping[str, Any]

SHIFT = "top1_shift"
ABOUT = (
    "Share of later queries whose best key of the span is another one after packing (top-1). Each "
    "square is a layer and a query head, the mean over its spans and steps: the fuller its colour, "
    "the more of them look elsewhere. A step is a pass within a chunk; the last one, which commits "
    "the chunk, is marked."
)


def shift_drawings(rows: Sequence[Row], cells: Sequence[Row]) -> list[Drawing]:
    """Every figure of token shift that these results have numbers for."""
    found = []
    if len(by_layer_and_head(cells)) and _count(cells, "by_head") > 1:
        found.append(Drawing("heads", "Token shift by layer and head", partial(_maps, rows, cells)))
    for part, title in (("by_step", "step"), ("by_span", "span"), ("by_layer", "layer")):
        if len(_places(rows, part)) > 1:
            draw = partial(_lines, rows, part, title)
            found.append(Drawing(f"shift-{title}s", f"Token shift by {title}", draw))
    return found


def shift_table(name: str, rows: Sequence[Row], cells: Sequence[Row]) -> str:
    """The numbers of the figure `name` in percent, folded away, to be copied."""
    series = series_of(rows)
    if name == "heads":
        shares = by_layer_and_head(cells)
        heads = sorted({head for _, _, head in shares})
        layers = sorted({layer for _, layer, _ in shares})
        lines = [
            html.Row(
                f"{method_title(row['method'])} layer {layer}",
                [html.Cell(_percent(shares.get((row["method"], layer, h)))) for h in heads],
                series[row["method"]],
            )
            for row in rows
            for layer in layers
        ]
        columns = [html.Column(f"head {head}", "%", "") for head in heads]
    else:
        part = f"by_{name.removeprefix('shift-').removesuffix('s')}"
        places = _places(rows, part)
        columns = [html.Column(_place_name(part, place), "%", "") for place in places]
        lines = []
        for row in rows:
            own = {_place(part, entry): entry[SHIFT] for entry in row[part]}
            cells_of = [html.Cell(_percent(own.get(place))) for place in places]
            lines.append(html.Row(method_title(row["method"]), cells_of, series[row["method"]]))
    return html.folded("This figure in numbers", html.plain_table(columns, lines, first="method"))


def by_layer_and_head(cells: Sequence[Row]) -> dict[tuple[str, int, int], float]:
    """(method, layer, head) -> mean share over the spans that have later queries."""
    found: dict[tuple[str, int, int], list[float]] = {}
    for cell in cells:
        for part in cell.get("by_head", ()):
            if part[SHIFT] is not None:
                key = cell["method"], cell["layer"], part["head"]
                found.setdefault(key, []).append(part[SHIFT])
    return {key: sum(shares) / len(shares) for key, shares in found.items()}


def _count(cells: Sequence[Row], name: str) -> int:
    """How many squares a method has."""
    return len({(cell["layer"], part["head"]) for cell in cells for part in cell.get(name, ())})


def _maps(rows: Sequence[Row], cells: Sequence[Row], theme: Theme) -> Figure:
    """One map a method, layers down and heads across; all on one scale."""
    shares = by_layer_and_head(cells)
    layers = sorted({layer for _, layer, _ in shares})
    heads = sorted({head for _, _, head in shares})
    top = max(shares.values()) or 1.0
    columns = min(3, len(rows))
    lines = math.ceil(len(rows) / columns)
    height = lines * (0.75 + 0.22 * len(layers))
    figure = Figure(figsize=(6.6, max(1.6, height)), dpi=150, layout="constrained")
    figure.patch.set_alpha(0.0)
    series = series_of(rows)
    for index, row in enumerate(rows):
        axes = figure.add_subplot(lines, columns, index + 1)
        axes.patch.set_alpha(0.0)
        colour = theme.series[series[row["method"]]]
        own = [shares.get((row["method"], layer, head)) for layer in layers for head in heads]
        known = [share for share in own if share is not None]
        mean = f" {100 * sum(known) / len(known):.0f} %" if known else ""
        axes.set_title(f"{method_title(row['method'])}{mean}", loc="left", color=colour,
                       fontsize=9, fontweight="bold")  # fmt: skip
        for place, share in enumerate(own):
            down, across = divmod(place, len(heads))
            if share is not None:
                # Opacity, not mixed colours: a page may be dark.
                axes.bar(across, 0.92, width=0.92, bottom=down - 0.46, linewidth=0,
                         color=to_rgba(colour), alpha=max(0.04, share / top))  # fmt: skip
        axes.set_xlim(-0.5, len(heads) - 0.5)
        axes.set_ylim(len(layers) - 0.5, -0.5)
        axes.set_xticks(*_sparse(heads))
        axes.set_yticks(*_sparse(layers))
        axes.tick_params(colors=theme.dim, length=0, labelsize=8)
        for spine in axes.spines.values():
            spine.set_visible(False)
        if index // columns == lines - 1 or index + columns >= len(rows):
            axes.set_xlabel("head", color=theme.dim, fontsize=8)
        if index % columns == 0:
            axes.set_ylabel("layer", color=theme.dim, fontsize=8)
    figure.supxlabel(f"full colour: {100 * top:.0f} % of the queries", color=theme.dim, fontsize=8)
    return figure


def _sparse(numbers: Sequence[int], most: int = 8) -> tuple[list[int], list[str]]:
    """Places and labels of at most `most` ticks."""
    step = math.ceil(len(numbers) / most)
    return list(range(0, len(numbers), step)), [str(n) for n in numbers[::step]]


def _lines(rows: Sequence[Row], part: str, title: str, theme: Theme) -> Figure:
    figure, axes = empty_figure(f"% of queries with another best key, by {title}", theme)
    places, series, ends = _places(rows, part), series_of(rows), []
    for index, row in enumerate(rows):
        own = {_place(part, entry): entry[SHIFT] for entry in row[part]}
        values = [math.nan if own.get(p) is None else 100 * own[p] for p in places]
        number = series[row["method"]]
        marker = MARKERS[index // (plots.SERIES_COUNT - 1) % len(MARKERS)]
        axes.plot(range(len(places)), values, color=theme.series[number], linewidth=1.8,
                  marker=marker, markersize=4)  # fmt: skip
        if not math.isnan(values[-1]):
            ends.append((values[-1], method_title(row["method"]), theme.series[number]))
    axes.set_ylim(bottom=0.0)
    names = [_place_name(part, place).removeprefix(f"{title} ") for place in places]
    step = math.ceil(len(names) / 12)
    axes.set_xticks(range(0, len(names), step), names[::step])
    axes.set_xlabel(title)
    axes.margins(x=0.02)
    low, high = axes.get_ylim()
    plots.label_ends(axes, ends, gap=(high - low) / 15)
    return figure


def _places(rows: Sequence[Row], part: str) -> list[tuple[int, bool]]:
    return sorted({_place(part, entry) for row in rows for entry in row.get(part, ())})


def _place(part: str, entry: Row) -> tuple[int, bool]:
    """Number of a step, span or layer, and whether it is a pass that commits."""
    return entry[part.removeprefix("by_")], bool(entry.get("is_clean", False))


def _place_name(part: str, place: tuple[int, bool]) -> str:
    name = f"{part.removeprefix('by_')} {place[0]}"
    return f"{name} (commit)" if place[1] else name


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"
