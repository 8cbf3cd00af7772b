"""Poses reckoned from buttons: the game's steps in closed form, and what the model sees of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from steadykv.errors import ConfigError, ShapeError
from steadykv.game import FORWARD, LEFT, PATCH_TURN_DEGREES, RIGHT, TICS_PER_FRAME
from steadykv.world import WorldModel, rollout
from steadykv.world.pose import (
    BLOCK,
    FRICTION,
    THRUST,
    WAVELENGTHS,
    PoseFeatures,
    moved_poses,
    walk_poses,
)
from tests.plain_cache import PlainCache
from tests.worlds import TINY, tiny_episodes, tiny_world

SEEING = dataclasses.replace(TINY, view_degrees=90.0)


def stepped(actions: list[int]) -> list[tuple[float, float, float]]:
    """As the game does it: turn, push, move, lose speed; tic after tic."""
    x = y = heading = speed_x = speed_y = 0.0
    poses = []
    for buttons in actions:
        for _ in range(TICS_PER_FRAME):
            heading += PATCH_TURN_DEGREES * (bool(buttons & LEFT) - bool(buttons & RIGHT))
            if buttons & FORWARD:
                speed_x += THRUST * math.cos(math.radians(heading))
                speed_y += THRUST * math.sin(math.radians(heading))
            x, y = x + speed_x, y + speed_y
            speed_x, speed_y = speed_x * FRICTION, speed_y * FRICTION
        poses.append((x, y, heading))
    return poses


def test_poses_are_those_of_the_game_step_by_step() -> None:
    generator = torch.Generator().manual_seed(0)
    actions = torch.randint(0, 16, (3, BLOCK + 300), generator=generator, dtype=torch.uint8)
    got = walk_poses(actions)
    want = torch.tensor([stepped(row) for row in actions.tolist()], dtype=torch.float64)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-3)
    assert want[..., :2].abs().max() > 300
    assert (want[:, BLOCK - 1, :2] - want[:, BLOCK, :2]).norm(dim=-1).max() > 5  # on the move
    # the beginning of a walk does not depend on its end
    assert torch.equal(walk_poses(actions[:, :40]), got[:, :40])
    assert walk_poses(actions[:, :0]).shape == (3, 0, 3)


def test_a_running_walker_slides_on_and_stops() -> None:
    poses = walk_poses(torch.tensor([[FORWARD] * 60 + [0] * 120]))[0]
    steps = poses[:, 0].diff()
    full = TICS_PER_FRAME * THRUST / (1 - FRICTION)
    assert steps[50] == pytest.approx(full, rel=0.01)
    assert 0 < steps[61] < full
    assert steps[-1] == pytest.approx(0, abs=1e-3)
    assert not poses[:, 1:].any()


def test_moved_walks_keep_their_shape() -> None:
    actions = torch.randint(0, 16, (4, 50), generator=torch.Generator().manual_seed(1))
    poses = walk_poses(actions)
    moved = moved_poses(poses, torch.Generator().manual_seed(2))
    for one in (poses, moved):
        assert one.shape == (4, 50, 3)
    steps, other = (p[..., :2].diff(dim=1).double() for p in (poses, moved))
    assert torch.allclose(steps.norm(dim=-1), other.norm(dim=-1), atol=1e-2)
    assert torch.allclose(poses[..., 2].diff(dim=1), moved[..., 2].diff(dim=1), atol=1e-3)
    # a step points where it did relative to the heading
    turned = torch.deg2rad(moved[:, 0, 2] - poses[:, 0, 2]).double()[:, None]
    x = steps[..., 0] * turned.cos() - steps[..., 1] * turned.sin()
    assert torch.allclose(x, other[..., 0], atol=1e-2)
    assert len({round(float(v), 3) for v in moved[:, 0, 2]}) == 4


def test_features_of_a_direction_move_with_the_turn_and_repeat() -> None:
    torch.manual_seed(0)
    features = PoseFeatures(SEEING)
    columns, rows = SEEING.columns, SEEING.rows
    width = SEEING.view_degrees / columns
    ahead, left = (
        features(torch.tensor([[[5.0, 7.0, heading]]]))[0, 0].view(rows, columns, -1)
        for heading in (30.0, 30.0 + width)
    )
    # after a left turn by one column, what was seen in column c is seen in column c + 1
    assert torch.allclose(ahead[:, :-1], left[:, 1:], atol=1e-4)
    assert not torch.allclose(ahead[:, 0], ahead[:, 1], atol=1e-2)
    assert torch.equal(ahead[0], ahead[-1])  # rows are told apart by the model's own table
    around = features(torch.tensor([[[5.0, 7.0, 390.0]]]))[0, 0].view(rows, columns, -1)
    assert torch.allclose(ahead, around, atol=1e-4)
    # 1,024 units along x are whole waves along x and y, but not along the diagonals
    far = features(torch.tensor([[[5.0 + max(WAVELENGTHS), 7.0, 30.0]]]))[0, 0]
    assert not torch.allclose(far.view(rows, columns, -1), ahead, atol=1e-2)


def test_the_video_of_a_seeing_world_depends_on_where_it_looks() -> None:
    world, episodes = tiny_world(SEEING), tiny_episodes(1, config=SEEING)

    def video() -> torch.Tensor:
        cache = PlainCache(2, TINY.window_frames * TINY.frame_tokens, torch.float32)
        return rollout(world, episodes, cache, 9, cache_dtype=torch.float32)

    first, again = video(), video()
    assert torch.equal(first, again)
    assert world.pose is not None
    world.pose.embed.weight.data.zero_()
    assert not torch.equal(video(), first)


def test_a_seeing_world_asks_for_poses() -> None:
    world = WorldModel(SEEING)
    shape = (1, 3, SEEING.frame_tokens, SEEING.channels)
    with pytest.raises(ShapeError, match=r"poses: got none, expected \[B,F,3\]"):
        world(torch.zeros(shape), torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.long),
              lambda *_: torch.zeros(1), (torch.zeros(1), torch.zeros(1)))  # fmt: skip


@pytest.mark.parametrize("degrees", [-1.0, 361.0, float("nan")])
def test_impossible_views_are_refused(degrees: float) -> None:
    with pytest.raises(ConfigError, match="view_degrees"):
        dataclasses.replace(TINY, view_degrees=degrees)
