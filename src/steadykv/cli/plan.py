"""`steadykv plan`: what a model's cache takes with each method, and whether a GPU has room."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

from steadykv.cli.options import METHODS_HELP, Json
from steadykv.cli.values import count


def plan(
    model: Annotated[
        str | None, typer.Option(help="A model, by any usual name (default: list models and GPUs).")
    ] = None,
    frames: Annotated[int, typer.Option(min=1, help="Frames of the video.")] = 93,
    resolution: Annotated[
        str | None, typer.Option(help="480p, 480x832, ... (default: the model's own).")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU, or its memory, such as 24GiB.")] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help=f"{METHODS_HELP} Default: all without calibration.")
    ] = None,
    span_chunks: Annotated[int | None, typer.Option(min=1, help="Chunks packed together.")] = None,
    centroids: Annotated[
        int | None, typer.Option(min=1, help="Cluster means per head and span.")
    ] = None,
    attention: Annotated[
        str,
        typer.Option(
            help="dense: one layer's window is decoded; packed: none is (where attach offers it)."
        ),
    ] = "dense",
    condition_frames: Annotated[
        int | None, typer.Option(min=1, help="Frames that a cache is made from, once a segment.")
    ] = None,
    window_latents: Annotated[
        int | None,
        typer.Option(
            min=0, help="Attended latent frames, sink included; 0: all (where the host can)."
        ),
    ] = None,
    sink_latents: Annotated[int | None, typer.Option(min=0, help="Latent frames of sink.")] = None,
    chunk_latents: Annotated[
        int | None, typer.Option(min=1, help="Latent frames of a chunk.")
    ] = None,
    frame_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a latent frame, for other resolutions.")
    ] = None,
    branches: Annotated[int | None, typer.Option(min=1, help="Guidance branches.")] = None,
    shards: Annotated[int, typer.Option(min=1, help="GPUs that split the heads.")] = 1,
    fps: Annotated[float | None, typer.Option(min=0, help="Frames a second.")] = None,
    weights_gib: Annotated[
        float | None, typer.Option(min=0, help="Weights on the GPU (default: estimated).")
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Parameters, such as 14B (default: the model's name).")
    ] = None,
    weight_dtype: Annotated[
        str, typer.Option(help="fp32, bf16, fp16, fp8, int8 or int4, for that estimate.")
    ] = "bf16",
    other_gib: Annotated[
        float, typer.Option(min=0, help="Activations, text encoder, VAE, ... on the GPU.")
    ] = 0.0,
    json: Json = False,
) -> None:
    """Will it fit? Bytes of a model's cache with each method, and the longest video on a GPU."""
    if model is None:
        _list(as_json=json)
        return
    from steadykv.planning import plan as run

    found = run(
        model,
        frames=frames,
        resolution=resolution,
        gpu=gpu,
        presets=methods,
        span_chunks=span_chunks,
        centroids=centroids,
        attention=attention,
        condition_frames=condition_frames,
        window_latents=window_latents,
        sink_latents=sink_latents,
        chunk_latents=chunk_latents,
        frame_tokens=frame_tokens,
        branches=branches,
        shards=shards,
        fps=fps,
        weights_gib=weights_gib,
        parameters=count(parameters, "--parameters"),
        weight_dtype=weight_dtype,
        other_gib=other_gib,
    )
    if json:
        _print_json(found.to_dict())
        return
    from rich.console import Console

    from steadykv.planning.text import heading, left_out
    from steadykv.report.plan import plan_table

    console = Console()
    for line in heading(found):
        console.print(line, highlight=False, markup=False)
    console.print(plan_table(found, console.width))
    for note in filter(None, (left_out(found, console.width), *found.notes)):
        console.print(note, style="dim", highlight=False, markup=False)


def _list(as_json: bool) -> None:
    from dataclasses import asdict

    from steadykv.planning.catalog import gpus, models

    if as_json:
        _print_json(
            {
                "models": [asdict(model) for model in models()],
                "gpus": [asdict(gpu) for gpu in gpus()],
            }
        )
        return
    from rich.console import Console

    from steadykv.report.plan import gpu_table, model_table

    console = Console()
    console.print(model_table(models()))
    console.print(gpu_table(gpus()))


def _print_json(data: dict[str, Any]) -> None:
    print(json_module.dumps(data, allow_nan=False))
