"""`steadykv demo`: one walk, generated once with every cache, and the page that shows it."""

from __future__ import annotations

from typing import Annotated

import typer

from steadykv.cli.common import (
    checked_device,
    checked_methods,
    command_text,
    new_folder,
    progress_bar,
)
from steadykv.cli.options import (
    Centroids,
    Device,
    Frames,
    Json,
    Keys,
    Methods,
    Out,
    SpanChunks,
    Values,
    Walks,
    World,
)

METHODS = ("bf16", "kivi", "qvg", "quantwm")


def demo(
    context: typer.Context,
    methods: Methods = list(METHODS),  # noqa: B006 - typer reads the default and never changes it
    keys: Keys = None,
    values: Values = None,
    frames: Frames = 48,
    episode: Annotated[int, typer.Option(min=0, help="Number of the held-out walk.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise, the same for all.")] = 0,
    span_chunks: SpanChunks = 2,
    centroids: Centroids = 32,
    device: Device = "cpu",
    out: Out = None,
    world: World = None,
    walks: Walks = None,
    json: Json = False,
) -> None:
    """Generate the same walk with each cache and show the difference on one page."""
    # The bar comes first: importing torch may take seconds.
    with progress_bar() as advance:
        policy = {"span_chunks": span_chunks}
        names = checked_methods(methods, policy, centroids, keys=keys, values=values)
        folder = new_folder(out, "demo")
        place = checked_device(device)
        from steadykv.cli.session import Session, network_dtype

        session = Session(
            folder=folder,
            methods=names,
            episodes=[episode],
            seeds=[seed],
            frames=frames,
            device=place,
            dtype=network_dtype(place),
            policy=policy,
            options={"centroids": centroids},
            command=command_text(context.obj),
            as_json=json,
            world_file=world,
            walks_file=walks,
        )
        result = session.run(advance)
    session.show(result)
