"""`steadykv demo`: one walk, generated once with every cache, and the page that shows it."""

from __future__ import annotations

from typing import Annotated

import typer

from steadykv.cli.common import (
    checked_device,
    checked_methods,
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
    Store,
    Values,
    Walks,
    World,
)

METHODS = ("bf16", "kivi", "qvg", "quantwm", "steady")

# Of the 96 rollouts in benchmarks/results/compare-h200-rollouts.json.gz the one whose PSNRs with
# KIVI, QVG and QuantWM are nearest to the means over all: the walk multi_deathmatch-005-00.
EPISODE, SEED = 3, 2
TYPICAL = (
    "One walk; of 96 it is the one whose numbers were nearest to the means. Which method comes "
    "closest varies from walk to walk: steadykv compare measures many."
)


def demo(
    context: typer.Context,
    methods: Methods = list(METHODS),  # noqa: B006 - typer reads the default and never changes it
    keys: Keys = None,
    values: Values = None,
    frames: Frames = 48,
    episode: Annotated[
        int | None, typer.Option(min=0, help=f"Number of the held-out walk (mazes: {EPISODE}).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help=f"Seed of the noise, the same for all ({SEED}).")
    ] = None,
    span_chunks: SpanChunks = 2,
    centroids: Centroids = 32,
    device: Device = "cpu",
    out: Out = None,
    world: World = None,
    walks: Walks = None,
    store: Store = None,
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
        from steadykv.evaluation.store import chosen_store
        from steadykv.world.shipped import DEFAULT_WORLD

        shared = chosen_store(store)

        shipped = world in (None, DEFAULT_WORLD) and walks is None
        number = EPISODE * shipped if episode is None else episode
        noise = SEED if seed is None else seed
        session = Session(
            kind="demo",
            store=shared,
            folder=folder,
            methods=names,
            episodes=[number],
            seeds=[noise],
            frames=frames,
            device=place,
            dtype=network_dtype(place),
            policy=policy,
            options={"centroids": centroids},
            arguments=context.obj,
            as_json=json,
            world=world,
            walks=walks,
            remark=TYPICAL if shipped and (number, noise) == (EPISODE, SEED) else "",
        )
        result = session.run(advance)
    session.show(result)
