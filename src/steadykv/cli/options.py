"""Options that several commands share, defined once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from steadykv.config import PRESETS

METHODS_HELP = f"Caches: {' '.join(PRESETS)}, or KEYS:VALUES; NAME@FIELD=VALUE changes a codec."


class KeyRope(StrEnum):
    """Whether keys are stored after or before their rotary embedding."""

    post = "post"
    pre = "pre"


KeyRopeOption = Annotated[KeyRope, typer.Option(help="Store keys after or before RoPE.")]
Methods = Annotated[list[str], typer.Option(help=METHODS_HELP)]
Keys = Annotated[
    str | None,
    typer.Option(help="With --values: one more cache, these keys with those values (KEYS:VALUES)."),
]
Values = Annotated[str | None, typer.Option(help="With --keys: how that cache packs its values.")]
WalkCount = Annotated[
    int, typer.Option(min=1, max=100_000, help="Held-out walks, from the first on.")
]
FirstWalk = Annotated[
    int, typer.Option(min=0, help="Number of the first walk; those before it stay out.")
]
SeedCount = Annotated[int, typer.Option(min=1, max=10_000, help="Noise seeds a walk.")]
Batch = Annotated[
    int | None, typer.Option(min=1, help="Rollouts that run together (default: by device).")
]
Rows = Annotated[
    Path | None, typer.Option(help="Also write one CSV row a method to this new file.")
]
Frames = Annotated[int, typer.Option(min=1, help="Frames to generate, a multiple of 3.")]
SpanChunks = Annotated[int, typer.Option(min=1, help="Chunks packed together.")]
Centroids = Annotated[int, typer.Option(min=1, help="Cluster means per head and span.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Out = Annotated[
    Path | None, typer.Option(help="New folder for the results (default: a dated one).")
]
World = Annotated[
    str | None,
    typer.Option(help="Name of a shipped world model, mazes (default) or rooms, or its weights."),
]
Walks = Annotated[
    Path | None,
    typer.Option(help="Archive of other beginnings of walks (default: the shipped world's)."),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option("--calibration", help="What calibrate wrote, for methods with fixed levels."),
]
Store = Annotated[
    Path | None,
    typer.Option(help="Also append the rows to this file of many runs (or to $STEADYKV_STORE)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON only.")]
