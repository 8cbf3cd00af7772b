"""The table and the figure of `steadykv bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from steadykv.report.tensor_plots import Drawing, Theme

__all__ = ["bench_table", "drawing", "headline"]

Row = Mapping[str, Any]

RATES = "machine"


def headline(rows: Sequence[Row]) -> str:
    """The device, the shape, and the two rates of the machine."""
    first = rows[0]
    copy = next(row for row in rows if row["work"] == "copy")
    matmul = next(row for row in rows if row["work"] == "matmul")
    return (
        f"{first['gpu']}, torch {first['torch']}, triton {first['triton'] or 'not installed'}\n"
        f"heads x tokens x head dim, queries: {first['shape']}\n"
        f"copy {copy['gb_per_s']:.0f} GB/s, BF16 product {matmul['tflop_per_s']:.3g} TFLOP/s"
    )


def bench_table(rows: Sequence[Row]) -> Table:
    """Every work: time, the machine's limit, and the time of what else does it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("work", "method"):
        table.add_column(name)
    for name in ("ms", "limit", "of it", "instead", "ms", "speed", "peak MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in _timed(rows):
        table.add_row(
            row["work"],
            row["method"],
            _number(row["median_ms"]),
            _number(row["limit_ms"]),
            f"{100 * row['share_of_limit']:.0f} %",
            row["baseline"] or "–",
            _number(row["baseline_ms"]),
            "–" if row["speedup"] is None else f"{row['speedup']:.2f}×",
            "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.1f}",
        )
    return table


def drawing(rows: Sequence[Row]) -> Drawing:
    """Bars of time; a line at the machine's limit, a mark at what else does the work."""
    return Drawing("bench", "Time of each work", partial(_bars, list(_timed(rows))))


def _bars(rows: Sequence[Row], theme: Theme) -> Figure:
    figure = Figure(figsize=(7.2, 0.9 + 0.34 * len(rows)), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    works = list(dict.fromkeys(row["work"] for row in rows))
    for place, row in enumerate(rows):
        color = theme.series[1 + works.index(row["work"]) % (len(theme.series) - 1)]
        low, high = (abs(row[name] - row["median_ms"]) for name in ("p20_ms", "p80_ms"))
        axes.barh(
            place, row["median_ms"], height=0.62, color=color,
            xerr=[[low], [high]], ecolor=theme.ink, error_kw={"linewidth": 1.0},
        )  # fmt: skip
        axes.vlines(row["limit_ms"], place - 0.4, place + 0.4, color=theme.ink, linewidth=2.0)
        if row["baseline_ms"] is not None:
            axes.plot(
                [row["baseline_ms"]], [place], marker="D", markersize=7, color=theme.paper,
                markeredgecolor=theme.ink, linestyle="none",
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), [f"{row['work']}  {row['method']}" for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds; line: limit of the machine, diamond: what else does it")
    axes.tick_params(which="both", colors=theme.ink, length=0)
    axes.spines["bottom"].set_color(theme.line)
    axes.xaxis.label.set_color(theme.ink)
    axes.grid(axis="x", color=theme.line, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


def _timed(rows: Sequence[Row]) -> Sequence[Row]:
    return [row for row in rows if row["method"] != RATES]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
