"""Made-up held-out walks with poses, as training/data.py records them, for a tiny world."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import memory
from tests.worlds import TINY as TWO_LAYERS
from tests.worlds import tiny_world

TINY = dataclasses.replace(TWO_LAYERS, num_layers=1)
HERE, THERE = (0.0, 0.0, 90.0), (500.0, 0.0, 270.0)
# A view for 6 frames, left for 64, and back: frames 70 to 75 return to it.
POSES = np.array([HERE] * 6 + [THERE] * 64 + [HERE] * 6 + [THERE] * 14, np.float32)


def write_walks(folder: Path, files: int = 2) -> None:
    """Two walks a file; smooth frames whose upper left pixel is the number of the frame."""
    generator = torch.Generator().manual_seed(9)
    count = 2 * len(POSES)
    for number in range(files):
        coarse = torch.rand((count, 3, 4, 4), generator=generator) * 200
        size = (TINY.image_height, TINY.image_width)
        smooth = torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")
        frames = smooth.movedim(1, -1).byte().numpy()
        frames[:, 0, 0, 0] = np.arange(count)
        np.savez(
            folder / f"heldout-houses-{number:03d}.npz",
            frames=frames,
            actions=(np.arange(count) % 16).astype(np.uint8),
            lengths=np.array([len(POSES)] * 2),
            poses=np.concatenate([POSES, POSES]),
        )


def walks_of_a_tiny_world(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of them, for benchmarks that then run the tiny world whatever `--world` says."""
    monkeypatch.setattr(memory, "load_world", lambda *_, **__: tiny_world(TINY))
    write_walks(folder)
    return folder
