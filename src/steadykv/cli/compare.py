"""`steadykv compare`: many walks and noise seeds for every cache, with confidence intervals."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from steadykv.cli.common import (
    checked_device,
    checked_methods,
    command_text,
    new_file,
    new_folder,
    progress_bar,
)
from steadykv.cli.options import (
    Batch,
    CalibrationFile,
    Centroids,
    Device,
    FirstWalk,
    Frames,
    Json,
    KeyRope,
    KeyRopeOption,
    Keys,
    Methods,
    Out,
    Rows,
    SeedCount,
    SpanChunks,
    Values,
    WalkCount,
    Walks,
    World,
)
from steadykv.cli.values import walk_numbers

METHODS = ("bf16", "kivi", "qvg", "qvg4", "quantwm")
# Rollouts that share a batch. CPU: two cores are busy with few; CUDA: kernels of this small model
# are short, and only many rollouts fill the device.
BATCH = {"cpu": 4, "cuda": 32}


class Precision(StrEnum):
    """What the network computes in; the cache holds BF16 either way."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


def compare(
    context: typer.Context,
    methods: Methods = list(METHODS),  # noqa: B006 - typer reads the default and never changes it
    keys: Keys = None,
    values: Values = None,
    episodes: WalkCount = 8,
    first_walk: FirstWalk = 0,
    seeds: SeedCount = 1,
    frames: Frames = 48,
    span_chunks: SpanChunks = 2,
    centroids: Centroids = 32,
    sink_keep: Annotated[int, typer.Option(min=0, help="First frames kept in BF16.")] = 0,
    recent_keep: Annotated[int, typer.Option(min=0, help="Newest chunks kept in BF16.")] = 0,
    key_rope: KeyRopeOption = KeyRope.post,
    calibration: CalibrationFile = None,
    paired: Annotated[
        str | None, typer.Option(help="Report every other method's difference from this one.")
    ] = None,
    shift: Annotated[bool, typer.Option(help="Measure the token shift.")] = True,
    floor: Annotated[bool, typer.Option(help="Measure the noise floor.")] = True,
    device: Device = "cpu",
    dtype: Annotated[
        Precision, typer.Option(help="What the network computes in (auto: by device).")
    ] = Precision.auto,
    batch: Batch = None,
    out: Out = None,
    rows: Rows = None,
    world: World = None,
    walks: Walks = None,
    json: Json = False,
) -> None:
    """Compare caches over many walks and seeds, with confidence intervals."""
    # The bar comes first: importing torch may take seconds.
    with progress_bar() as advance:
        policy = {"span_chunks": span_chunks, "sink_keep": sink_keep, "recent_keep": recent_keep}
        names = checked_methods(
            methods,
            policy,
            centroids,
            paired,
            keys=keys,
            values=values,
            calibrated=calibration is not None,
        )
        folder = new_folder(out, "compare")
        table = None if rows is None else new_file(rows, "--rows")
        place = checked_device(device)
        from steadykv.cli.session import Session, network_dtype
        from steadykv.codecs import Calibration
        from steadykv.evaluation.results import write_csv

        options: dict[str, Any] = {
            "centroids": centroids,
            "floor": floor,
            "key_rope": key_rope.value,
            "max_batch": batch or BATCH[place.type],
            "paired_against": paired,
        }
        if not shift:
            options["shift"] = None
        session = Session(
            folder=folder,
            methods=names,
            episodes=walk_numbers(first_walk, episodes),
            seeds=range(seeds),
            frames=frames,
            device=place,
            dtype=network_dtype(place, dtype.value),
            policy=policy,
            options=options,
            command=command_text(context.obj),
            as_json=json,
            world_file=world,
            walks_file=walks,
            calibration=None if calibration is None else Calibration.load(calibration),
        )
        result = session.run(advance)
        if table is not None:
            write_csv(table, result.rows)
    session.show(result)
