"""The tables of the report: every method's numbers, and differences to one method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steadykv.evaluation.protocol import FLOOR, FLOORS
from steadykv.evaluation.verdict import Word
from steadykv.report import html, text
from steadykv.report.measures import Measure, is_best, measures
from steadykv.report.memory import memory_columns

Row = Mapping[str, Any]


def number_table(rows: Sequence[Row], series: Mapping[str, int]) -> str:
    """The numbers of every method; the best of those that pack something is marked."""
    columns = measures(rows)
    lines = []
    for row in rows:
        is_floor = row["method"] in FLOORS
        # The floor's cache is the original's: only its video says something.
        cells = [
            html.Cell("–") if is_floor and measure.is_size else _cell(measure, row, rows)
            for measure in columns
        ]
        title = text.method_title(row["method"])
        lines.append(html.Row(title, cells, series.get(row["method"]), is_floor))
    return html.table([html.Column(m.title, m.unit, m.meaning) for m in columns], lines)


def memory_table(rows: Sequence[Row], series: Mapping[str, int]) -> str:
    """The bars of the memory figure as numbers, folded away."""
    shown = [row for row in rows if row["method"] != FLOOR]
    columns = memory_columns(rows)
    head = [html.Column(name, "MiB", "") for name, _ in columns]
    lines = [
        html.Row(
            text.method_title(row["method"]),
            [html.Cell(values[index]) for _, values in columns],
            series.get(row["method"]),
        )
        for index, row in enumerate(shown)
    ]
    return html.folded("These bars in numbers", html.plain_table(head, lines))


def paired_table(rows: Sequence[Row], series: Mapping[str, int], against: str) -> str:
    """Differences to one method, walk by walk, with their intervals."""
    columns = [m for m in measures(rows) if m.better is not None and not m.is_size]
    lines = []
    for row in text.packed_rows(rows):
        if row["paired"] is not None:
            found = [measure.paired(row) for measure in columns]
            cells = [
                html.Cell("–") if pair is None else _paired_cell(pair, measure.verdict(row))
                for measure, pair in zip(columns, found, strict=True)
            ]
            title = text.method_title(row["method"])
            lines.append(html.Row(title, cells, series[row["method"]]))
    head = [html.Column(m.title, m.unit, m.meaning) for m in columns]
    return html.table(head, lines, first=f"minus {text.method_title(against)}")


def _paired_cell(pair: tuple[str, str], verdict: str) -> html.Cell:
    mean, interval = pair
    detail = " · ".join(part for part in (interval, verdict) if part)
    return html.Cell(mean, detail, is_best=verdict == Word.better)


def _cell(measure: Measure, row: Row, rows: Sequence[Row]) -> html.Cell:
    value = measure.value(row)
    if value is None:
        return html.Cell("–")
    largest = max(found for found in map(measure.value, rows) if found is not None)
    return html.Cell(
        measure.shown(row),
        detail=measure.detail(row),
        is_best=is_best(measure, row, rows),
        bar=value / largest if measure.has_bar and largest else None,
    )
