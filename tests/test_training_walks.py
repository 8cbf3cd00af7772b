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
from walks import Walks

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
