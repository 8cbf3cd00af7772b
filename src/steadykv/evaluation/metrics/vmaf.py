"""VMAF of uint8 video, by frame (optional extra), from the libvmaf of a static FFmpeg.

Li, Aaron, Katsavounidis, Moorthy, Manohara: Toward a Practical Perceptual Video Quality Metric,
Netflix 2016; model vmaf_v0.6.1. FFmpeg (GPL) runs as a program of its own: the package
imageio-ffmpeg brings it, and raw frames go to it through two pipes.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from steadykv.errors import BackendUnavailable
from steadykv.evaluation.metrics.frames import Frames, check_sides, frame_pair
from steadykv.evaluation.metrics.optional import optional_module

MODEL = "vmaf_v0.6.1"
SMALLEST = 32
"""Shortest side: four pixels are left at the coarsest of VMAF's four scales. libvmaf dies at 16."""
# VMAF reads limited-range luma; without subsampled chroma odd sizes are no trouble.
_TO_LUMA = "scale=out_color_matrix=bt709:out_range=limited:flags=accurate_rnd,format=yuv444p"
_LOG = "vmaf.json"
_ERRORS = "errors.txt"
_FIX = (
    "expected an FFmpeg with libvmaf: pip install --upgrade imageio-ffmpeg, and unset "
    "IMAGEIO_FFMPEG_EXE"
)


def vmaf_by_frame(reference: Frames, video: Frames) -> torch.Tensor:
    """VMAF of each frame, FP64 [T] or [B, T], 0 .. 100 (best), on the reference's device.

    ``reference`` and ``video`` are uint8 [T, H, W, 3] or [B, T, H, W, 3], sRGB; conversion to
    BT.709 luma is the only loss on the way. Equal videos give 97 to 100, not exactly 100: the model
    is a regression that also looks at motion, so a frame's value depends on the frame before it,
    and the order of the two videos matters. Trained on 1080p seen from three screen heights.
    Allocates one frame at a time; FFmpeg takes as many threads as torch. Raises BackendUnavailable
    (no imageio-ffmpeg: ``pip install 'steadykv[vmaf]'``; or an FFmpeg that fails, with its words),
    ShapeError (sizes differ, a side under 32 pixels) or NonFiniteError.
    """
    first, second, batched = frame_pair(reference, video)
    check_sides(first, SMALLEST, "VMAF")
    try:
        program = optional_module("imageio_ffmpeg", "VMAF", "vmaf").get_ffmpeg_exe()
    except RuntimeError as error:
        if isinstance(error, BackendUnavailable):
            raise
        raise BackendUnavailable(
            f"VMAF got no FFmpeg ({error}); expected the one that imageio-ffmpeg brings: "
            "unset IMAGEIO_FFMPEG_EXE, or install its wheel for this machine"
        ) from error
    rows = [_of_video(program, a, b) for a, b in zip(first, second, strict=True)]
    result = torch.tensor(rows, dtype=torch.float64, device=first.device)
    return result if batched else result[0]


def _of_video(program: str, reference: torch.Tensor, video: torch.Tensor) -> list[float]:
    count, height, width = reference.shape[:3]
    ends = [os.pipe() for _ in range(2)]
    command = [program, "-hide_banner", "-nostdin", "-nostats", "-loglevel", "error"]
    for read, _ in ends:
        command += ["-f", "rawvideo", "-pixel_format", "rgb24", "-framerate", "25"]
        command += ["-video_size", f"{width}x{height}", "-i", f"pipe:{read}"]
    threads = torch.get_num_threads()
    command += [
        "-filter_complex",
        f"[0:v]{_TO_LUMA}[main];[1:v]{_TO_LUMA}[reference];[main][reference]"
        f"libvmaf=model=version={MODEL}:n_threads={threads}:log_fmt=json:log_path={_LOG}",
        "-f", "null", "-",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="steadykv-vmaf-") as folder:
        status = _run(command, Path(folder), ends, (video, reference))
        log = Path(folder) / _LOG
        if status or not log.exists():
            words = (Path(folder) / _ERRORS).read_text(errors="replace").strip().splitlines()
            raise BackendUnavailable(
                f"{program} ended with status {status} ({words[-1] if words else 'no message'}); "
                f"{_FIX}"
            )
        frames: list[dict[str, Any]] = json.loads(log.read_text())["frames"]
    if len(frames) != count:
        raise BackendUnavailable(f"{program} compared {len(frames)} frames; expected {count}")
    return [frame["metrics"]["vmaf"] for frame in frames]


def _run(
    command: list[str],
    folder: Path,
    ends: list[tuple[int, int]],
    videos: tuple[torch.Tensor, torch.Tensor],
) -> int:
    """Runs ``command`` in ``folder``, feeding one video to each pipe: its exit status."""
    reads, writes = zip(*ends, strict=True)
    try:
        with (folder / _ERRORS).open("wb") as errors:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=reads,
            )
    except OSError as error:
        for end in writes:
            os.close(end)
        raise BackendUnavailable(f"{command[0]} does not run ({error}); {_FIX}") from error
    finally:
        for end in reads:
            os.close(end)
    feeders = [
        threading.Thread(target=_feed, args=(pipe, frames))
        for pipe, frames in zip(writes, videos, strict=True)
    ]
    try:
        for feeder in feeders:
            feeder.start()
        return process.wait()
    finally:
        process.kill()  # does nothing once it has ended; frees the feeders on an interrupt
        for feeder in feeders:
            feeder.join()


def _feed(pipe: int, frames: torch.Tensor) -> None:
    """Writes raw frames until all are taken, or the reader has gone: it then says why itself."""
    try:
        with open(pipe, "wb") as file:
            for frame in frames:
                file.write(frame.contiguous().cpu().numpy().data)
    except BrokenPipeError:
        pass
