"""`steadykv demo`: one walk, generated once with every cache, and the page that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steadykv.cli.common import (
    METHODS_HELP,
    WALKS_HELP,
    WORLD_HELP,
    checked_device,
    checked_methods,
    command_text,
    new_folder,
    progress_bar,
)

METHODS = ("bf16", "kivi", "qvg", "quantwm")


def demo(
    context: typer.Context,
    methods: Annotated[list[str], typer.Option(help=METHODS_HELP)] = list(METHODS),  # noqa: B006 - typer reads the default and never changes it
    frames: Annotated[int, typer.Option(min=1, help="Frames to generate, a multiple of 3.")] = 48,
    episode: Annotated[int, typer.Option(min=0, help="Number of the held-out walk.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise, the same for all.")] = 0,
    span_chunks: Annotated[int, typer.Option(min=1, help="Chunks packed together.")] = 2,
    centroids: Annotated[int, typer.Option(min=1, help="Cluster means per head and span.")] = 32,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="New folder for the results (default: a dated one).")
    ] = None,
    world: Annotated[Path | None, typer.Option(help=WORLD_HELP)] = None,
    walks: Annotated[Path | None, typer.Option(help=WALKS_HELP)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON only.")] = False,
) -> None:
    """Generate the same walk with each cache and show the difference on one page."""
    # The bar comes first: importing torch may take seconds.
    with progress_bar() as advance:
        policy = {"span_chunks": span_chunks}
        names = checked_methods(methods, policy, centroids)
        folder = new_folder(out, "demo")
        place = checked_device(device)
        import torch

        from steadykv.cli.session import Session

        session = Session(
            folder=folder,
            methods=names,
            episodes=[episode],
            seeds=[seed],
            frames=frames,
            device=place,
            dtype=torch.bfloat16 if place.type == "cuda" else torch.float32,
            policy=policy,
            options={"centroids": centroids},
            command=command_text(context.obj),
            as_json=json,
            world_file=world,
            walks_file=walks,
        )
        result = session.run(advance)
    session.show(result)
