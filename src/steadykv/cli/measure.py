"""`steadykv measure A B`: what a viewer sees differ between two video files."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steadykv.cli.common import (
    checked_device,
    claimed,
    command_text,
    new_folder,
    progress_bar,
)
from steadykv.cli.new_files import check_distinct, new_file, write_table
from steadykv.cli.options import Device, Json, Out, Store
from steadykv.errors import ConfigError

if TYPE_CHECKING:
    from steadykv.evaluation.video_excerpt import Excerpt

MEASURE_FILE, REPORT_FILE = "measure.json", "report.html"


def measure(
    context: typer.Context,
    a: Annotated[Path, typer.Argument(metavar="A", help="The reference: a video file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The video that is judged.")],
    start: Annotated[int, typer.Option(help="First frame of A that is compared.")] = 0,
    end: Annotated[
        int | None, typer.Option(help="First frame of A that no longer is (default: to the end).")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Also one row for every window of that many frames.")
    ] = None,
    shortest: Annotated[
        bool, typer.Option("--shortest", help="End with the shorter video.")
    ] = False,
    by_time: Annotated[
        bool, typer.Option("--by-time", help="Pair every frame of A with what B shows then.")
    ] = False,
    by_index: Annotated[
        bool, typer.Option("--by-index", help="Pair frame by frame, whatever their times.")
    ] = False,
    resize: Annotated[bool, typer.Option("--resize", help="Scale B to the size of A.")] = False,
    lpips: Annotated[
        bool, typer.Option("--lpips/--no-lpips", help="LPIPS, which is slow.")
    ] = False,
    ms_ssim: Annotated[
        bool, typer.Option("--ms-ssim/--no-ms-ssim", help="MS-SSIM, from 161 x 161 pixels on.")
    ] = True,
    flicker_index: Annotated[
        bool,
        typer.Option("--flicker-index/--no-flicker-index", help="Flicker of each video by itself."),
    ] = True,
    page_start: Annotated[
        int | None,
        typer.Option(help="First frame that the page plays (default: where it flickers most)."),
    ] = None,
    page_frames: Annotated[
        int | None, typer.Option(help="Frames that the page plays (default: by their size).")
    ] = None,
    page_width: Annotated[
        int | None, typer.Option(help="Scale the page's videos down to it (default: own size).")
    ] = None,
    device: Device = "cpu",
    out: Out = None,
    rows: Annotated[
        Path | None, typer.Option(help="Also write one CSV row a frame to this new file.")
    ] = None,
    store: Store = None,
    json: Json = False,
) -> None:
    """Compare two videos frame by frame: PSNR, SSIM, MS-SSIM, LPIPS and flicker."""
    # The bar comes first: importing torch may take seconds.
    with progress_bar() as advance:
        if by_time and by_index:
            raise ConfigError("--by-time: got --by-index as well, expected one of them; choose one")
        folder = new_folder(out, "measure")
        table = None if rows is None else new_file(rows, "--rows")
        place = checked_device(device)
        from steadykv.cli.interrupts import raise_on_interrupt
        from steadykv.evaluation.measure import MeasureOptions, measurement_data, stored
        from steadykv.evaluation.measure import measure as run
        from steadykv.evaluation.results import write_json
        from steadykv.evaluation.store import chosen_store, record_run
        from steadykv.evaluation.video_excerpt import Excerpt, ExcerptOptions
        from steadykv.evaluation.video_pair import PairOptions, VideoPair

        shared = chosen_store(store)
        check_distinct({"--out": folder, "--rows": table, "--store": shared})
        shown = ExcerptOptions(page_start, page_frames, page_width)
        match = "time" if by_time else "index" if by_index else "exact"
        pairing = PairOptions(start, end, match, shortest, resize)
        options = MeasureOptions(lpips, ms_ssim, flicker_index, window, str(place))
        raise_on_interrupt()
        with VideoPair(a, b, pairing) as pair, claimed(folder):
            excerpt = Excerpt(pair.size, shown, pairing)
            measured = run(pair, options, excerpt=excerpt, on_progress=advance)
            excerpt.settle(measured.series["flicker_error"], (str(a), str(b)), advance)
            data = measurement_data(
                measured, options, pair, command=command_text(context.obj), excerpt=excerpt
            )
            write_json(folder / MEASURE_FILE, data)
            advance(0, 1, "writing the page")
            _write_page(folder, data, excerpt)
            row, configuration = stored(data)
            record_run(
                "measure",
                [row],
                command=data["command"],
                folder=folder,
                store=shared,
                configuration=configuration,
                environment=data["environment"],
            )
            if table is not None:
                write_table(table, measured.rows(), "--rows")
    _show(folder, data, as_json=json)


def _write_page(folder: Path, data: dict[str, Any], excerpt: Excerpt) -> None:
    from steadykv.evaluation.results import write_bytes_atomically
    from steadykv.report.measure_page import PAGE_BYTES, measure_page

    limit = PAGE_BYTES if excerpt.options.frames is None else None  # who names a number gets it
    page = measure_page(data, *excerpt.videos(), most_bytes=limit)
    write_bytes_atomically(folder / REPORT_FILE, page.encode())


def _show(folder: Path, data: dict[str, Any], as_json: bool) -> None:
    report = folder / REPORT_FILE
    if as_json:
        found = {"report": str(report)} if report.exists() else {}
        print(json_module.dumps({"folder": str(folder), **found, **data}, allow_nan=False))
        return
    from rich.console import Console

    from steadykv.report.measure_table import summary_table, window_table

    console = Console()
    console.print(summary_table(data), highlight=False)
    if data["windows"]:
        console.print()
        console.print(window_table(data), highlight=False)
    for note in data["notes"]:
        console.print(note, style="yellow", highlight=False)
    console.print()
    last = report if report.exists() else folder / MEASURE_FILE
    label = "report" if report.exists() else "numbers"
    console.print(f"{label}: {last.resolve()}", highlight=False, soft_wrap=True)
