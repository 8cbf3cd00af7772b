"""Where a result comes from: versions, commit, device."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import steadykv


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
