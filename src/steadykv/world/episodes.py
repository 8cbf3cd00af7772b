"""Held-out beginnings of walks: three true frames and the buttons held afterwards."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from steadykv.errors import ConfigError, PayloadError
from steadykv.world.shipped import chosen_file

# what reading an archive with wrong contents raises
DAMAGE = (
    OSError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
    OverflowError,
    IndexError,
    EOFError,
    zlib.error,
    zipfile.BadZipFile,
    Image.DecompressionBombError,
)


@dataclass(frozen=True)
class Episodes:
    """`frames` uint8 [B,C,H,W,3], `actions` uint8 [B,N] and `names` [B].

    `frames` are the true ones that a rollout begins with: C is a multiple of the chunk.
    `actions[b,i]` is the bit mask of the buttons held before frame i. `poses` float32 [B,N,3], if
    the simulator's are known, says where the true walk stood in frame i: x and y in map units,
    angle in degrees, counterclockwise.
    """

    frames: torch.Tensor
    actions: torch.Tensor
    names: tuple[str, ...]
    poses: torch.Tensor | None = None
    camera: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.names)

    def select(self, rows: Sequence[int]) -> Episodes:
        """The given rows, in the given order; a row may come more than once."""
        index = torch.as_tensor(list(rows), dtype=torch.long)
        return Episodes(
            self.frames[index],
            self.actions[index],
            tuple(self.names[i] for i in rows),
            None if self.poses is None else self.poses[index],
            None if self.camera is None else self.camera[index],
        )

    def with_camera(self) -> Episodes:
        """The same walks, told where the simulator stood: camera control, as for a given path.

        Raises ConfigError where the simulator's poses are not known.
        """
        if self.poses is None:
            raise ConfigError(
                "camera: got walks without poses, expected the simulator's; use walks of 'rooms' "
                "or leave the world to reckon from the buttons"
            )
        return dataclasses.replace(self, camera=self.poses)


POSE_STEPS = (1.0, 1.0, 0.1)  # poses are stored as whole map units and tenths of degrees


def save_episodes(path: Path, episodes: Episodes) -> int:
    """Write a zip of one lossless PNG strip a row, one JSON list, and `poses.npy` if known.

    Angles are stored within -180 to 180 degrees. Returns the file's bytes. Raises ConfigError for
    names that are not different, for a `camera`, which has no place in it, and for poses that are
    not finite or lie beyond 32,767 map units; then a file that was there stays as it is.
    """
    poses = None if episodes.poses is None else _stored_poses(episodes.poses)
    if episodes.camera is not None:
        raise ConfigError("camera: got one, expected none; save poses, and use with_camera() later")
    if len(set(episodes.names)) != len(episodes.frames):
        raise ConfigError(
            f"names: got {episodes.names}, expected a different one for each of "
            f"{len(episodes.frames)} rows"
        )
    temporary = path.with_name(f".{path.name}.part")
    try:
        _write_archive(temporary, episodes, poses)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size


def _stored_poses(poses: torch.Tensor) -> NDArray[np.int16]:
    """Whole steps of POSE_STEPS [B,N,3]. Raises ConfigError."""
    x, y, angle = poses.cpu().double().unbind(-1)
    wrapped = torch.stack((x, y, (angle + 180).remainder(360) - 180), -1)
    steps = (wrapped / torch.tensor(POSE_STEPS, dtype=torch.float64)).round()
    if not bool((steps.abs() < 1 << 15).all()):  # NaN is not, either
        raise ConfigError(
            "poses: got some that are not finite or beyond 32,767 map units, expected what a map "
            "holds; leave them out or count them from another origin"
        )
    return steps.to(torch.int16).numpy()


def _write_archive(path: Path, episodes: Episodes, poses: NDArray[np.int16] | None) -> None:
    rows = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, frames, actions in zip(
            episodes.names, episodes.frames, episodes.actions, strict=True
        ):
            png = io.BytesIO()
            Image.fromarray(frames.flatten(0, 1).numpy()).save(png, "PNG", optimize=True)
            archive.writestr(f"{name}.png", png.getvalue())
            rows.append({"name": name, "frames": len(frames), "actions": actions.tolist()})
        archive.writestr("episodes.json", json.dumps(rows), zipfile.ZIP_DEFLATED)
        if poses is not None:
            npy = io.BytesIO()
            np.save(npy, poses)
            archive.writestr("poses.npy", npy.getvalue(), zipfile.ZIP_DEFLATED)


def load_episodes(which: int | Sequence[int] = 64, path: str | Path | None = None) -> Episodes:
    """The first `which` shipped held-out episodes, or those with the given numbers.

    `path` is the name of a world ("mazes", the default, or "rooms") or a file. Raises ConfigError
    for numbers there are not, for a string that is neither a name nor a file, and for a world that
    is not installed; PayloadError for a file that is no archive of episodes.
    """
    source = chosen_file(path, "episodes")
    try:
        with source.open("rb") as file, zipfile.ZipFile(file) as archive:
            rows = json.loads(archive.read("episodes.json"))
            wanted = list(range(which)) if isinstance(which, int) else list(which)
            if not wanted or min(wanted) < 0 or max(wanted) >= len(rows):
                raise ConfigError(
                    f"episodes: got {which}, expected some of the {len(rows)} there are, "
                    f"numbered from 0 to {len(rows) - 1}"
                )
            names = tuple(str(rows[i]["name"]) for i in wanted)
            frames = []
            for i, name in zip(wanted, names, strict=True):
                picture = Image.open(io.BytesIO(archive.read(f"{name}.png")))
                strip = np.asarray(picture.convert("RGB"))
                shape = (rows[i]["frames"], -1, *strip.shape[1:])
                frames.append(torch.from_numpy(strip.reshape(shape).copy()))
            actions = torch.tensor([rows[i]["actions"] for i in wanted], dtype=torch.uint8)
            poses = None
            if "poses.npy" in archive.namelist():
                stored = np.load(io.BytesIO(archive.read("poses.npy")), allow_pickle=False)[wanted]
                poses = torch.from_numpy(stored).float() * torch.tensor(POSE_STEPS)
                if poses.shape != (*actions.shape, 3):
                    raise ValueError(f"poses.npy of {tuple(stored.shape)}")
            return Episodes(torch.stack(frames), actions, names, poses)
    except ConfigError:
        raise
    except DAMAGE as error:
        reason = str(error).partition("\n")[0]
        raise PayloadError(
            f"{source}: got no readable archive of episodes ({reason}); expected episodes.zip"
        ) from error
