"""`steadykv report RUN...`: several result folders as one page and one table."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadykv.cli.common import claimed, command_text, new_folder, progress_bar
from steadykv.cli.options import Json, Out
from steadykv.errors import ConfigError

if TYPE_CHECKING:
    from steadykv.evaluation.merge import Group
    from steadykv.report.pages import Report

REPORT_FILE, MERGED_FILE, TABLE_FILE = "report.html", "merged.json", "merged.csv"


def report(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument(help="Result folders of one kind of command.")],
    out: Out = None,
    paired: Annotated[
        str | None, typer.Option(help="Show every other method's difference from this one.")
    ] = None,
    json: Json = False,
) -> None:
    """Merge several result folders; runs with other references are shown apart."""
    with progress_bar() as advance:
        folder = new_folder(out, "report")
        from steadykv.cli.interrupts import raise_on_interrupt
        from steadykv.evaluation.merge import differing_fields, merge, read_runs
        from steadykv.evaluation.merge_kinds import COMPARISON, common_kind
        from steadykv.evaluation.result_checks import shown_as_one_line
        from steadykv.evaluation.results import write_bytes_atomically, write_csv, write_json
        from steadykv.report.merged import merged_page

        advance(0, 2, "reading the runs")
        kind = common_kind(runs)
        if kind != COMPARISON:
            _other_kind(kind, runs, folder, paired, command_text(context.obj), json)
            return
        groups = merge(read_runs(runs), paired)
        raise_on_interrupt()
        differing = differing_fields(groups)
        advance(1, 2, "writing the page")
        with shown_as_one_line(listed(runs)):  # before the folder: what fails leaves none
            reports = [_report(group, command_text(context.obj)) for group in groups]
            page = merged_page(reports, [group.notes for group in groups], differing)
        with claimed(folder):
            merged = {
                "version": 1,
                "kind": kind,
                "differing": differing,
                "groups": _as_json(groups),
            }
            write_json(folder / MERGED_FILE, merged)
            write_csv(
                folder / TABLE_FILE,
                [{"group": n, **row} for n, g in enumerate(groups, start=1) for row in g.rows],
            )
            write_bytes_atomically(folder / REPORT_FILE, page.encode())
    if json:
        outcome = {"folder": str(folder), "report": str(folder / REPORT_FILE), **merged}
        print(json_module.dumps(outcome, allow_nan=False))
        return
    _show(folder, groups, differing)


def _other_kind(
    kind: str, runs: Sequence[Path], folder: Path, paired: str | None, command: str, as_json: bool
) -> None:
    """Runs of measure, tensors or bench: nothing is judged, so nothing is paired."""
    from steadykv.cli.interrupts import raise_on_interrupt
    from steadykv.cli.report_kinds import films_of, merged_data, show
    from steadykv.evaluation.merge_kinds import group_runs
    from steadykv.evaluation.result_checks import shown_as_one_line
    from steadykv.evaluation.results import write_bytes_atomically, write_csv, write_json
    from steadykv.report.merged_kinds import merged_kind_page

    if paired is not None:
        raise ConfigError(
            f"--paired: got {paired!r} for runs of {kind}, expected runs of compare or demo; leave "
            "it away"
        )
    groups = group_runs(kind, runs)
    raise_on_interrupt()
    with shown_as_one_line(listed(runs)):
        shown = films_of(groups[0]) if kind == "measure" and len(groups) == 1 else ([], 0)
        page = merged_kind_page(kind, groups, command, *shown)
    with claimed(folder):
        merged = merged_data(kind, groups)
        write_json(folder / MERGED_FILE, merged)
        rows = [
            {"group": n, **row} for n, group in enumerate(groups, start=1) for row in group.rows
        ]
        write_csv(folder / TABLE_FILE, rows)
        write_bytes_atomically(folder / REPORT_FILE, page.encode())
    if as_json:
        outcome = {"folder": str(folder), "report": str(folder / REPORT_FILE), **merged}
        print(json_module.dumps(outcome, allow_nan=False))
        return
    show(kind, groups, folder / REPORT_FILE)


def listed(runs: Sequence[Path]) -> str:
    """The folders in one line."""
    return ", ".join(map(str, runs))


def _as_json(groups: Sequence[Group]) -> list[dict[str, object]]:
    return [
        {
            "runs": {run.label: str(run.folder) for run in group.runs},
            "protocol": group.protocol,
            "notes": group.notes,
            "rows": group.rows,
        }
        for group in groups
    ]


def _report(group: Group, command: str) -> Report:
    """The page's input: rows, notes, and the videos that the runs kept."""
    from steadykv.cli.resuming import read_frames
    from steadykv.cli.session import FRAMES_PER_SECOND, frames_file, video_file
    from steadykv.evaluation.results import SHIFT_FILE, read_json
    from steadykv.report.pages import Report

    videos, mp4 = {}, {}
    for method, (run, name) in group.origin.items():
        frames, video = run.folder / frames_file(name), run.folder / video_file(name)
        if frames.is_file() and video.is_file():
            videos[method], mp4[method] = read_frames(frames), video.read_bytes()
    if "bf16" not in videos:  # nothing to compare the others with
        videos, mp4 = {}, {}
    shift = None
    for run in group.runs:
        path = run.folder / SHIFT_FILE
        if shift is None and path.is_file():
            shift = read_json(path)
    return Report(
        rows=group.rows,
        videos=videos,
        mp4=mp4,
        shift=shift,
        fps=FRAMES_PER_SECOND,
        command=command,
        shown=" ".join([_shown(group) if videos else "", *group.notes]).strip(),
    )


def _shown(group: Group) -> str:
    episode, seed = group.protocol["episodes"][0], group.protocol["seeds"][0]
    return f"The videos show episode {episode} with noise seed {seed}."


def _show(folder: Path, groups: Sequence[Group], differing: Sequence[str]) -> None:
    from rich.console import Console

    from steadykv.report.merged import describe
    from steadykv.report.terminal import difference_table, result_table
    from steadykv.report.text import hints

    console = Console()
    for number, group in enumerate(groups, start=1):
        if len(groups) > 1:
            shared = group.rows[0]["configuration"]
            console.print(f"Group {number}: {describe(shared, differing)}", highlight=False)
        console.print(result_table(group.rows, console.width))
        differences = difference_table(group.rows)
        if differences is not None:
            console.print(differences)
        for note in [*group.notes, *hints(group.rows, " of the report")]:
            console.print(note, style="yellow", highlight=False)
    console.print()
    path = (folder / REPORT_FILE).resolve()
    console.print(f"report: {path}", highlight=False, soft_wrap=True)
