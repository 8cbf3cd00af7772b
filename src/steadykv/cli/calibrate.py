"""`steadykv calibrate FILE`: the fixed levels of kvquant, fitted to captured keys and values."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadykv.cli.common import checked_device, claimed, new_folder, progress_bar
from steadykv.cli.new_files import new_file
from steadykv.cli.options import Device, Json

if TYPE_CHECKING:
    from steadykv.capture import CaptureHeader
    from steadykv.codecs import Calibration

CALIBRATION_FILE = "calibration.safetensors"


def calibrate(
    file: Annotated[Path, typer.Argument(help="What capture wrote, or safetensors with k and v.")],
    method: Annotated[
        str, typer.Option(help="Method to fit; NAME@FIELD=VALUE changes a codec.")
    ] = "kvquant_calibrated",
    device: Device = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(help=f"New file (default: {CALIBRATION_FILE} in a dated folder)."),
    ] = None,
    json: Json = False,
) -> None:
    """Fit the fixed levels of kvquant_calibrated to captured keys and values."""
    # The bar comes first: importing torch may take seconds.
    with progress_bar() as advance:
        folder = new_folder(None, "calibrate") if out is None else None
        path = new_file(out, "--out") if out is not None else None
        place = checked_device(device)
        from steadykv.capture import calibrate as fit
        from steadykv.capture import open_capture
        from steadykv.cli.interrupts import raise_on_interrupt
        from steadykv.config import parse_method

        config = parse_method(method)
        opened = open_capture(file)
        raise_on_interrupt()
        with claimed(folder):
            found = fit(
                opened,
                config,
                device=place,
                on_layer=lambda done, total, layer: advance(done, total, f"layer {layer}"),
            )
            target = path or Path(str(folder)) / CALIBRATION_FILE
            found.save(target)
    _show(target, method, found, opened.header, as_json=json)


def _show(
    path: Path, method: str, found: Calibration, header: CaptureHeader | None, as_json: bool
) -> None:
    if as_json:
        grids = [
            {
                "layer": layer,
                "tensor": tensor,
                "heads": grid.heads,
                "head_dim": grid.head_dim,
                "tokens": grid.tokens,
                "levels": grid.tensors["stored_levels"].tolist(),
            }
            for (layer, tensor), grid in found.grids.items()
        ]
        outcome = {
            "file": str(path),
            "nbytes": path.stat().st_size,
            "method": method,
            "key_rope": found.key_rope,
            "source": dict(found.source),
            "grids": grids,
        }
        print(json_module.dumps(outcome, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("layer", "tensor", "tokens", "levels", box=None, pad_edge=False)
    for (layer, tensor), grid in found.grids.items():
        levels = "  ".join(f"{level:+.3f}" for level in grid.tensors["stored_levels"].tolist())
        table.add_row(str(layer), tensor, f"{grid.tokens:,}", levels)
    console = Console()
    console.print(table, highlight=False)
    if header is not None:
        for what, kept, count in (
            ("layers", header.layers, header.num_layers),
            ("heads", header.heads, header.num_heads),
        ):
            if len(kept) < count:
                console.print(f"The capture has {len(kept)} of {count} {what}: for tensors of the "
                              "same ones; compare needs all of them.", style="yellow",
                              highlight=False)  # fmt: skip
    console.print(f"next: steadykv tensors OTHER --methods kvquant {method} --calibration {path}",
                  highlight=False, soft_wrap=True)  # fmt: skip
    console.print(f"calibration: {path.resolve()}", highlight=False, soft_wrap=True)
