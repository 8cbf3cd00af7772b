"""Walks that come back: poses as the game makes them, and which frames should look alike."""

from __future__ import annotations

import numpy as np
import pytest

from steadykv.errors import ConfigError, NonFiniteError, ShapeError
from steadykv.evaluation.revisits import (
    NEAR,
    Revisit,
    returning,
    revisits,
    same_view,
    scripted,
    there_and_back,
    turn_poses,
)
from steadykv.game import LEFT, RIGHT

# ANGLE of ViZDoom 1.3.2 with Freedoom, two tics a frame, after each frame: standing, left for 8
# frames (the first tic of an episode is lost), right for 10, standing for 2, left for 5.
LOGGED = (
    155.87, 157.63, 161.14, 166.42, 173.45, 180.48, 187.51, 194.54, 201.57,
    194.54, 187.51, 180.48, 173.45, 166.42, 159.38, 152.35, 145.32, 138.29, 131.26,
    131.26, 131.26, 134.77, 138.29, 143.56, 150.60, 157.63,
)  # fmt: skip
HELD = [0] + 8 * [LEFT] + 10 * [RIGHT] + 2 * [0] + 5 * [LEFT]


def test_headings_are_those_of_the_simulator() -> None:
    headings = turn_poses(HELD)[:, 2]
    # From the third frame on, to be past the lost tic; the log is rounded to 0.01.
    assert headings[2:] - headings[2] == pytest.approx(np.array(LOGGED[2:]) - LOGGED[2], abs=0.011)
    assert headings[1] == pytest.approx(2 * 1.7578125)
    assert not turn_poses(HELD)[:, :2].any()


def test_frames_before_the_start_are_unknown_but_count_for_the_slow_start() -> None:
    held = [1 | LEFT] * 4 + [LEFT] * 3
    poses = turn_poses(held, start=4)
    assert np.isnan(poses[:4]).all()
    assert poses[4:, 2] == pytest.approx([7.03125, 14.0625, 21.09375])
    with pytest.raises(ConfigError, match=r"frame 3 holds FORWARD.*simulator's log"):
        turn_poses(held, start=3)
    for wrong, start in (([[2]], 0), ([2], 1), ([2], -1)):
        with pytest.raises(ShapeError, match="expected"):
            turn_poses(wrong, start)


def test_the_script_turns_there_and_back() -> None:
    assert there_and_back(7, 2).tolist() == [LEFT, LEFT, RIGHT, RIGHT, LEFT, LEFT, RIGHT]
    assert scripted([1, 2, 9], there_and_back(2, 1)).tolist() == [1, 2, 9, LEFT, RIGHT]
    for frames, sweep in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            there_and_back(frames, sweep)


def brute_force(poses: np.ndarray, window: int, chunk: int, sink: int) -> list[Revisit]:
    """By the words of the docstring, frame by frame."""
    found = []

    def apart(a: int, b: int) -> tuple[float, float]:
        turned = abs(poses[a, 2] - poses[b, 2]) % 360
        return float(np.hypot(*(poses[a, :2] - poses[b, :2]))), min(turned, 360 - turned)

    def away(a: int, b: int) -> bool:
        distance, turned = apart(a, b)
        return distance > 64 or turned > 30

    for second in range(len(poses)):
        end = second
        while (end + 1) % chunk:
            end += 1
        visible = [t for t in range(second) if t > end - window or t < sink]
        for within in (True, False):
            kind = [t for t in range(second) if (t in visible) == within]
            for first in reversed(kind):
                distance, turned = apart(first, second)
                if (
                    distance <= 1
                    and turned <= 1
                    and any(away(t, second) for t in range(first + 1, second))
                ):
                    others = [t for t in kind if away(t, second)]
                    nearest = min(others, key=lambda t: (abs(t - first), t), default=None)
                    found.append(Revisit(first, second, within, nearest))
                    break
    return found


@pytest.mark.parametrize(("window", "chunk", "sink"), [(21, 3, 0), (9, 3, 3), (40, 1, 0)])
def test_pairs_are_those_of_brute_force(window: int, chunk: int, sink: int) -> None:
    generator = np.random.default_rng(0)
    walk = turn_poses(np.concatenate([there_and_back(60, 12), there_and_back(60, 7)]), start=3)
    wander = np.cumsum(generator.integers(-1, 2, (120, 3)) * [40, 40, 20], axis=0).astype(float)
    kinds = set()
    for poses in (walk, wander):
        found = revisits(poses, window_frames=window, chunk_frames=chunk, sink_frames=sink)
        assert found == brute_force(poses, window, chunk, sink)
        kinds |= {pair.within for pair in found}
        assert all(pair.gap == pair.second - pair.first > 1 for pair in found)
    assert kinds == {True, False}


def test_a_whole_turn_comes_back_and_standing_still_does_not() -> None:
    poses = np.zeros((120, 3))
    poses[10:82, 2] = 5.0 * np.arange(72)  # once around
    found = revisits(poses, window_frames=30)
    assert all(pair.second >= 81 for pair in found)
    assert Revisit(10, 82, False, 17) in found
    assert not revisits(np.zeros((50, 3)), window_frames=21)


def test_a_return_names_the_frame_that_saw_the_view_last() -> None:
    """5 frames of a view, a way out and back that takes 70, and 3 of about the same view."""
    here, far = [(0, 0, 350)] * 5, [(500, 0, 0)] * 66
    doorway = [(60, 0, 350), (50, 0, 350)]  # not the view (48), and not away from it (64)
    poses = np.array([*here, *doorway, *far, *doorway, (-30, 0, 4), (0, 0, 5), (0, 0, 6)])
    assert returning(poses).tolist() == [-1] * 73 + [6, 6, 4, 4, -1]  # 16 degrees are another view
    assert returning(poses, (71, 71)).tolist() == [-1] * 75 + [4, -1, -1]
    assert returning(poses, (72, 80)).tolist() == [-1] * 76 + [4, -1]
    assert (returning(poses[:73]) == -1).all()
    # A glance from elsewhere, 30 frames before, makes the absence too short.
    poses[45] = poses[0]
    assert (returning(poses)[75:] == -1).all()
    assert returning(poses, (30, 40)).tolist()[-3:] == [45, 45, -1]


def test_the_same_view_is_near_in_place_and_angle() -> None:
    poses = np.array([(0, 0, 359), (0, 48, 14), (0, 49, 0), (np.nan, 0, 0)])
    expected = np.eye(4, dtype=bool)
    expected[0, 1] = expected[1, 0] = expected[1, 2] = expected[2, 1] = True
    expected[3, 3] = False  # nobody knows
    assert (same_view(poses) == expected).all()
    assert (same_view(poses, (49.0, 15.0))[:3, :3] == np.ones((3, 3))).all()
    assert NEAR == (48.0, 15.0)
    with pytest.raises(ShapeError, match="expected \\[T, 3\\]"):
        same_view(poses[0])


def test_what_means_nothing_is_refused() -> None:
    poses = np.zeros((5, 3))
    for wrong in (np.zeros((5, 2)), np.zeros(5)):
        with pytest.raises(ShapeError, match="expected \\[T, 3\\]"):
            revisits(wrong, window_frames=3)
    poses[2, 0] = np.inf
    with pytest.raises(NonFiniteError, match="poses hold inf"):
        revisits(poses, window_frames=3)
    with pytest.raises(ConfigError, match="larger distances"):
        revisits(poses[:2], window_frames=3, near=(70.0, 1.0))
    with pytest.raises(ConfigError, match="window of at least a chunk"):
        revisits(poses[:2], window_frames=2, chunk_frames=3)
