"""`steadykv capture`: keys, values and later queries of a walk, as one file for `tensors`."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steadykv.cli.common import checked_device, claimed, new_folder, progress_bar
from steadykv.cli.new_files import new_file
from steadykv.cli.options import (
    Device,
    FirstWalk,
    Frames,
    Json,
    KeyRope,
    KeyRopeOption,
    SpanChunks,
    WalkCount,
    Walks,
    World,
)
from steadykv.cli.values import byte_size, number_list, walk_numbers

if TYPE_CHECKING:
    from steadykv.evaluation.world_capture import CapturePlan

CAPTURE_FILE = "capture.safetensors"


def capture(
    layers: Annotated[str, typer.Option(help="Layers to keep, such as 0,2,5-7.")] = "all",
    heads: Annotated[str, typer.Option(help="Key/value heads to keep.")] = "all",
    spans: Annotated[str, typer.Option(help="Spans to keep, numbered from 0.")] = "all",
    queries: Annotated[
        int, typer.Option(min=0, help="Later queries a span and layer, sampled from all passes.")
    ] = 256,
    episodes: WalkCount = 1,
    first_walk: FirstWalk = 0,
    frames: Frames = 24,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise and of the sample.")] = 0,
    span_chunks: SpanChunks = 2,
    key_rope: KeyRopeOption = KeyRope.post,
    max_bytes: Annotated[
        str, typer.Option(help="Largest file that is allowed, such as 800MB or 2GiB.")
    ] = "1GiB",
    device: Device = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="New file (default: capture.safetensors in a dated folder).")
    ] = None,
    world: World = None,
    walks: Walks = None,
    json: Json = False,
) -> None:
    """Save keys, values and later queries of a walk, by layer and span."""
    # The bar comes first: importing torch may take seconds.
    with progress_bar() as advance:
        limit = byte_size(max_bytes, "--max-bytes")
        names = ("layers", "heads", "spans")
        chosen = {
            name: number_list(text, f"--{name}")
            for name, text in zip(names, (layers, heads, spans), strict=True)
        }
        folder = new_folder(None, "capture") if out is None else None
        path = new_file(out, "--out") if out is not None else None
        place = checked_device(device)
        from steadykv.capture import Selection
        from steadykv.cli.interrupts import raise_on_interrupt
        from steadykv.cli.session import check_frames, network_dtype
        from steadykv.evaluation.world_capture import capture_world
        from steadykv.world import load_episodes, load_world
        from steadykv.world.shipped import walks_of

        selection = Selection(**chosen, queries=queries, seed=seed)
        rows = load_episodes(walk_numbers(first_walk, episodes), walks_of(world, walks))
        model = load_world(world, device=place, dtype=network_dtype(place))
        check_frames(frames, model.config.chunk_frames, rows.actions.shape[1])
        raise_on_interrupt()
        with claimed(folder):
            target = path or Path(str(folder)) / CAPTURE_FILE
            header = capture_world(
                model,
                rows,
                target,
                selection,
                frames=frames,
                seed=seed,
                span_chunks=span_chunks,
                key_rope=key_rope.value,
                weights="shipped" if world is None else Path(world).name,
                max_nbytes=limit,
                on_plan=_say_plan,
                on_chunk=lambda done, total: advance(done, total, "walking"),
            )
    _show(target, header, as_json=json)


def _say_plan(plan: CapturePlan) -> None:
    """The prediction, on stderr before anything runs."""
    from steadykv.report.text import mebibytes

    lengths = " or ".join(f"{count:,}" for count in sorted({span.tokens for span in plan.spans}))
    queries = min(plan.queries, max((span.candidates for span in plan.spans), default=0))
    print(
        f"predicted: at most {mebibytes(plan.nbytes)} ({_many(len(plan.layers), 'layer')}, "
        f"{_many(len(plan.heads), 'head')}, {_many(len(plan.spans), 'span')} of {lengths} tokens, "
        f"up to {queries:,} later queries each)",
        file=sys.stderr,
    )


def _show(path: Path, header: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json_module.dumps({"file": str(path), **header}, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    from steadykv.report.text import mebibytes

    table = Table("span", "tokens", "statistics", "later queries", box=None, pad_edge=False)
    known = {"history": "of all passes before", "own": "its own commit passes", "none": "none"}
    for span in header["spans"]:
        tokens = f"{span['start']:,}–{span['end'] - 1:,}"
        queries = str(span["queries"])
        table.add_row(str(span["index"]), tokens, known[span["statistics"]], queries)
    console = Console()
    console.print(table, highlight=False)
    console.print(f"{mebibytes(header['nbytes'])}; next: steadykv tensors {path}",
                  highlight=False, soft_wrap=True)  # fmt: skip
    console.print(f"capture: {path.resolve()}", highlight=False, soft_wrap=True)


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
