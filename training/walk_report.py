"""What recorded walks through houses are like: returns, reckoned poses, and how far copying gets.

    python training/walk_report.py --recipe training/rooms.json --walks /tmp/walks

Copying puts an earlier frame, shifted by the turn since then, in a frame's place; PSNR is over what
both show, the median over the frames.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from recipe import read_recipe

from steadykv.evaluation.revisits import NEAR, RETURN_FRAMES, returning
from steadykv.world.config import WorldConfig
from steadykv.world.pose import walk_poses
from steadykv.world.tokenizer import Tokenizer

SHORTEST, LONGEST = RETURN_FRAMES
STARTS, COUNT = (30, 300, 600), 120  # where reckoning begins, and for how many frames
LEAD = 20  # frames of buttons that tell a walker's speed


class Recorded(NamedTuple):
    """frames uint8 [N,H,W,3], actions uint8 [N], poses float32 [N,3]: x, y, degrees."""

    frames: NDArray[np.uint8]
    actions: NDArray[np.uint8]
    poses: NDArray[np.float32]


def read_walks(folder: Path, kind: str) -> Iterator[Recorded]:
    """The walks of all files whose names begin with `kind`."""
    for path in sorted(folder.glob(f"{kind}-*.npz")):
        with np.load(path) as file:
            ends = np.cumsum(file["lengths"])[:-1]
            parts = (np.split(file[name], ends) for name in Recorded._fields)
            yield from map(Recorded, *parts)


def turned(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """Degrees from heading b to heading a, -180 to 180."""
    return np.asarray((a - b + 180) % 360 - 180)


def reckoning(walk: Recorded, start: int, count: int, lead: int) -> tuple[NDArray, NDArray]:
    """How far places (map units) and headings (degrees) reckoned from the buttons are off.

    The reckoning begins `lead` frames before `start`.
    """
    held = torch.from_numpy(walk.actions[None, start - lead : start + count].astype(np.int64))
    reckoned = walk_poses(held)[0, lead:].numpy().astype(float)
    true = walk.poses[start : start + count].astype(float)
    angle = np.radians(true[0, 2] - reckoned[0, 2])
    (x, y), (c, s) = (reckoned[:, :2] - reckoned[0, :2]).T, (np.cos(angle), np.sin(angle))
    off = np.hypot(c * x - s * y + true[0, 0] - true[:, 0], s * x + c * y + true[0, 1] - true[:, 1])
    return off, np.abs(turned(reckoned[:, 2] - reckoned[0, 2], true[:, 2] - true[0, 2]))


def copied(walk: Recorded, frame: int, source: int, shifted: bool, view: float) -> float:
    """PSNR of `source` in the place of `frame`; NaN if they show nothing in common."""
    a, b = (walk.frames[i].astype(float) for i in (frame, source))
    width = a.shape[1]
    pixels = round(float(turned(walk.poses[frame, 2], walk.poses[source, 2])) / view * width)
    if shifted:
        if abs(pixels) > width - 8:
            return float("nan")
        # a left turn is positive and moves what is seen to the right
        right, left = max(pixels, 0), max(-pixels, 0)
        a, b = a[:, right : width - left], b[:, left : width - right]
    return float(10 * np.log10(255**2 / max(float(np.square(a - b).mean()), 0.1)))


def best_source(poses: NDArray[np.float32], frame: int) -> int | None:
    """The frame 24 to 110 frames ago whose pose is nearest, if it stands within NEAR."""
    past = np.arange(max(0, frame - LONGEST), frame - 24)
    away = np.hypot(*(poses[past, :2] - poses[frame, :2]).T) / NEAR[0]
    if not len(past) or away.min() > 1:
        return None
    return int(past[np.argmin(away + np.abs(turned(poses[past, 2], poses[frame, 2])) / NEAR[1])])


def show_returns(kind: str, walks: list[Recorded]) -> None:
    """How many frames show a view that was left long ago."""
    share = [returning(walk.poses)[LONGEST:] >= 0 for walk in walks]
    print(
        f"{kind}: {len(walks)} walks, {sum(len(w.poses) for w in walks)} frames; "
        f"{np.concatenate(share).mean():.1%} of the frames after the first {LONGEST} show a view "
        f"left {SHORTEST} to {LONGEST} frames ago; {np.mean([s.any() for s in share]):.1%} of the "
        "walks have one"
    )


def show_reckoning(walks: list[Recorded]) -> None:
    """How exact the buttons are as a record of headings and places."""
    for told, lead, starts in (
        ("of walkers whose last 20 frames are known", LEAD, STARTS),
        ("of walkers already under way", 0, STARTS),
        ("of walks from their beginning", 0, (0,)),
    ):
        found = [reckoning(walk, start, COUNT, lead) for walk in walks for start in starts]
        off, wrong = (np.array(part) for part in zip(*found, strict=True))
        medians = {n: round(float(np.median(off[:, n - 1])), 2) for n in (10, 60, 120)}
        print(
            f"{told}: reckoned headings off by {wrong.max():.3f} degrees at most; places, after so "
            f"many frames, in the median by {medians} map units"
        )
    back = []
    for walk in walks:
        seen = returning(walk.poses)
        for frame in np.flatnonzero(seen >= LEAD)[::7].tolist():
            first = int(seen[frame])
            back.append(reckoning(walk, first, frame - first + 1, LEAD)[0][-1])
    low, middle, high = np.percentile(back, (25, 50, 75))
    print(
        f"views that come back, {len(back)} frames: the reckoned way from where they were seen "
        f"last is off by {low:.1f}, {middle:.1f} and {high:.1f} map units (quartiles)"
    )


def show_copies(walks: list[Recorded], view: float) -> None:
    """Copies of near frames while a walker turns on the spot, and of old ones when it is back."""
    for back in (1, 4, 8):
        values: list[list[float]] = [[], []]
        for walk in walks:
            for i in range(200, len(walk.poses), 29):
                still = np.ptp(walk.poses[i - back : i + 1, :2], axis=0).max() < 1
                if still and abs(turned(walk.poses[i, 2], walk.poses[i - back, 2])) > 7 * back:
                    for one, shifted in zip(values, (True, False), strict=True):
                        one.append(copied(walk, i, i - back, shifted, view))
        print(
            f"turning on the spot, {back} frames before, {len(values[0])} frames: shifted "
            f"{np.nanmedian(values[0]):.1f} dB, as it was {np.median(values[1]):.1f}"
        )
    old, other, rng = [], [], np.random.default_rng(0)
    for walk in walks:
        for frame in np.flatnonzero(returning(walk.poses) >= 0)[::7].tolist():
            if (source := best_source(walk.poses, frame)) is not None:
                any_frame = int(rng.integers(len(walk.frames)))
                old.append(copied(walk, frame, source, True, view))
                other.append(copied(walk, frame, any_frame, False, view))
    print(
        f"back after {SHORTEST} to {LONGEST} frames, {len(old)} frames: the nearest pose seen 24 "
        f"to {LONGEST} frames ago {np.nanmedian(old):.1f} dB, any frame {np.median(other):.1f}"
    )


def show_tokenizer(walks: list[Recorded], world: WorldConfig) -> None:
    """What the components that the model predicts keep of a picture."""
    frames = torch.from_numpy(np.concatenate([walk.frames[::40] for walk in walks]))
    tokenizer = Tokenizer(world)
    tokenizer.fit(frames[::2], 0.0, 1.0)
    again = tokenizer.decode(tokenizer.encode(frames[None, 1::2]))[0]
    error = (frames[1::2].float() - again).square().mean()
    kept = 10 * torch.log10(255**2 / error)
    print(f"{world.channels} components of a patch of {world.patch}: {kept:.1f} dB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--walks", type=Path, required=True)
    arguments = parser.parse_args()
    world = read_recipe(arguments.recipe).world
    held_out = list(read_walks(arguments.walks, "heldout"))
    if not held_out:
        raise SystemExit(f"{arguments.walks}: got no held-out walks, expected some: run data.py")
    if (shortest := min(len(walk.frames) for walk in held_out)) < STARTS[-1] + COUNT:
        raise SystemExit(
            f"{arguments.walks}: got a held-out walk of {shortest} frames, expected "
            f"{STARTS[-1] + COUNT} or more: record them again with data.py"
        )
    show_returns("held out", held_out)
    if training := list(read_walks(arguments.walks, "train")):
        show_returns("training", training)
    show_reckoning(held_out)
    show_copies(held_out, world.view_degrees)
    show_tokenizer(held_out, world)


if __name__ == "__main__":
    main()
