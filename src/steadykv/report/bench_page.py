"""The page of `steadykv bench`: each work's time, the machine's limit, and what else does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from steadykv import __version__
from steadykv.report import html
from steadykv.report.bench import RATES, drawing
from steadykv.report.text import method_title

Row = Mapping[str, Any]

COLUMNS = (
    html.Column("time", "ms", "Median of the runs (small: from the 20th to the 80th percentile)."),
    html.Column("limit", "ms", "What the machine needs at least: the bytes at the rate of its "
                "copy, or the operations at the rate of its BF16 product, whichever takes longer."),
    html.Column("of it", "%", "Limit divided by time: 100 % is as fast as the machine can."),
    html.Column("instead", "ms", "What else does the same work, and its time."),
    html.Column("speed", "times", "The time of what else there is, divided by ours."),
    html.Column("rate", "GB/s", "Bytes read and written a second."),
    html.Column("error", "relative", "Against the same work in FP32 (small: the bound that it was "
                "held to before it was timed)."),
    html.Column("peak", "MiB", "Most memory during the work."),
)  # fmt: skip


def bench_page(rows: Sequence[Row], command: str, notes: Sequence[str] = ()) -> str:
    """The whole page as one HTML document that needs no other file and no network.

    rows: as `steadykv bench --json` gives them. command: as the user typed it. notes: about them.
    """
    figure, table = bench_section(rows)
    body = [
        html.paragraphs(notes, "note"),
        figure,
        html.heading("In numbers"),
        table,
        html.heading("How this was made"),
        html.command_line(command),
        html.facts(_facts(rows)),
    ]
    return html.page(
        title="steadykv: times of its kernels",
        headline=f"Times on {rows[0]['gpu']}",
        lead=lead(rows),
        body=body,
        footer="Each work passed its check of correctness before it was timed.",
    )


def bench_section(rows: Sequence[Row], number: int = 0) -> list[str]:
    """Figure and table; number: keeps the ids of several groups on one page apart."""
    timed = [row for row in rows if row["method"] != RATES]
    works = list(dict.fromkeys(row["work"] for row in rows))
    lines = [
        html.Row(f"{row['work']} {_title(row)}", _cells(row), 1 + works.index(row["work"]))
        for row in rows
    ]
    picture = drawing(rows)
    if number:
        picture = replace(picture, name=f"{picture.name}-{number}")
    return [
        html.figure(picture.svg()) if timed else "",
        html.table(COLUMNS, lines, first="work"),
    ]


def lead(rows: Sequence[Row]) -> list[str]:
    """The machine's two rates, and the works nearest to and farthest from its limits."""
    rates = {row["work"]: row for row in rows if row["method"] == RATES}
    said = (
        f"This machine copies {rates['copy']['gb_per_s']:,.0f} GB/s and multiplies BF16 matrices "
        f"at {rates['matmul']['tflop_per_s']:,.3g} TFLOP/s: no work can be faster than these allow."
    )
    timed = [row for row in rows if row["method"] != RATES]
    if not timed:
        return [said]
    best, worst = (pick(timed, key=lambda row: row["share_of_limit"]) for pick in (max, min))

    def share(row: Row) -> str:
        return f"{row['work']} with {_title(row)} ({100 * row['share_of_limit']:.0f} %)"

    if best is worst:
        return [said, f"Here: {share(best)} of the limit."]
    return [said, f"Nearest to the limit is {share(best)}, farthest from it {share(worst)}."]


def _cells(row: Row) -> list[html.Cell]:
    def number(name: str, pattern: str = "{:,.3f}", scale: float = 1.0) -> str:
        return "–" if row[name] is None else pattern.format(scale * row[name])

    spread = f"{number('p20_ms')}–{number('p80_ms')}"
    is_rate = row["method"] == RATES
    return [
        html.Cell(number("median_ms"), spread),
        html.Cell("–" if is_rate else number("limit_ms")),
        html.Cell("–" if is_rate else number("share_of_limit", "{:.0f}", 100.0)),
        html.Cell(number("baseline_ms"), row["baseline"] or ""),
        html.Cell(number("speedup", "{:.2f}×")),
        html.Cell(number("gb_per_s", "{:,.0f}")),
        html.Cell(number("error", "{:.1e}"), number("error_bound", "{:.0e}").strip("–")),
        html.Cell(number("peak_bytes", "{:,.1f}", 2**-20)),
    ]


def _title(row: Row) -> str:
    """Method and memory setting: "qvg small" becomes "QVG small"."""
    if row["method"] == RATES:
        return "(the machine)"
    name, _, rest = row["method"].partition(" ")
    return f"{method_title(name)} {rest}".rstrip()


def _facts(rows: Sequence[Row]) -> dict[str, str]:
    first = rows[0]
    return {
        "device": str(first["gpu"]),
        "shape": f"{first['shape']} (heads × tokens × head dim, q: queries)",
        "backends": ", ".join(dict.fromkeys(row["backend"] for row in rows if row["backend"])),
        "versions": f"steadykv {__version__}, torch {first['torch']}, "
        f"triton {first['triton'] or 'not installed'}",
        "commit": str(first["commit"] or "unknown (not run from a checkout)"),
    }
