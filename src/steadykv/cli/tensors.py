"""`steadykv tensors FILE`: what every method does to captured keys and values."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadykv.cli.common import (
    checked_device,
    claimed,
    command_text,
    new_folder,
    progress_bar,
)
from steadykv.cli.new_files import check_distinct, new_file, write_table
from steadykv.cli.options import METHODS_HELP, CalibrationFile, Device, Json, Out, Store

if TYPE_CHECKING:
    from steadykv.evaluation.tensor_comparison import TensorResult

TENSORS_FILE, REPORT_FILE = "tensors.json", "report.html"


def tensors(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="What capture wrote, or safetensors with k and v.")],
    methods: Annotated[
        list[str] | None, typer.Option(help=f"{METHODS_HELP} Default: all that pack.")
    ] = None,
    centroids: Annotated[
        int | None,
        typer.Option(min=1, help="Cluster means per head and span (default: by span length)."),
    ] = None,
    calibration: CalibrationFile = None,
    device: Device = "cpu",
    out: Out = None,
    rows: Annotated[
        Path | None,
        typer.Option(help="Also write one CSV row a method, layer and span to this new file."),
    ] = None,
    parts: Annotated[
        Path | None,
        typer.Option(help="Also write the attention errors by head and by step to this new CSV."),
    ] = None,
    store: Store = None,
    json: Json = False,
) -> None:
    """Compare methods on captured keys, values and queries, or on your own."""
    # The bar comes first: importing torch may take seconds.
    with progress_bar() as advance:
        folder = new_folder(out, "tensors")
        table = None if rows is None else new_file(rows, "--rows")
        details = None if parts is None else new_file(parts, "--parts")
        place = checked_device(device)
        from steadykv.capture import open_capture
        from steadykv.cli.interrupts import raise_on_interrupt
        from steadykv.codecs import Calibration
        from steadykv.evaluation.attention_parts import PART_LISTS, part_rows
        from steadykv.evaluation.store import chosen_store, record_run
        from steadykv.evaluation.tensor_comparison import (
            compare_tensors,
            configurations,
            default_methods,
        )

        shared = chosen_store(store)
        places = {"--out": folder, "--rows": table, "--parts": details, "--store": shared}
        check_distinct(places)
        opened = open_capture(file)
        fixed = None if calibration is None else Calibration.load(calibration)
        chosen = methods or default_methods(fixed is not None)
        configurations(opened, chosen, centroids, fixed)
        raise_on_interrupt()
        with claimed(folder):
            result = compare_tensors(
                opened,
                chosen,
                centroids=centroids,
                calibration=fixed,
                device=place,
                on_progress=advance,
            )
            _write(folder, result, command_text(context.obj))
            record_run(
                "tensors",
                result.rows,
                command=command_text(context.obj),
                folder=folder,
                store=shared,
                configuration={"file": result.file, "centroids": centroids},
                environment=result.environment,
            )
            if table is not None:
                lists = set(PART_LISTS)
                cells = [{k: v for k, v in c.items() if k not in lists} for c in result.cells]
                write_table(table, cells, "--rows")
            if details is not None:
                write_table(details, part_rows(result.cells), "--parts")
    _show(folder, result, as_json=json)


def _write(folder: Path, result: TensorResult, command: str) -> None:
    """The results, the figures and the page, each whole or not at all."""
    from steadykv.evaluation.results import write_bytes_atomically, write_json
    from steadykv.report.shift_figures import shift_drawings
    from steadykv.report.tensor_page import TensorReport, tensor_page
    from steadykv.report.tensor_plots import drawings

    write_json(folder / TENSORS_FILE, result.to_dict())
    figures = drawings(result.rows, result.cells)
    for figure in [*figures, *shift_drawings(result.rows, result.cells)]:
        write_bytes_atomically(folder / f"{figure.name}.png", figure.png())
    page = tensor_page(TensorReport(result.to_dict(), figures, command))
    write_bytes_atomically(folder / REPORT_FILE, page.encode())


def _show(folder: Path, result: TensorResult, as_json: bool) -> None:
    report = folder / REPORT_FILE
    if as_json:
        outcome = {"folder": str(folder), "report": str(report), **result.to_dict()}
        print(json_module.dumps(outcome, allow_nan=False))
        return
    from rich.console import Console

    from steadykv.report.tensor_measures import tensor_table

    console = Console()
    console.print(tensor_table(result.rows, console.width))
    for note in result.notes:
        console.print(note, style="yellow", highlight=False)
    console.print()
    console.print(f"report: {report.resolve()}", highlight=False, soft_wrap=True)
