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

    The header, JSON-able, is stored under the name in its own entry "format". Raises SteadyKVError
    where the system refuses to write.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        save_file(tensors, str(partial), metadata={header["format"]: json.dumps(header)})
        umask = os.umask(0)  # safetensors makes private files; others get what any file would
        os.umask(umask)
        os.chmod(partial, 0o666 & ~umask)
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise SteadyKVError(
            f"could not write {target}: {reason}; free space or choose another folder"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def read_tensors(
    path: str | os.PathLike[str],
    form: str,
    what: str,
    error: type[SteadyKVError],
    device: torch.device | str,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file of format `form`; `error` for a file that is no `what`, and
    FileNotFoundError where there is none."""
    from safetensors import SafetensorError, safe_open

    kind = f"{path} is not a {what} file"
    if Path(path).is_dir():
        raise error(f"{kind} but a folder; expected what save wrote")
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            text = (file.metadata() or {}).get(form)
            if text is None:
                raise error(f"{kind}: it has no header {form!r}; expected what save wrote")
            header = json.loads(text)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except json.JSONDecodeError as failure:
        raise error(f"{kind}: its header is no JSON; expected what save wrote") from failure
    except SafetensorError as failure:
        reason = " ".join(str(failure).split())
        raise error(f"{kind}: {reason}; expected what save wrote") from failure
    if not isinstance(header, dict):
        raise error(f"{path} has a header of type {type(header).__name__}: expected an object")
    return tensors, header
