"""`steadykv vbench VIDEO...`: dimensions of the vbench package, where it is installed."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from steadykv.cli.common import (
    checked_device,
    claimed,
    command_text,
    new_folder,
    progress_bar,
)
from steadykv.cli.options import Device, Json, Out, Store

VBENCH_FILE = "vbench.json"


def vbench(
    context: typer.Context,
    videos: Annotated[list[Path], typer.Argument(help="MP4 or GIF files, or folders of them.")],
    dimensions: Annotated[
        str | None,
        typer.Option(help="Separated by commas (default: the four that the papers report)."),
    ] = None,
    device: Device = "cuda",
    out: Out = None,
    store: Store = None,
    json: Json = False,
) -> None:
    """Subject, background, aesthetic and imaging scores, by your own vbench package."""
    with progress_bar() as advance:
        folder = new_folder(out, "vbench")
        from steadykv.evaluation.provenance import environment
        from steadykv.evaluation.results import write_json
        from steadykv.evaluation.store import chosen_store, record_run
        from steadykv.evaluation.vbench import (
            DIMENSIONS,
            check_dimensions,
            check_videos,
            load_package,
            rows_of,
            run_vbench,
        )

        shared = chosen_store(store)
        names = DIMENSIONS if dimensions is None else dimensions.split(",")
        chosen = check_dimensions([name.strip() for name in names])
        check_videos(videos)
        load_package()
        place = checked_device(device)
        from steadykv.cli.interrupts import raise_on_interrupt

        raise_on_interrupt()
        with claimed(folder):
            found = run_vbench(videos, chosen, device=str(place), on_dimension=advance)
            command = command_text(context.obj)
            here = environment(place) | found["versions"]
            data = {"version": 1, "command": command, "environment": here, **found}
            write_json(folder / VBENCH_FILE, data)
            record_run(
                "vbench",
                rows_of(found),
                command=command,
                folder=folder,
                store=shared,
                configuration={"dimensions": chosen, "videos": [str(path) for path in videos]},
                environment=here,
            )
    if json:
        print(json_module.dumps({"folder": str(folder), **found}, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("video", *(name.replace("_", " ") for name in chosen))
    by_dimension = [found["dimensions"][name] for name in chosen]
    for video in by_dimension[0]["videos"]:
        table.add_row(video, *(f"{one['videos'][video]:.4f}" for one in by_dimension))
    table.add_row("all", *(f"{one['score']:.4f}" for one in by_dimension))
    console = Console()
    console.print(table)
    console.print(f"vbench {found['versions']['vbench']}", highlight=False)
    path = (folder / VBENCH_FILE).resolve()
    console.print(f"numbers: {path}", highlight=False, soft_wrap=True)
