"""The table that `steadykv measure` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from steadykv.evaluation.measure import METRICS


def number(value: float | str | None, metric: str) -> str:
    """As printed: dB with two decimals, everything else with four significant digits."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return "∞" if value == "inf" else value
    return f"{value:.2f}" if metric == "psnr" else f"{value:.4f}"


def summary_table(data: Mapping[str, Any]) -> Table:
    """Mean, worst frame and 5 % tail of every metric in ``measure.json``."""
    table = Table(box=None, pad_edge=False)
    table.add_column("metric")
    for title in ("all frames", "worst 5 %", "worst frame"):
        table.add_column(title, justify="right")
    table.add_column("at", justify="right")
    for name, value in data["summary"].items():
        metric, tail = METRICS[name], data["tails"][name]
        sign = "≤" if metric.higher else "≥"
        table.add_row(
            _head(name),
            number(value, name),
            "–" if tail is None else f"{sign} {number(tail['quantile'], name)}",
            "–" if tail is None else number(tail["worst"], name),
            "–" if tail is None else f"frame {tail['worst_frame']:,}",
        )
    return table


def _head(name: str) -> str:
    """Title and unit of a metric, as "PSNR, dB"."""
    metric = METRICS[name]
    return f"{metric.title}, {metric.unit}" if metric.unit else metric.title


def window_table(data: Mapping[str, Any]) -> Table:
    """One row a window of --window frames."""
    names = list(data["summary"])
    table = Table("frames", box=None, pad_edge=False)
    for name in names:
        table.add_column(_head(name), justify="right")
    for window in data["windows"]:
        label = f"{window['start']:,}–{window['end'] - 1:,}"
        table.add_row(label, *(number(window[name], name) for name in names))
    return table


def runs_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row a measurement, as `steadykv report` merges them."""
    names = list(dict.fromkeys(name for row in rows for name in row if name in METRICS))
    table = Table("run", "video", box=None, pad_edge=False)
    for name in names:
        table.add_column(_head(name), justify="right")
    for row in rows:
        table.add_row(row["run"], row["video"], *(number(row.get(name), name) for name in names))
    return table
