"""Safetensors files with a header of ours: written whole or not at all, never unpickled."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import SteadyKVError

__all__ = ["read_tensors", "write_tensors"]


def write_tensors(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], header: Mapping[str, Any]
) -> None:
    """Writes one file, which appears under its name only when it is complete.

    The header, JSON-able, is stored under the name in its own entry "format".
    """
    from safetensors.torch import save_file

    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        save_file(tensors, str(partial), metadata={header["format"]: json.dumps(header)})
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def read_tensors(
    path: str | os.PathLike[str],
    form: str,
    what: str,
    error: type[SteadyKVError],
    device: torch.device | str,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file of format `form`; `error` for a file that is no `what`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            header = json.loads((file.metadata() or {})[form])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, json.JSONDecodeError) as failure:
        raise error(
            f"{path} is not a {what} file: {failure!r}; expected what save wrote"
        ) from failure
    if not isinstance(header, dict):
        raise error(f"{path} has a header of type {type(header).__name__}: expected an object")
    return tensors, header
