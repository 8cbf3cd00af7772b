"""Going on with an interrupted comparison: its first command, its lock, the videos it kept."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from steadykv.errors import ConfigError, PayloadError

if TYPE_CHECKING:
    from steadykv.report.video import Frames

ALONE = ("--resume", "--json")


class FirstCommand(list[str]):
    """The command line that began a run, when that run goes on without further options."""


def first_command(folder: Path, typed: Sequence[str], out: Path | None) -> FirstCommand:
    """The words after "steadykv" that began the run in ``folder``.

    Raises ConfigError where there is no such run, or with --out, which a resumed run has already.
    """
    from steadykv.evaluation.resume import Progress

    if out is not None:
        raise ConfigError(f"--out: got {out} beside --resume; expected one of them")
    words = list(Progress.read(folder).arguments)
    if words[:1] != ["compare"]:
        begun = f"steadykv {words[0]}" if words else "another program"
        raise ConfigError(
            f"--resume: {folder} was begun by {begun}, expected a folder of steadykv compare"
        )
    return FirstCommand(words)


def stands_alone(typed: Sequence[str]) -> bool:
    """Whether --resume was given without any option that describes the run."""
    if isinstance(typed, FirstCommand):
        return False
    names = {word.partition("=")[0] for word in typed if word.startswith("--")}
    return names <= set(ALONE)


def again(words: Sequence[str], folder: Path, as_json: bool) -> list[str]:
    """``words`` as they are parsed once more: into the same folder."""
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word != "--out" and not word.startswith("--out="):
            kept.append(word)
        skip = word == "--out"
    if as_json and "--json" not in kept:
        kept.append("--json")
    return [*kept, "--resume", str(folder)]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a result folder: two runs in one would write over each other.

    Ends with the process, however it ends. Raises ConfigError where another run is at work. Does
    nothing where the system has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--resume: got {folder}, where a run is still at work; wait for it, or stop it"
            ) from None
        yield
    finally:
        os.close(handle)


def write_frames(path: Path, frames: Frames) -> None:
    """Raw frames, compressed without loss: a resumed run shows them, a merged report too."""
    import numpy as np

    from steadykv.evaluation.results import write_bytes_atomically

    buffer = io.BytesIO()
    np.savez_compressed(buffer, frames=frames)
    write_bytes_atomically(path, buffer.getvalue())


def read_frames(path: Path) -> Frames:
    """What `write_frames` wrote. Raises PayloadError for anything else."""
    import zipfile

    import numpy as np

    from steadykv.report.video import check_frames

    try:
        with np.load(path, allow_pickle=False) as found:
            return check_frames(found["frames"], str(path))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise PayloadError(
            f"could not read the frames in {path}: {error}; expected what compare wrote"
        ) from error
