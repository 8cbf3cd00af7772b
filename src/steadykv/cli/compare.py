"""`steadykv compare`: many walks and noise seeds for every cache, with confidence intervals."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from steadykv.cli.common import (
    checked_device,
    checked_methods,
    expand_lists,
    new_folder,
    progress_bar,
)
from steadykv.cli.new_files import check_distinct, resumed_file, write_table
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
    Store,
    Values,
    WalkCount,
    Walks,
    World,
)
from steadykv.cli.resuming import again, first_command, stands_alone
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


class Floor(StrEnum):
    """What BF16 is rolled out with once more."""

    attention = "attention"
    fp32 = "fp32"
    both = "both"


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
    floor: Annotated[
        Floor, typer.Option(help="Noise floor: attention computed otherwise, all in FP32, or both.")
    ] = Floor.attention,
    no_floor: Annotated[
        bool, typer.Option("--no-floor", help="Measure no noise floor; nothing is then ranked.")
    ] = False,
    device: Device = "cpu",
    dtype: Annotated[
        Precision, typer.Option(help="What the network computes in (auto: by device).")
    ] = Precision.auto,
    batch: Batch = None,
    out: Out = None,
    rows: Rows = None,
    world: World = None,
    walks: Walks = None,
    store: Store = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the interrupted run in this folder, with its own options."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare caches over many walks and seeds, with confidence intervals."""
    typed = context.obj
    if resume is not None:
        begun = first_command(resume, typed, out)
        if stands_alone(typed):
            parser = context.find_root().command
            words = expand_lists(again(begun, resume, json))
            parser.main(words, prog_name="steadykv", standalone_mode=False, obj=begun)
            return
        typed = begun
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
        folder = resume or new_folder(out, "compare")
        table = None if rows is None else resumed_file(rows, "--rows", resume)
        place = checked_device(device)
        from steadykv.cli.session import Session, network_dtype
        from steadykv.codecs import Calibration
        from steadykv.evaluation.store import chosen_store

        shared = chosen_store(store)
        check_distinct({"--out": folder, "--rows": table, "--store": shared})
        options: dict[str, Any] = {
            "centroids": centroids,
            "floor": not no_floor and floor is not Floor.fp32,
            "floor_fp32": not no_floor and floor is not Floor.attention,
            "key_rope": key_rope.value,
            "max_batch": batch or BATCH[place.type],
            "paired_against": paired,
        }
        if not shift:
            options["shift"] = None
        session = Session(
            kind="compare",
            store=shared,
            resume=resume is not None,
            folder=folder,
            methods=names,
            episodes=walk_numbers(first_walk, episodes),
            seeds=range(seeds),
            frames=frames,
            device=place,
            dtype=network_dtype(place, dtype.value),
            policy=policy,
            options=options,
            arguments=typed,
            as_json=json,
            world=world,
            walks=walks,
            calibration=None if calibration is None else Calibration.load(calibration),
        )
        result = session.run(advance)
        if table is not None:
            write_table(table, result.rows, "--rows")
    session.show(result)
