"""The parser: commands, and the options that stand before them."""

from __future__ import annotations

from typing import Annotated

import typer

import steadykv
from steadykv.cli.ablate import ablate
from steadykv.cli.bench import bench
from steadykv.cli.calibrate import calibrate
from steadykv.cli.capture import capture
from steadykv.cli.compare import compare
from steadykv.cli.demo import demo
from steadykv.cli.env import env
from steadykv.cli.measure import measure
from steadykv.cli.plan import plan
from steadykv.cli.report import report
from steadykv.cli.tensors import tensors
from steadykv.cli.vbench import vbench

app = typer.Typer(
    name="steadykv",
    help="The key/value cache of a video world model in 2 to 3 bits a number, and what it costs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(plan)
app.command()(compare)
app.command()(capture)
app.command()(calibrate)
app.command()(tensors)
app.command()(measure)
app.command()(report)
app.command()(ablate)
app.command()(bench)
app.command()(vbench)
app.command()(env)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"steadykv {steadykv.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that stand before a command."""
