"""Where a result comes from: what was run, versions, commit, device."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import steadykv
from steadykv.codecs import Calibration
from steadykv.evaluation.calibrated import describe_calibration
from steadykv.evaluation.fingerprint import walks_hash, world_hash
from steadykv.evaluation.protocol import PSNR_CEILING_DB, FrameWindow, Protocol, ShiftOptions
from steadykv.world import Episodes, WorldModel


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_commit() -> str | None:
    """Commit of the checkout this package runs from, "-modified" appended if it was edited.

    None when git is absent or the file is not tracked: a package installed inside somebody else's
    checkout must not take that one's commit for its own.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("-modified" if _git("status", "--porcelain", "-uno") else "")


def environment(device: str | torch.device) -> dict[str, Any]:
    """JSON-able description of software and device for result rows."""
    place = torch.device(device)
    if place.type == "cuda":
        name = torch.cuda.get_device_name(place)
    else:
        name = f"{platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    return {
        "steadykv": steadykv.__version__,
        "commit": git_commit(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.system(),
        "device": place.type,
        "device_name": name,
    }


def shared_configuration(
    world: WorldModel,
    episodes: Episodes,
    protocol: Protocol,
    *,
    windows: Sequence[FrameWindow],
    shift: ShiftOptions | None,
    shift_frames: int,
    calibration: Calibration | None,
) -> dict[str, Any]:
    """What all rows of a comparison share, JSON-able: see docs/results-schema.md."""
    found: dict[str, Any] = {}
    if calibration is not None:
        walks = [{"episode": name} for name in episodes.names]
        found["calibration"] = describe_calibration(calibration, walks)
    return found | {
        "key_rope": protocol.key_rope,
        "frames": protocol.frames,
        "context_frames": world.config.chunk_frames,
        "episodes": list(episodes.names),
        "seeds": list(protocol.seeds),
        "first_packed_frame": windows[0].start,
        "windows": {window.label: [window.start, window.end] for window in windows},
        "headline_window": windows[-1].label,
        "psnr_ceiling_db": PSNR_CEILING_DB,
        "ssim_channels": "rgb",
        "shift": None if shift is None else asdict(shift) | {"frames": shift_frames},
        "max_batch": protocol.max_batch,
        "confidence": protocol.confidence,
        "resamples": protocol.resamples,
        "world": world.config.to_dict(),
        "world_sha256": world_hash(world),
        "walks_sha256": walks_hash(episodes),
        "world_dtype": str(next(world.parameters()).dtype).removeprefix("torch."),
    }
