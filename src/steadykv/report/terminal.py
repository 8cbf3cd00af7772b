"""The table of results for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from steadykv.evaluation.protocol import FLOORS
from steadykv.evaluation.verdict import Word
from steadykv.report.measures import Measure, is_best, measures
from steadykv.report.text import method_title, packed_rows

Row = Mapping[str, Any]

_STYLES = {Word.better.value: "green", Word.worse.value: "red"}
NARROW = 92  # columns of a terminal below which the peak is left to the report


def result_table(rows: Sequence[Row], width: int) -> Table:
    """What the report shows, less the PSNR windows between the first and the longest.

    ``width`` is that of the terminal in characters.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("cache", min_width=len("noise floor"))
    columns = _columns(measures(rows), width)
    for column in columns:
        # The scale stands below: 80 columns have no room for it beside the name.
        table.add_column(column.short.replace(" ×", "\n×"), justify="right", no_wrap=True)
    for row in rows:
        is_floor = row["method"] in FLOORS
        cells = []
        for column in columns:
            value = column.value(row)
            if value is None or (is_floor and column.is_size):
                cells.append("–")
            elif is_best(column, row, rows):
                cells.append(f"[bold green]{column.shown(row)}[/bold green]")
            else:
                cells.append(column.shown(row))
        table.add_row(method_title(row["method"]), *cells, style="dim" if is_floor else None)
    return table


def difference_table(rows: Sequence[Row]) -> Table | None:
    """Paired differences with their verdicts, None where the rows have none."""
    against = next((row["paired"]["against"] for row in rows if row["paired"]), None)
    if against is None:
        return None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(f"minus {method_title(against)}")
    table.add_column("measure")
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("interval", justify="right", no_wrap=True)
    table.add_column("verdict")
    for row in packed_rows(rows):
        title = method_title(row["method"])
        for measure in _columns(measures(rows), NARROW):
            pair = measure.paired(row)
            if pair is None or measure.better is None or measure.is_size:
                continue
            verdict = measure.verdict(row)
            table.add_row(title, measure.short, *pair, verdict, style=_STYLES.get(verdict, "dim"))
            title = ""
    return table


def _columns(columns: Sequence[Measure], width: int) -> list[Measure]:
    windows = [column for column in columns if column.path[0] == "psnr_windows"]
    left_out = windows[1:-1]
    if width < NARROW:
        left_out += [column for column in columns if column.path[0] == "peak_bytes"]
    return [column for column in columns if column not in left_out]
