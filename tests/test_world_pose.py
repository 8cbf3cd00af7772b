"""Poses reckoned from buttons: the game's steps in closed form, and what the model sees of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from steadykv.errors import ConfigError, ShapeError
from steadykv.game import FORWARD, LEFT, PATCH_TURN_DEGREES, RIGHT, TICS_PER_FRAME
from steadykv.world import Episodes, WorldConfig, WorldModel, rollout
from steadykv.world.pose import (
    BLOCK,
    FRICTION,
    THRUST,
    WAVELENGTHS,
    PoseFeatures,
    moved_poses,
    turned,
    view_table,
    walk_poses,
)
from steadykv.world.rope import rope_table
from tests.plain_cache import PlainCache
from tests.worlds import TINY, tiny_episodes, tiny_world

SEEING = dataclasses.replace(TINY, view_degrees=90.0)
TURNING = dataclasses.replace(SEEING, rope_dims=(4, 4, 0), view_dims=(16, 8))


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


def test_a_given_camera_takes_the_place_of_the_buttons() -> None:
    world, episodes = tiny_world(SEEING), tiny_episodes(2, config=SEEING)

    def video(walks: Episodes) -> torch.Tensor:
        cache = PlainCache(2, TINY.window_frames * TINY.frame_tokens, torch.float32)
        return rollout(world, walks, cache, 9, cache_dtype=torch.float32)

    told = dataclasses.replace(episodes, poses=walk_poses(episodes.actions)).with_camera()
    plain = video(episodes)
    assert torch.equal(video(told), plain)  # the same as it reckons itself
    assert told.camera is not None
    moved = told.camera + torch.tensor([300.0, 0.0, 30.0])
    other = video(dataclasses.replace(told, camera=moved))
    assert not torch.equal(other, plain)
    alone = video(dataclasses.replace(told, camera=moved).select([1]))
    assert torch.equal(alone, other[1:])  # a row keeps its own
    with pytest.raises(ConfigError, match="camera: got walks without poses"):
        episodes.with_camera()
    for bad in (
        told.camera[:1],
        told.camera[:, :5],
        told.camera[..., :2],
        told.camera[0],
        moved.log(),
    ):
        with pytest.raises(ConfigError, match="expected finite poses"):
            video(dataclasses.replace(told, camera=bad))
    cache = PlainCache(2, TINY.window_frames * TINY.frame_tokens, torch.float32)
    with pytest.raises(ConfigError, match="view_degrees 0"):
        rollout(tiny_world(), told, cache, 9)


def test_a_seeing_world_asks_for_poses() -> None:
    world = WorldModel(SEEING)
    shape = (1, 3, SEEING.frame_tokens, SEEING.channels)
    with pytest.raises(ShapeError, match="sight: got none, expected that of the frames' poses"):
        world(torch.zeros(shape), torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.long),
              lambda *_: torch.zeros(1), (torch.zeros(1), torch.zeros(1)))  # fmt: skip


def logits(q: torch.Tensor, query: list[float], k: torch.Tensor, key: list[float]) -> torch.Tensor:
    """Of every token of a frame seen from pose `query` with every token of one from `key`."""
    tables = [view_table(TURNING, torch.tensor([[pose]])) for pose in (query, key)]
    return torch.einsum("bshd,bthd->st", turned(q, tables[0]), turned(k, tables[1]))


def test_what_a_query_finds_depends_on_how_it_stands_to_the_key_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    shape = (1, TURNING.frame_tokens, 1, TURNING.head_dim)
    q, k = torch.randn(2, *shape, generator=generator).unbind()
    found = logits(q, [10.0, 20.0, 30.0], k, [40.0, -60.0, 75.0])
    moved = logits(q, [310.0, 520.0, 390.0], k, [340.0, 440.0, 75.0])
    torch.testing.assert_close(moved, found, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(logits(q, [10.0, 20.0, 37.5], k, [40.0, -60.0, 75.0]), found)
    assert not torch.allclose(logits(q, [90.0, 20.0, 30.0], k, [40.0, -60.0, 75.0]), found)


def test_keys_of_the_same_place_and_direction_are_found_first() -> None:
    """With one vector everywhere, rotation alone says where to look; rows look alike."""
    config, columns = TURNING, TURNING.columns
    width = config.view_degrees / columns
    one = torch.ones(1, config.frame_tokens, 1, config.head_dim)
    here = [100.0, 200.0, 0.0]
    # two columns to the left: what was in column c is in column c + 2
    found = logits(one, [100.0, 200.0, 2 * width], one, here)
    first = found.view(config.rows, columns, config.rows, columns)[0, :, 0]
    assert first[2:].argmax(-1).tolist() == list(range(columns - 2))
    elsewhere = logits(one, [100.0, 200.0, 2 * width], one, [400.0, 200.0, 0.0])
    assert (elsewhere.view(config.rows, columns, config.rows, columns)[0, 2:, 0].amax(-1)
            < first[2:].amax(-1)).all()  # fmt: skip


def test_the_rest_of_a_head_keeps_still() -> None:
    x = torch.randn(2, 2 * TURNING.frame_tokens, 3, TURNING.head_dim)
    poses = walk_poses(torch.tensor([[2, 3], [4, 5]]))
    out = turned(x.bfloat16(), view_table(TURNING, poses))
    assert out.dtype is torch.bfloat16
    assert torch.equal(out[..., :8], x.bfloat16()[..., :8])
    assert not torch.equal(out[..., 8:], x.bfloat16()[..., 8:])
    assert not torch.equal(*view_table(TURNING, poses)[0].unbind())  # rows of a batch differ
    for part, value in zip(rope_table(TURNING, 3, 2, "cpu"), (1.0, 0.0), strict=True):
        assert (part[:, 4:] == value).all()  # and the embedding of frames leaves theirs alone
    cosine, _ = view_table(TURNING, poses.double() + torch.tensor([0.0, 0.0, 720.0]))
    torch.testing.assert_close(cosine, view_table(TURNING, poses)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "bad",
    [
        {"view_degrees": 0.0},
        {"view_dims": (12, 12)},
        {"view_dims": (24, 8)},
        {"rope_dims": (-4, 12, 0)},
        {"view_dims": (24,)},
    ],
)
def test_impossible_shares_of_a_head_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="view_dims: got"):
        dataclasses.replace(TURNING, **bad)
    assert WorldConfig.from_dict(TURNING.to_dict()) == TURNING


@pytest.mark.parametrize("degrees", [-1.0, 361.0, float("nan")])
def test_impossible_views_are_refused(degrees: float) -> None:
    with pytest.raises(ConfigError, match="view_degrees"):
        dataclasses.replace(TINY, view_degrees=degrees)
