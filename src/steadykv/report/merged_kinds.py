"""Pages of several measurements, captures or benchmarks; several groups below each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from steadykv.evaluation.merge_kinds import KindGroup
from steadykv.report import html, text
from steadykv.report.bench_page import bench_page, bench_section
from steadykv.report.measure_page import measured_page, measured_section
from steadykv.report.tensor_page import TensorReport, shift_section, tensor_page, tensor_table
from steadykv.report.tensor_plots import drawings
from steadykv.report.video import Frames

MARK = "run="  # of a method that several runs have, before the label of its run
FOOTER = "Each group has its own reference: numbers of one say nothing beside those of another."


def merged_kind_page(
    kind: str,
    groups: Sequence[KindGroup],
    command: str,
    films: Sequence[Frames] = (),
    start: int = 0,
) -> str:
    """One page of runs of one kind.

    films: of the only group's measurements, if they can be had; start: frame that they begin with.
    """
    if len(groups) == 1:
        return _single(kind, groups[0], command, films, start)
    body: list[str] = []
    for number, group in enumerate(groups, start=1):
        body += [
            html.heading(f"Group {number}: {describe(kind, group)}"),
            html.paragraphs(group.notes, "note"),
            *_section(kind, group, number),
        ]
    count = text.number_word(len(groups))
    return html.page(
        title=f"steadykv: {count} groups of runs",
        headline=f"{count.capitalize()} groups of runs",
        lead=[FOOTER],
        body=[*body, html.heading("How this was made"), html.command_line(command)],
        footer="Numbers are those that the runs wrote; nothing was measured again.",
    )


def describe(kind: str, group: KindGroup) -> str:
    """What the runs of a group share, in a few words."""
    data: Any = group.runs[0].data
    if kind == "measure":
        path = str(data["sources"][0]["path"])
        return f"{path}, {data['frames']} frames from {data['start']} on"
    if kind == "tensors":
        return str(data["file"]["name"])
    return f"{group.same['gpu']}, {group.same['shape']}"


def _single(kind: str, group: KindGroup, command: str, films: Sequence[Frames], start: int) -> str:
    if kind == "measure":
        runs = [run.data for run in group.runs]
        return measured_page(runs, films, command, notes=group.notes, start=start)
    if kind == "tensors":
        data = _joined(group)
        return tensor_page(TensorReport(data, drawings(data["rows"], data["cells"]), command))
    return bench_page(group.rows, command, group.notes)


def _section(kind: str, group: KindGroup, number: int) -> list[str]:
    if kind == "measure":
        return measured_section([run.data for run in group.runs], number)
    if kind == "tensors":
        data = _joined(group)
        figures = [replace(figure, name=f"{figure.name}-{number}")
                   for figure in drawings(data["rows"], data["cells"])]  # fmt: skip
        return [
            tensor_table(data["rows"]),
            *(html.figure(figure.svg()) for figure in figures),
            *shift_section(data["rows"], data["cells"], f"-{number}"),
        ]
    return bench_section(group.rows, number)


def _joined(group: KindGroup) -> Mapping[str, Any]:
    """`tensors.json` of all runs as one: rows and cells under the names of the group."""
    cells = []
    for run in group.runs:
        own = {row["method"].partition(f"{MARK}{run.label}")[0].rstrip("@+"): row["method"]
               for row in group.rows if row["run"] == run.label}  # fmt: skip
        cells += [{**cell, "method": own[cell["method"]]} for cell in run.data["cells"]
                  if cell["method"] in own]  # fmt: skip
    notes = [note for run in group.runs for note in run.data["notes"]]
    notes = list(dict.fromkeys([*notes, *group.notes]))
    return {**group.runs[0].data, "rows": group.rows, "cells": cells, "notes": notes}
