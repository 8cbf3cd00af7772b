"""Results of a measurement and of a benchmark, as their commands write them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from steadykv.evaluation.provenance import environment


def measured() -> dict[str, Any]:
    """As `steadykv measure` writes it, with an infinite value among the frames."""
    source = {"frames": 40, "width": 96, "height": 64, "fps": 12, "codec": "h264",
              "pixel_format": "yuv420p"}  # fmt: skip
    return {
        "version": 1,
        "sources": [source | {"path": "folder/first.mp4"}, source | {"path": "second.mp4"}],
        "frames": 40,
        "fps": 12,
        "summary": {"psnr": 31.25, "ssim": 0.9312, "flicker_error": 0.000021},
        "by_frame": {"psnr": ["inf", *([31.0, 33.0] * 20)[:39]], "ssim": [0.9] * 40,
                     "flicker_error": [0.01] * 39},
        "command": "steadykv measure first.mp4 second.mp4",
        "environment": environment("cpu"),
    }  # fmt: skip


def bench_rows() -> list[dict[str, Any]]:
    """Rows that `steadykv bench` wrote on an H200; numbers come as text from a CSV file."""
    path = Path(__file__).parents[2] / "benchmarks/results/bench-h200.csv"
    words = {"work", "method", "shape", "baseline", "backend", "gpu", "torch", "triton", "commit"}

    def value(name: str, text: str) -> Any:
        return (text if name in words else float(text)) if text else None

    with path.open(newline="") as file:
        return [{k: value(k, v) for k, v in row.items()} for row in csv.DictReader(file)]
