"""The page about captured tensors: what each method does to them, in numbers and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steadykv.report import html, text
from steadykv.report.measures import Measure, is_best
from steadykv.report.shift_figures import ABOUT, shift_drawings, shift_table
from steadykv.report.tensor_measures import show, tensor_measures
from steadykv.report.tensor_plots import Drawing, series_of

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TensorReport:
    """What a page is made of: `tensors.json` as data, its figures, and the command as typed."""

    data: Mapping[str, Any]
    drawings: Sequence[Drawing]
    command: str

    @property
    def rows(self) -> Sequence[Row]:
        """One a method."""
        rows: Sequence[Row] = self.data["rows"]
        return rows


def tensor_page(report: TensorReport) -> str:
    """The whole page as one HTML document that needs no other file and no network."""
    rows = report.rows
    body = [html.paragraphs(report.data["notes"], "note"), tensor_table(rows)]
    for drawing in report.drawings:
        body += [html.heading(drawing.title), html.figure(drawing.svg())]
    body += shift_section(rows, report.data["cells"])
    body += [
        html.heading("How this was made"),
        html.command_line(report.command),
        html.facts(_facts(report.data)),
    ]
    return html.page(
        title=f"steadykv: {text.listed([text.method_title(row['method']) for row in rows])}",
        headline=headline(rows),
        lead=lead(rows),
        body=body,
        footer="All bits are counted from the tensors that were really stored.",
    )


def shift_section(rows: Sequence[Row], cells: Sequence[Row], suffix: str = "") -> list[str]:
    """Figures of token shift by place, each with its numbers; `suffix` keeps their ids apart."""
    figures = shift_drawings(rows, cells)
    if not figures:
        return []
    body = [html.heading("Where the selected key changes"), html.paragraphs([ABOUT])]
    for figure in figures:
        named = replace(figure, name=f"{figure.name}{suffix}")
        body += [
            html.subheading(figure.title),
            html.figure(named.svg()),
            shift_table(figure.name, rows, cells),
        ]
    return body


def headline(rows: Sequence[Row]) -> str:
    """The page's heading."""
    methods = "One method" if len(rows) == 1 else f"{text.number_word(len(rows))} methods"
    cells = rows[0]["n_cells"]
    where = "one captured span" if cells == 1 else f"{cells} captured spans"
    return f"{methods[0].upper()}{methods[1:]} on {where}"


def lead(rows: Sequence[Row]) -> list[str]:
    """What the numbers say, in words; nothing assumes which method comes out ahead."""
    name, what = ("output_error", "attention output of later queries")
    if all(row[name] is None for row in rows):
        name, what = ("key_error", "keys")
    found = [row for row in rows if row[name] is not None]
    if not found:
        return []
    best, worst = (pick(found, key=lambda row: row[name]) for pick in (min, max))
    smallest = min(rows, key=lambda row: row["bits_per_element"])

    def said(row: Row) -> str:
        return f"{100 * row[name]:.1f} % with {text.method_title(row['method'])}"

    error = f"Relative error of the {what}: {said(best)}"
    if best is not worst:
        error += f", {said(worst)}, and the others in between" if len(found) > 2 else (
            f" and {said(worst)}")  # fmt: skip
    size = (
        f"Smallest is {text.method_title(smallest['method'])} with "
        f"{smallest['bits_per_element']:.2f} bits a number against 16."
    )
    warning = (
        "These are errors of tensors on a given walk. How a video fares when its own errors come "
        "back to it is another question: steadykv compare answers that one."
    )
    return [f"{error}.", size, warning]


def tensor_table(rows: Sequence[Row]) -> str:
    """The numbers of every method."""
    columns = tensor_measures(rows)
    series = series_of(rows)
    lines = [
        html.Row(
            text.method_title(row["method"]),
            [_cell(column, row, rows) for column in columns],
            series[row["method"]],
        )
        for row in rows
    ]
    head = [html.Column(column.title, column.unit, column.meaning) for column in columns]
    return html.table(head, lines, first="method")


def _cell(measure: Measure, row: Row, rows: Sequence[Row]) -> html.Cell:
    value = measure.value(row)
    detail, bar = "", None
    if measure.path == ("bits_per_element",):
        detail = f"K {row['keys_bits']:.2f} V {row['values_bits']:.2f}"
        bar = row["bits_per_element"] / max(other["bits_per_element"] for other in rows)
    return html.Cell(
        show(measure, row),
        detail=detail,
        is_best=value is not None and is_best(measure, row, rows),
        bar=bar,
    )


def _facts(data: Mapping[str, Any]) -> dict[str, str]:
    """File, geometry, settings and versions, as names and values."""
    file, rows, environment = data["file"], data["rows"], data["environment"]
    shapes = [" × ".join(map(str, shape)) for shape in file["shapes"]]
    centroids = {
        row["configuration"]["cache"][side]["centroids"]
        for row in rows
        for side in ("keys", "values")
        if "centroids" in row["bits_by_part"][side]
    }
    entries = {
        "file": file["name"],
        "tensors": f"{text.listed(shapes)} (batch × heads × tokens × head dim)",
        "layers": ", ".join(map(str, file["layers"])),
        "spans": ", ".join(map(str, file["spans"])),
        "centroids": ", ".join(map(str, sorted(centroids))) or "none",
        "warm starts": f"{max(row['n_cells_warm'] for row in rows)} of {rows[0]['n_cells']} spans, "
        "where a method clusters",
        "queries compared": f"{max(row['selections'] for row in rows):,}",
    }
    header = file["header"]
    if header is not None:
        model = header["model"]
        place = "after" if header["key_rope"] == "post" else "before"
        entries |= {
            "captured from": f"{model.get('name', 'unknown')} {model.get('weights', '')}".strip(),
            "rows": text.listed([", ".join(f"{k} {v}" for k, v in r.items())
                                 for r in header["rows"]] or ["none"]),
            "keys are stored": f"{place} RoPE",
        }  # fmt: skip
    return entries | html.versions(environment)
