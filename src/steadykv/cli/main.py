"""The `steadykv` command: parses, runs one command, and turns every known failure into one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import steadykv
from steadykv.cli.common import expand_lists, report_failure
from steadykv.cli.compare import compare
from steadykv.cli.demo import demo
from steadykv.cli.env import env

app = typer.Typer(
    name="steadykv",
    help="The key/value cache of a video world model in about 2 bits a number, and what it costs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(compare)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(
            expand_lists(typed) or ["--help"],
            standalone_mode=False,
            prog_name="steadykv",
            obj=typed,
        )
    except BaseException as error:
        known = report_failure(error, typed)
        if known is None:
            raise
        return known
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main())
