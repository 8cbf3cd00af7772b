"""The training script runs from start to end on a CPU, with every recipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.worlds import tiny_episodes, tiny_world

TRAINING = Path(__file__).parents[1] / "training"
# rooms-returns has all that these have: test_a_recipe_may_say_only_what_it_does_otherwise
COVERED = {"rooms-continued", "rooms-camera"}
RECIPES = sorted(path for path in TRAINING.glob("*.json") if path.stem not in COVERED)


def train(recipe: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TRAINING / "train.py"), "--recipe", str(recipe), "--walks"]
        + [str(folder), "--out", str(folder / "run"), "--seconds", "2", "--device", "cpu"]
        + ["--tiny", "--capacity", "1000", "--enough", "1", *options],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_trains_a_tiny_model(recipe: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(TRAINING))
    from recipe import read_recipe

    world = read_recipe(recipe).world
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (120, world.image_height, world.image_width, 3), np.uint8)
    actions = rng.integers(0, 16, 120, np.uint8)
    poses = rng.normal(0, 100, (120, 3)).astype(np.float32)
    walks = {"frames": frames, "actions": actions, "poses": poses, "lengths": [60, 60]}
    np.savez(tmp_path / "train-x-000.npz", **walks)
    (tmp_path / "DONE").write_text("1 of 1 files")
    done = train(recipe, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "steps in" in done.stdout
    assert (tmp_path / "run" / "average.safetensors").exists()


def test_a_long_run_measures_its_sharpness_all_the_way() -> None:
    pytest.importorskip("cv2")
    sys.path.insert(0, str(TRAINING))
    from evaluate import gradient_energy, long_run

    world, episodes = tiny_world(), tiny_episodes(2, frames=211)
    bank = episodes.frames.flatten(0, 1)
    numbers, video = long_run(world, episodes, bank)
    assert numbers["frames"] == 207  # whole chunks after the given one
    assert video.shape[1] == 210
    parts = [video[:, first : first + 100].flatten(0, 1) for first in (3, 103, 203)]
    wanted = [float(gradient_energy(part) / gradient_energy(bank)) for part in parts]
    assert numbers["gradient_energy_by_100_frames"] == pytest.approx(wanted)
    assert numbers["cache_bytes_full"] == numbers["cache_bytes_end"]
    assert min(numbers["smallest_deviation_within"], numbers["deviation_within_frames"]) > 1


def test_copies_shifted_by_a_turn_tell_right_turns_from_wrong_ones() -> None:
    pytest.importorskip("cv2")
    sys.path.insert(0, str(TRAINING))
    from evaluate import turned_copies

    rng = np.random.default_rng(0)
    around = torch.from_numpy(rng.integers(0, 256, (1, 16, 400, 3), np.uint8)).float()
    held, at, frames = [0, 0, 0, 2, 2, 4, 1, 3, 4, 0, 2], 200, []
    for buttons in held:  # to the left the window moves left, and what it shows to the right
        at += 8 * (bool(buttons & 4) - bool(buttons & 2))
        frames.append(around[0, :, at : at + 48] + torch.randn(16, 48, 3))
    video, actions = torch.stack(frames)[None], torch.tensor([held])
    assert 44 < turned_copies(video, actions, 8) < 46  # noise of two frames, sigma 1
    assert turned_copies(video, actions ^ 6, 8) < 12
    assert turned_copies(video, actions, 7) < 12


def test_weights_on_the_way_are_kept_evenly_in_time(tmp_path: Path) -> None:
    sys.path.insert(0, str(TRAINING))
    from checkpoint import read_checkpoint
    from train import Clock, Journal, Learner

    learner = Learner(tiny_world().requires_grad_(True), 1e-3, False, 1)
    clock = SimpleNamespace(progress=0.0, elapsed=lambda: 1000 * clock.progress)
    journal = Journal(
        tmp_path, learner, cast(Any, SimpleNamespace(spans=[])), cast(Clock, clock), keep=3
    )
    there = []
    for clock.progress in (0.1, 0.26, 0.3, 0.49, 0.51, 0.52, 0.99):
        journal.note(24, {}, torch.zeros(()))
        there.append(sorted(int(path.stem[-5:]) for path in tmp_path.glob("average-*.safetensors")))
    assert there == [[], [260], [260], [260], [260, 510], [260, 510], [260, 510, 990]]
    config, state = read_checkpoint(tmp_path / "average-00510.safetensors")
    assert config == tiny_world().config
    assert state.keys() == tiny_world().state_dict().keys()


def test_an_unreadable_recording_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "train-x-000.npz").write_bytes(b"no recording")
    done = train(RECIPES[0], tmp_path)
    assert done.returncode != 0
    assert "could not be loaded" in done.stderr


def test_a_folder_without_walks_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "DONE").write_text("0 of 0 files")
    done = train(RECIPES[0], tmp_path)
    assert done.returncode != 0
    assert "run data.py" in done.stderr
