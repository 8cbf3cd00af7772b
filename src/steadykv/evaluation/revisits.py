"""Walks that turn around and come back, and which of their frames should look the same.

A frame's pose is its place and heading. Poses come from a simulator's log, or, for walks that only
turn, from the buttons: the embedded world's are those of ViZDoom at two tics a frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steadykv.errors import ConfigError, NonFiniteError, ShapeError
from steadykv.game import FORWARD, LEFT, RIGHT, TICS_PER_FRAME

TURN_DEGREES = 640 * 360 / 65536
"""A tic of held turning; the game's angles have 65,536 steps."""
SLOW_TICS = 5
"""The first tics of a held turn go half as far; changing sides does not start them anew."""

NEAR, AWAY = (48.0, 15.0), (64.0, 30.0)
"""Map units and degrees: up to NEAR two poses of a walk through a simulator show the same view,
beyond AWAY the walker has left it."""
UNSEEN = (math.inf, 75.0)
"""A picture of 90 degrees shows next to nothing of what one turned away by more than that shows,
wherever it stands. Within these limits a frame may show some of a view; it need not."""
RETURN_FRAMES = (60, 110)
"""How long ago a view was last seen that a walk returns to, at least and at most."""


def there_and_back(frames: int, sweep: int) -> NDArray[np.uint8]:
    """Buttons [frames]: turn left for `sweep` frames, right for as many, and again until the end.

    24 frames at full rate are 169 degrees. Raises ConfigError for counts below 1.
    """
    if frames < 1 or sweep < 1:
        raise ConfigError(f"got {frames} frames in sweeps of {sweep}; expected at least 1 of both")
    turns = np.arange(frames) // sweep % 2
    return np.where(turns == 0, LEFT, RIGHT).astype(np.uint8)


def turn_poses(actions: ArrayLike, start: int = 0) -> NDArray[np.float64]:
    """Poses [T, 3] (x, y, heading in degrees, left positive) of a walk that only turns.

    `actions` [T] are bit masks of the buttons held before each frame. Frames before `start` have
    unknown poses (NaN), since their place may change; from there on the place is (0, 0), and the
    heading is counted from the frame before. The turn of all held frames counts for the slow start,
    those before `start` too. A walker that has run slides on for about 16 frames: begin after them.
    Raises ConfigError if a frame from `start` on holds FORWARD: only a log knows the place then.
    """
    held = np.asarray(actions)
    if held.ndim != 1 or not 0 <= start < len(held):
        raise ShapeError(
            f"actions have shape {held.shape}, start is {start}; expected [T] and a frame of it"
        )
    walks = np.flatnonzero(held[start:] & FORWARD)
    if len(walks):
        raise ConfigError(
            f"frame {start + int(walks[0])} holds FORWARD; expected turns alone from frame {start} "
            "on: take the poses from the simulator's log"
        )
    poses = np.zeros((len(held), 3))
    poses[:start] = np.nan
    heading, tics = 0.0, 0
    for frame, buttons in enumerate(held.tolist()):
        side = bool(buttons & LEFT) - bool(buttons & RIGHT)
        for _ in range(TICS_PER_FRAME):
            tics = tics + 1 if buttons & (LEFT | RIGHT) else 0
            if frame >= start:
                heading += side * TURN_DEGREES / (2 if tics <= SLOW_TICS else 1)
        poses[frame, 2] = np.nan if frame < start else heading
    return poses


@dataclass(frozen=True)
class Revisit:
    """Frame `second` stands where `first` stood and looks the same way; it had left in between.

    within: `first` was still attended to when `second` was generated. control: a frame about as old
    as `first`, attended to or not as it was, that looked elsewhere; None where there is none. What
    makes the revisit alike but not the control is memory; what makes both alike is a video that has
    gone dull.
    """

    first: int
    second: int
    within: bool
    control: int | None

    @property
    def gap(self) -> int:
        """Frames between the two visits."""
        return self.second - self.first


