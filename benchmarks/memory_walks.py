"""Moments of recorded held-out walks at which a view comes back that a short memory cannot have.

The walks have all their true frames and the simulator's poses, as made by `python training/data.py
--recipe training/rooms.json --walks 0 --out FOLDER`. What counts as the same view, as having left
it and as a return is in `steadykv.evaluation.revisits`.
"""

from __future__ import annotations

import zipfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from steadykv.errors import ConfigError, PayloadError
from steadykv.evaluation.revisits import UNSEEN, returning, same_view
from steadykv.world import Episodes

PARTS = ("actions", "lengths", "poses")


@dataclass(frozen=True)
class Track:
    """Where one walk lies in its file, `first` and `length` in frames, and what it did.

    `actions` uint8 [N]: buttons held before each frame. `poses` float32 [N, 3]: x, y in map units,
    angle in degrees.
    """

    name: str
    path: Path
    first: int
    length: int
    actions: NDArray[np.uint8]
    poses: NDArray[np.float32]


def read_tracks(folder: Path) -> list[Track]:
    """All held-out walks of a folder, in the order of their names; frames are not read yet.

    Raises ConfigError where there are none, PayloadError for a file that is none or lacks poses.
    """
    found = []
    for path in sorted(folder.glob("heldout-*.npz")):
        try:
            with np.load(path, allow_pickle=False) as file:
                actions, lengths, poses = (file[name] for name in PARTS)
            if not len(actions) == len(poses) == lengths.sum() or not np.isfinite(poses).all():
                raise ValueError("their lengths do not fit, or poses are not finite")
        except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            reason = str(error).partition("\n")[0]
            raise PayloadError(
                f"{path}: got no walks with poses ({reason}); expected {', '.join(PARTS)}: record "
                "them with training/data.py --recipe training/rooms.json"
            ) from error
        ends = np.cumsum(lengths)
        for number, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
            part = slice(end - length, end)
            name = f"{path.stem.removeprefix('heldout-')}-{number:02d}"  # as in shipped episodes
            found.append(Track(name, path, end - length, length, actions[part], poses[part]))
    if not found:
        raise ConfigError(
            f"{folder}: got no heldout-*.npz; expected recorded walks: run training/data.py "
            "--recipe training/rooms.json --walks 0 --out FOLDER"
        )
    return found


@dataclass(frozen=True)
class Moment:
    """A rollout that begins at frame `start` of a walk, after `prime` true frames.

    `frames`: those of the generated ones that return to a view; `seen`: the true frame that saw
    each last. All are numbers of frames in the walk.
    """

    track: Track
    start: int
    prime: int
    frames: tuple[int, ...]
    seen: tuple[int, ...]

    @property
    def away(self) -> float:
        """How far from where a view was seen it comes back: map units, the mean over frames."""
        places = self.track.poses[:, :2].astype(float)
        apart = places[list(self.frames)] - places[list(self.seen)]
        return float(np.linalg.norm(apart, axis=1).mean())

    @property
    def name(self) -> str:
        """Of the walk and the place in it: what the noise of the rollout depends on."""
        return f"{self.track.name}@{self.start}"


def moments_of(
    track: Track,
    *,
    prime: int,
    generated: int,
    short: int = 24,
    absent: tuple[float, float] = UNSEEN,
    apart: int = 24,
) -> list[Moment]:
    """The moments of a walk, those with most returning frames first, at least `apart` frames apart.

    A generated frame counts if it shows a view left 60 to 110 frames ago (`revisits.returning`)
    that the true frames before the rollout show, and if none of the last `short` of them is within
    `absent` (map units and degrees) of it, so that whoever attends to those has not seen it.
    """
    seen, within = returning(track.poses), same_view(track.poses, absent)
    candidates = []
    for start in range(max(prime, short), track.length - generated + 1):
        frames = np.arange(start, start + generated)
        recent = within[start : start + generated, start - short : start].any(1)
        counts = frames[(seen[frames] >= start - prime) & (seen[frames] < start) & ~recent]
        if len(counts):
            candidates.append(
                Moment(track, start, prime, tuple(counts.tolist()), tuple(seen[counts].tolist()))
            )
    picked: list[Moment] = []
    for one in sorted(candidates, key=lambda moment: -len(moment.frames)):
        if all(abs(one.start - other.start) >= apart for other in picked):
            picked.append(one)
    return picked


def in_turns(by_walk: Sequence[Sequence[Moment]], count: int | None) -> list[Moment]:
    """The first of each walk, then the second of each, and so on: `count` of them, or all."""
    turns = zip_longest(*by_walk)
    return [one for turn in turns for one in turn if one is not None][:count]


def load_moments(moments: Sequence[Moment], generated: int) -> tuple[Episodes, torch.Tensor]:
    """What `rollout` takes, and the true frames uint8 [B, prime + generated, H, W, 3].

    Reads one file at a time and keeps only what the moments need.
    """
    files: dict[Path, list[int]] = defaultdict(list)
    for number, one in enumerate(moments):
        files[one.track.path].append(number)
    clips: dict[int, NDArray[np.uint8]] = {}
    for path, numbers in files.items():
        with np.load(path, allow_pickle=False) as file:
            frames = file["frames"]
        for number in numbers:
            one = moments[number]
            first = one.track.first + one.start
            clips[number] = frames[first - one.prime : first + generated].copy()
    true = torch.from_numpy(np.stack([clips[number] for number in range(len(moments))]))
    parts = [slice(one.start - one.prime, one.start + generated) for one in moments]
    tracks = [one.track for one in moments]
    episodes = Episodes(
        true[:, : moments[0].prime],
        torch.from_numpy(np.stack([t.actions[p] for t, p in zip(tracks, parts, strict=True)])),
        tuple(one.name for one in moments),
        torch.from_numpy(np.stack([t.poses[p] for t, p in zip(tracks, parts, strict=True)])),
    )
    return episodes, true
