"""The page of several runs: one group as the page of a comparison, several below each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steadykv.report import html, plots, text
from steadykv.report.memory import about_memory, memory_by_part
from steadykv.report.pages import Report, curves, report_page, size_plot
from steadykv.report.tables import memory_table, number_table, paired_table


def merged_page(
    reports: Sequence[Report], notes: Sequence[Sequence[str]], differing: Sequence[str]
) -> str:
    """``reports``: one a group of runs with the same reference; ``notes``: about each.

    differing: fields of the protocol in which the groups differ. One group is the usual page, its
    notes below the players.
    """
    if len(reports) == 1:
        return report_page(reports[0])
    body: list[str] = []
    for number, (report, told) in enumerate(zip(reports, notes, strict=True), start=1):
        body += _group(number, report, told, differing)
    body += [html.heading("How this was made"), html.command_line(reports[0].command)]
    count = text.number_word(len(reports))
    return html.page(
        title=f"steadykv: {count} groups of runs",
        headline=f"{count.capitalize()} groups of runs",
        lead=[
            f"These runs were not judged on the same references: they differ in "
            f"{text.listed(list(differing))}. Numbers of one group say nothing beside those of "
            "another."
        ],
        body=body,
        footer="All bits and bytes are counted from the tensors that were really stored.",
    )


def _group(
    number: int, report: Report, notes: Sequence[str], differing: Sequence[str]
) -> list[str]:
    rows = report.rows
    against = next((row["paired"]["against"] for row in rows if row["paired"]), None)
    body = [
        html.heading(f"Group {number}: {describe(report.configuration, differing)}"),
        html.paragraphs(text.lead(rows)),
        html.paragraphs(notes, "note"),
        number_table(rows, report.series),
    ]
    if against is not None:
        body += [
            html.paragraphs([text.about_pairs(against)]),
            paired_table(rows, report.series, against),
        ]
    start = report.configuration["context_frames"]
    body.append(html.figure(plots.psnr_by_frame(curves(report), start, f"psnr-{number}")))
    if text.packed_rows(rows):
        figure = size_plot(report, f"bits-{number}")
        body += [html.paragraphs([text.about_sizes(rows)], "note"), html.figure(figure)]
    return [
        *body,
        html.paragraphs([about_memory(rows)], "note"),
        html.figure(memory_by_part(rows, f"memory-{number}")),
        memory_table(rows, report.series),
    ]


def describe(shared: Mapping[str, Any], differing: Sequence[str]) -> str:
    """The values of the fields that differ, shortened, with the size of the run."""
    counts = {name: len(shared[f"{name}s"]) for name in ("episode", "seed")}
    parts = [f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items()]
    parts.append(f"{shared['frames']} frames")
    for name in differing:
        value = shared.get(name, shared["cache"]["policy"].get(name))
        if name in ("seeds", "episodes"):
            shown = f"{value[0]} to {value[-1]}"
        elif name.endswith("_sha256"):
            shown = str(value)[:8]
        else:
            shown = str(value)
        if name not in ("frames", "windows", "world"):
            parts.append(f"{name} {shown}")
    return ", ".join(parts)
