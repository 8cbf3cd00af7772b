"""`steadykv bench`: times of the kernels beside the machine's own limits and what else there is."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from steadykv.cli.common import (
    checked_device,
    claimed,
    command_text,
    new_folder,
    progress_bar,
)
from steadykv.cli.new_files import check_distinct, new_file, write_new, write_table
from steadykv.cli.options import METHODS_HELP, Json, Out, Store

BENCH_FILE, REPORT_FILE = "bench.json", "report.html"
WORKS_HELP = "What to time: encode kmeans decode attend (default: all)."


def bench(
    context: typer.Context,
    works: Annotated[list[str] | None, typer.Option(help=WORKS_HELP)] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help=f"{METHODS_HELP} Default: qvg quantwm steady.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda, cuda:N, or cpu, which times tiny shapes.")
    ] = "cuda",
    heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of the packed span.")] = None,
    queries: Annotated[
        int | None, typer.Option(min=1, help="Queries, and tokens of the open chunk.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Channels of a head.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long each work is timed.")] = 0.3,
    out: Out = None,
    rows: Annotated[Path | None, typer.Option(help="Also write the rows to this new CSV.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw them into this new PNG.")] = None,
    store: Store = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write them as a page into this new HTML file.")
    ] = None,
    json: Json = False,
) -> None:
    """Time encode, decode and attend against this machine's limits, SDPA and quant-videogen."""
    with progress_bar() as advance:
        table = None if rows is None else new_file(rows, "--rows")
        picture = None if plot is None else new_file(plot, "--plot")
        page = None if report is None else new_file(report, "--report")
        folder = new_folder(out, "bench")
        place = checked_device(device)
        from dataclasses import asdict, replace

        from steadykv.cli.interrupts import raise_on_interrupt
        from steadykv.evaluation.bench import METHODS, WORKS, default_size
        from steadykv.evaluation.bench import bench as run
        from steadykv.evaluation.provenance import environment
        from steadykv.evaluation.store import chosen_store, record_run

        shared = chosen_store(store)
        check_distinct(
            {
                "--out": folder,
                "--rows": table,
                "--plot": picture,
                "--report": page,
                "--store": shared,
            }
        )
        given = {"heads": heads, "tokens": tokens, "queries": queries, "head_dim": head_dim}
        size = replace(
            default_size(place), **{name: n for name, n in given.items() if n is not None}
        )
        raise_on_interrupt()
        with claimed(folder):
            found = run(
                place,
                size,
                METHODS if methods is None else methods,
                WORKS if works is None else works,
                seconds=seconds,
                on_progress=advance,
            )
            data: dict[str, Any] = {
                "version": 1,
                "command": command_text(context.obj),
                "configuration": {"size": asdict(size), "seconds": seconds},
                "environment": environment(place),
                "rows": found,
            }
            _write(folder, data)
            record_run(
                "bench",
                found,
                command=data["command"],
                folder=folder,
                store=shared,
                configuration=data["configuration"],
                environment=data["environment"],
            )
            if page is not None:
                write_new(page, (folder / REPORT_FILE).read_bytes(), "--report")
            if table is not None:
                write_table(table, found, "--rows")
            if picture is not None:
                from steadykv.report.bench import drawing

                write_new(picture, drawing(found).png(), "--plot")
    _show(folder, found, as_json=json)


def _write(folder: Path, data: dict[str, Any]) -> None:
    from steadykv.evaluation.results import write_bytes_atomically, write_json
    from steadykv.report.bench_page import bench_page

    write_json(folder / BENCH_FILE, data)
    page = bench_page(data["rows"], data["command"])
    write_bytes_atomically(folder / REPORT_FILE, page.encode())


def _show(folder: Path, rows: list[dict[str, Any]], as_json: bool) -> None:
    report = folder / REPORT_FILE
    if as_json:
        outcome = {"folder": str(folder), "report": str(report), "rows": rows}
        print(json_module.dumps(outcome, allow_nan=False))
        return
    from rich.console import Console

    from steadykv.report.bench import bench_table, headline

    console = Console()
    console.print(headline(rows), highlight=False)
    console.print(bench_table(rows))
    console.print(f"report: {report.resolve()}", highlight=False, soft_wrap=True)