def revisits(
    poses: ArrayLike,
    *,
    window_frames: int,
    chunk_frames: int = 1,
    sink_frames: int = 0,
    near: tuple[float, float] = (1.0, 1.0),
    away: tuple[float, float] = (64.0, 30.0),
) -> list[Revisit]:
    """For every frame the latest earlier visit of its pose within the window, and that beyond.

    `poses` [T, 3]: x, y in any unit and heading in degrees, NaN where unknown. Two poses are the
    same up to `near` (distance, degrees); a walker has left when either exceeds `away`. A frame
    attends to the `window_frames` that end with its chunk of `chunk_frames`, the first
    `sink_frames` always among them. Pairs come in the order of their second frame. Allocates
    a few arrays of T x T. Raises ShapeError, NonFiniteError for infinite poses, ConfigError if
    `away` does not exceed `near` or the window is shorter than a chunk.
    """
    distance, turned = _apart(poses)
    if not (0 <= near[0] < away[0] and 0 <= near[1] < away[1]):
        raise ConfigError(f"near is {near}, away {away}; expected larger distances to be away")
    if not 1 <= chunk_frames <= window_frames or sink_frames < 0:
        raise ConfigError(
            f"window_frames is {window_frames}, chunk_frames {chunk_frames}, sink_frames "
            f"{sink_frames}; expected a window of at least a chunk of at least one frame"
        )
    same = (distance <= near[0]) & (turned <= near[1])  # NaN compares as False
    left = (distance > away[0]) | (turned > away[1])
    found = []
    for second in range(len(distance)):
        oldest = (second // chunk_frames + 1) * chunk_frames - window_frames
        earlier = np.arange(second)
        seen = (earlier >= oldest) | (earlier < sink_frames)
        departures = earlier[left[second, :second]]
        if not len(departures):
            continue
        visits = same[second, :second] & (earlier < departures[-1])
        for within in (True, False):
            candidates = earlier[visits & (seen == within)]
            if len(candidates):
                first = int(candidates[-1])
                others = departures[seen[departures] == within]
                found.append(Revisit(first, second, within, _closest(others, first)))
    return found


def returning(poses: ArrayLike, frames_ago: tuple[int, int] = RETURN_FRAMES) -> NDArray[np.int64]:
    """Of each frame that shows a view left so long ago: the frame that saw it last; -1 of others.

    `poses` [T, 3] as in `revisits`, with NEAR and AWAY; `frames_ago`: at least and at most. A view
    that was seen and left again more recently is no return. Returns int64 [T].
    """
    shortest, longest = frames_ago
    seen = np.full(len(np.asarray(poses)), -1)
    for pair in revisits(poses, window_frames=shortest, near=NEAR, away=AWAY):
        seen[pair.second] = max(seen[pair.second], pair.first)
    gap = np.arange(len(seen)) - seen
    return np.where((seen >= 0) & (gap >= shortest) & (gap <= longest), seen, -1)


def same_view(poses: ArrayLike, limit: tuple[float, float] = NEAR) -> NDArray[np.bool_]:
    """Which frames of `poses` [T, 3] are within `limit` of which: bool [T, T].

    `limit`: distance and degrees, as `near` of `revisits`, whose errors of poses it raises.
    """
    distance, turned = _apart(poses)
    return (distance <= limit[0]) & (turned <= limit[1])


def _apart(poses: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distances and angles, 0 to 180 degrees, between all poses [T, 3]: both [T, T]."""
    places = np.asarray(poses, dtype=np.float64)
    if places.ndim != 2 or places.shape[1] != 3:
        raise ShapeError(f"poses have shape {places.shape}; expected [T, 3]: x, y, heading")
    if np.isinf(places).any():
        raise NonFiniteError("poses hold inf; expected numbers, or NaN where a pose is unknown")
    distance = np.hypot(*(places[:, None, :2] - places[None, :, :2]).transpose(2, 0, 1))
    turned = np.abs((places[:, None, 2] - places[None, :, 2] + 180.0) % 360.0 - 180.0)
    return distance, turned


def _closest(frames: NDArray[np.int64], wanted: int) -> int | None:
    """The frame nearest to `wanted`, the earlier of two; None of none."""
    return int(frames[np.abs(frames - wanted).argmin()]) if len(frames) else None


def scripted(actions: Sequence[int] | NDArray[np.uint8], script: ArrayLike) -> NDArray[np.uint8]:
    """The actions of an episode's true first frames, then `script` instead of the recorded ones."""
    joined = np.concatenate([np.asarray(actions), np.asarray(script)])
    return joined.astype(np.uint8)
