"""Frames a second of the video metrics: a table, and rows as CSV.

    python -m benchmarks.metrics                                      # from the root of a checkout
    python -m benchmarks.metrics --metrics lpips --device cuda --csv rows.csv

Two videos of 1280 x 720 made of a natural clip and noise, measured frame after frame. `basic` is
PSNR, SSIM of luma and the flicker error of the same pair, one after the other: what has a target
together. On a CPU processor seconds stand beside the wall clock: where other programs want the
same cores, they are what a quiet machine would need at least, shared among its threads.
OMP_WAIT_POLICY=passive keeps waiting threads from burning them. The largest load average of the
system before and after a metric is in its row.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.encode_cpu import append, spread
from steadykv.evaluation.metrics import flicker_by_step, psnr_by_frame, ssim_by_frame
from steadykv.evaluation.metrics.flip import flip_by_frame
from steadykv.evaluation.metrics.lpips import lpips_by_frame
from steadykv.evaluation.metrics.ms_ssim import ms_ssim_by_frame
from steadykv.evaluation.metrics.vmaf import vmaf_by_frame
from steadykv.evaluation.provenance import environment
from tests.natural import clip, noisy

Metric = Callable[[torch.Tensor, torch.Tensor], object]


def basic(reference: torch.Tensor, video: torch.Tensor) -> None:
    """What has a target together."""
    psnr_by_frame(reference, video)
    ssim_by_frame(reference, video, "luma")
    flicker_by_step(reference, video)


METRICS: dict[str, Metric] = {
    "basic": basic,
    "psnr": psnr_by_frame,
    "ssim_luma": lambda a, b: ssim_by_frame(a, b, "luma"),
    "ssim_rgb": ssim_by_frame,
    "flicker": flicker_by_step,
    "ms_ssim": ms_ssim_by_frame,
    "lpips": lpips_by_frame,
    "flip": flip_by_frame,
    "vmaf": vmaf_by_frame,
}
OPTIONAL = ("flip", "vmaf")
# Frames a second of 1280 x 720: on two cores, and on an H200.
TARGET_SIZE = "1280x720"
TARGETS = {"cpu": {"basic": 15.0, "lpips": 2.0}, "cuda": {"basic": 200.0, "lpips": 100.0}}


def videos(width: int, height: int, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A natural clip scaled up, and the same with noise: uint8 [T, H, W, 3] twice."""
    few = clip()[torch.arange(frames) % len(clip())].movedim(-1, 1).float()
    large = torch.nn.functional.interpolate(few, (height, width), mode="bilinear")
    reference = large.movedim(1, -1).round().to(torch.uint8).contiguous()
    return reference, noisy(reference, 20)


def measure(
    name: str, pair: tuple[torch.Tensor, torch.Tensor], threads: int, repeats: int
) -> dict[str, Any]:
    """One row. The first call, which loads what is lazy, is not counted."""
    torch.set_num_threads(threads)
    metric, device = METRICS[name], pair[0].device

    def call(count: int) -> None:
        metric(pair[0][:count], pair[1][:count])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call(2)
    frames, height, width = pair[0].shape[:3]
    load = os.getloadavg()[0]
    wall, processor = [], []
    for _ in range(repeats):
        start, start_processor = time.perf_counter(), time.process_time()
        call(frames)
        wall.append((time.perf_counter() - start) / frames)
        processor.append((time.process_time() - start_processor) / frames)
    low, middle, high = spread(wall)
    return {
        "metric": name,
        "size": f"{width}x{height}",
        "frames": frames,
        "threads": threads,
        "repeats": repeats,
        "frames_per_second": 1.0 / middle,
        "ms_per_frame": 1e3 * middle,
        "ms_p20": 1e3 * low,
        "ms_p80": 1e3 * high,
        "ms_least": 1e3 * min(wall),
        "processor_ms_per_frame": 1e3 * spread(processor)[1],
        "load_average": max(load, os.getloadavg()[0]),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        **environment(device),
    }


def table(rows: list[dict[str, Any]], device: str) -> str:
    """A line for each metric, against its target where it has one."""
    heads = f"{'metric':<11}{'frames/s':>9}{'ms/frame':>10}{'p20–p80':>18}"
    lines = [f"{heads}{'processor ms':>14}{'load':>7}"]
    for row in rows:
        between = f"{row['ms_p20']:.1f}–{row['ms_p80']:.1f}"
        target = TARGETS[device].get(row["metric"]) if row["size"] == TARGET_SIZE else None
        verdict = ""
        if target is not None:
            met = "met" if row["frames_per_second"] >= target else "missed"
            verdict = f"  target {target:.0f} frames/s {met}"
        lines.append(
            f"{row['metric']:<11}{row['frames_per_second']:>9.2f}{row['ms_per_frame']:>10.1f}"
            f"{between:>18}{row['processor_ms_per_frame']:>14.1f}{row['load_average']:>7.1f}"
            f"{verdict}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints the table, and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [name for name in METRICS if name not in OPTIONAL]
    parser.add_argument("--metrics", nargs="+", default=known, choices=METRICS, metavar="METRIC")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=list(TARGETS))
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args(arguments)
    for name, least in (("width", 1), ("height", 1), ("frames", 2), ("threads", 1), ("repeats", 1)):
        if getattr(given, name) < least:
            parser.error(f"--{name} is {getattr(given, name)}: expected {least} or more")
    pair = videos(given.width, given.height, given.frames)
    on_device = pair[0].to(given.device), pair[1].to(given.device)
    rows = [measure(name, on_device, given.threads, given.repeats) for name in given.metrics]
    print(table(rows, given.device))
    if given.csv:
        append(given.csv, rows)


if __name__ == "__main__":
    main()
