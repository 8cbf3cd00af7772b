"""Walks in memory, and the poses that are told of their sequences."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from own_walks import OwnWalks
from train import replace_last
from walks import CANDIDATES, Walks, comes_back

from steadykv.world.pose import walk_poses
from tests.worlds import TINY, tiny_world

LENGTH = 12


def recorded(folder: Path) -> None:
    """Two walks whose frames and simulator's poses both say where in the file they are."""
    rng = np.random.default_rng(0)
    count = 2 * LENGTH
    shape = (count, TINY.image_height, TINY.image_width, 3)
    frames = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], shape)
    actions = rng.integers(0, 8, count, np.uint8)
    poses = np.repeat(np.arange(count, dtype=np.float32)[:, None], 3, 1)
    np.savez(folder / "train-houses-000.npz", frames=frames, actions=actions, poses=poses,
             lengths=[LENGTH, LENGTH])  # fmt: skip
    (folder / "DONE").write_text("1 of 1 files")


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_share_of_the_sequences_is_told_the_simulators_poses(
    share: float, tmp_path: Path
) -> None:
    recorded(tmp_path)
    walks = Walks(tmp_path, "cpu", 2 * LENGTH, TINY, share)
    walks.wait(2)
    frames, actions, poses = walks.sample(500, 7, np.random.default_rng(1))
    true = frames[..., 0, 0, 0].float()
    simulated = (poses == true[..., None]).flatten(1).all(1)
    assert float(simulated.float().mean()) == pytest.approx(share, abs=0.07)
    assert torch.equal(poses[~simulated], walk_poses(actions)[~simulated])


def there_and_back(aside: float) -> np.ndarray:
    """300 poses: a view in frames 100 to 104 that comes back 70 frames later, so far aside."""
    poses = np.zeros((300, 3), np.float32)
    poses[:, 0] = 1000 * np.arange(300)
    poses[100:105, 0] = poses[170:175, 0] = np.arange(100, 105)
    poses[170:175, 1] = aside
    return poses


def test_views_come_back_from_aside() -> None:
    seen = comes_back(there_and_back(20.0))
    assert np.flatnonzero(seen >= 0).tolist() == list(range(170, 175))
    assert set(seen[170:175]) <= set(range(100, 105))
    assert (comes_back(there_and_back(2.0)) == -1).all()  # needs no parallax
    assert (comes_back(there_and_back(60.0)) == -1).all()  # is another view


def test_a_share_of_the_sequences_is_chosen_for_what_comes_back(tmp_path: Path) -> None:
    """Those that hold both the view and its return, of the one walk that returns from aside."""
    lengths, shape = [300, 300], (600, TINY.image_height, TINY.image_width, 3)
    poses = np.concatenate((there_and_back(2.0), there_and_back(20.0)))
    frames = np.zeros(shape, np.uint8)
    frames[:, 0, 0, 0], frames[:, 0, 0, 1] = np.divmod(np.arange(600), 256)
    np.savez(tmp_path / "train-houses-000.npz", frames=frames, actions=np.zeros(600, np.uint8),
             poses=poses, lengths=lengths)  # fmt: skip
    (tmp_path / "DONE").write_text("1 of 1 files")

    def found(share: float) -> float:
        walks = Walks(tmp_path, "cpu", 600, TINY, 0.0, share)
        walks.wait(2)
        frames, _, _ = walks.sample(2000, 80, np.random.default_rng(1))
        first = frames[:, 0, 0, 0, 0].int() * 256 + frames[:, 0, 0, 0, 1].int() - 300
        # its last return is frame 174 at most, its first one needs a view of frame 104 at least
        return float(((first <= 104) & (first + 80 > 170) & (first >= 0)).float().mean())

    base = found(0.0)
    assert base == pytest.approx(14 / 442, abs=0.015)
    best = 1 - (1 - base) ** CANDIDATES
    assert found(1.0) == pytest.approx(best, abs=0.04)
    assert found(0.5) == pytest.approx((base + best) / 2, abs=0.04)


def test_own_rollouts_keep_the_poses_that_they_were_told(tmp_path: Path) -> None:
    recorded(tmp_path)
    walks = Walks(tmp_path, "cpu", 2 * LENGTH, TINY, 1.0)
    walks.wait(2)
    own, rng = OwnWalks(tiny_world(), "cpu", 4), np.random.default_rng(1)
    weights = dict(tiny_world().named_parameters())
    own.refresh(weights, walks, rng, 3, 9)
    made, true = own.sample(3, 6, rng)
    assert made.shape == true.frames.shape
    assert torch.equal(true.poses[..., 0], true.frames[..., 0, 0, 0].float())
    others = walks.sample(5, 6, rng)
    before = [part.clone() for part in others]
    replace_last(others, true)
    for part, old, new in zip(others, before, true, strict=True):
        assert torch.equal(part[:2], old[:2])
        assert torch.equal(part[2:], new)
