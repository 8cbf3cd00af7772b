"""Does the flicker index see flicker, in proportion, and not the camera? Rows on real frames.

    python -m benchmarks.flicker_clip --folder /tmp/clips
    python -m benchmarks.flicker /tmp/clips/*.npy --csv benchmarks/results/flicker-synthetic.csv

Clips come from `benchmarks/flicker_clip.py` (or are MP4 files without loss). "speed": the whole
clip, and every second and fourth frame of it. Flicker of known strength, of every second frame:
"gain", brighter and darker in turn by a share; "block", 8 x 8 pixels by a random sign times the
share, anew in each frame; "noise", normal with a deviation in grey levels.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steadykv.evaluation.metrics.flicker import flicker_index_of, vbench_flickering
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.results import write_csv

from .flicker_clip import read_clip

SPEEDS = (1, 2, 4)
STRENGTHS = {
    "gain": (0.0, 0.02, 0.04, 0.08, 0.16),
    "block": (0.0, 0.02, 0.04, 0.08, 0.16),
    "noise": (0.0, 1.0, 2.0, 4.0, 8.0),
}


def with_flicker(video: torch.Tensor, kind: str, strength: float, seed: int = 0) -> torch.Tensor:
    """uint8 [T, H, W, 3] with flicker of one kind."""
    generator = torch.Generator().manual_seed(seed)
    count, height, width = video.shape[:3]
    values = video.float()
    if kind == "gain":
        sign = 1.0 - 2.0 * (torch.arange(count) % 2)
        values = values * (1.0 + strength * sign[:, None, None, None])
    elif kind == "block":
        size = (count, -(-height // 8), -(-width // 8), 1)
        sign = 2.0 * torch.randint(0, 2, size, generator=generator) - 1.0
        sign = sign.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, :height, :width]
        values = values * (1.0 + strength * sign)
    else:
        values = values + strength * torch.randn(values.shape, generator=generator)
    return values.round().clamp(0, 255).to(torch.uint8)


def measure(name: str, video: torch.Tensor) -> list[dict[str, Any]]:
    """A row for each speed, and for each kind and strength at twice the speed."""
    tried = [("speed", float(speed), video[::speed]) for speed in SPEEDS]
    for kind, strengths in STRENGTHS.items():
        tried += [(kind, s, with_flicker(video[::2], kind, s)) for s in strengths]
    return [
        {
            "clip": name,
            "what": what,
            "strength": strength,
            "flicker_index": flicker_index_of(frames).item(),
            "vbench_flickering": vbench_flickering(frames).item(),
            "frames": len(frames),
        }
        for what, strength, frames in tried
    ]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Range over clips of the ratio to each clip's own value at speed 1 or strength 0."""
    base = {(r["clip"], r["what"]): r["flicker_index"] for r in reversed(rows)}
    lines = []
    for what in ("speed", *STRENGTHS):
        for strength in dict.fromkeys(r["strength"] for r in rows if r["what"] == what):
            found = [r for r in rows if r["what"] == what and r["strength"] == strength]
            ratios = np.sort([r["flicker_index"] / base[r["clip"], what] for r in found])
            levels = 255 * np.mean([r["flicker_index"] for r in found])
            lines.append(
                f"{what:<6}{strength:>6g}  index {levels:6.3f} levels  ratio {ratios[0]:.2f} to "
                f"{ratios[-1]:.2f}, median {np.median(ratios):.2f}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clips", type=Path, nargs="+", help=".npy or .mp4")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for path in given.clips:
        frames = np.load(path) if path.suffix == ".npy" else read_clip(path)
        rows += measure(path.stem, torch.from_numpy(frames))
    print(summary(rows))
    if given.csv is not None:
        facts = environment("cpu")
        write_csv(given.csv, [row | facts for row in rows])


if __name__ == "__main__":
    main()
