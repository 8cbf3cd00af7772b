"""`steadykv env`: what a bug report needs: versions, devices, and which implementation runs."""

from __future__ import annotations

import json as json_module
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "rich", "typer", "matplotlib", "av", "pillow",
)  # fmt: skip


def env(
    json: Annotated[bool, typer.Option("--json", help="Print as JSON only.")] = False,
) -> None:
    """Show versions, devices, and the implementation that each op resolves to."""
    found = describe()
    if json:
        print(json_module.dumps(found, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column()
    for name in ("steadykv", "commit", "python", "system", "processor", "threads"):
        facts.add_row(name, str(found[name]))
    for name, number in found["packages"].items():
        facts.add_row(name, number or "not installed")
    for device in found["devices"]:
        facts.add_row(device["device"], device["name"])
    console.print(facts, highlight=False)
    for device in found["devices"]:
        table = Table("op", "backend", "why", title=f"ops on {device['device']}")
        for row in device["ops"]:
            table.add_row(row["op"], row["backend"], row["reason"])
        console.print(table, highlight=False)


def describe() -> dict[str, Any]:
    """Versions, devices and dispatch as JSON-able data."""
    import torch

    import steadykv
    from steadykv.evaluation.provenance import git_commit

    return {
        "steadykv": steadykv.__version__,
        "commit": git_commit() or "unknown (not run from a checkout)",
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": [_device("cpu", platform.machine())]
        + [
            _device(f"cuda:{index}", torch.cuda.get_device_name(index))
            for index in range(torch.cuda.device_count())
        ],
    }


def _device(name: str, description: str) -> dict[str, Any]:
    from steadykv.ops import explain

    return {"device": name, "name": description, "ops": explain(name)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
