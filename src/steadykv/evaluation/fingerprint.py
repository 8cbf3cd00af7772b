"""Whether two runs had the same network and the same walks: hashes of what was really used."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from steadykv.world import Episodes


def world_hash(world: nn.Module) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of all parameters and buffers, as hex.

    Of the tensors as they compute, so another precision is another hash. One tensor at a time is
    copied to the CPU.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(world.state_dict().items()):
        _add(digest, name, tensor)
    return digest.hexdigest()


def walks_hash(walks: Episodes) -> str:
    """SHA-256 of names, first frames and buttons, as hex."""
    digest = hashlib.sha256("\n".join(walks.names).encode())
    _add(digest, "frames", walks.frames)
    _add(digest, "actions", walks.actions)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, tensor: torch.Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(flat.view(torch.uint8).numpy().tobytes())


def file_hash(path: str | Path) -> str | None:
    """SHA-256 of a file's bytes, hexadecimal; None where there is no such file.

    Numbered pictures (``frame-%04d.png``) are no file. Holds 1 MiB at a time.
    """
    source = Path(path)
    if not source.is_file():
        return None
    digest = hashlib.sha256()
    with source.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
