"""The world model: what training computes and what a rollout computes are the same function."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from steadykv.cache import KVCache
from steadykv.config import preset
from steadykv.errors import ConfigError, NonFiniteError, ShapeError
from steadykv.world import Episodes, WorldConfig, WorldModel, rollout
from steadykv.world.pose import walk_poses
from steadykv.world.rope import apply_rope, rope_table
from steadykv.world.sampler import CachedAttention, KeyRope, row_noise
from tests.plain_cache import PlainCache

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

SMALL = WorldConfig(
    num_layers=2,
    width=64,
    hidden_width=96,
    image_height=16,
    image_width=24,
    patch=8,
    channels=40,
    window_frames=9,
)


def small_world(config: WorldConfig = SMALL) -> WorldModel:
    """A model with random weights everywhere, its gates and head open."""
    world = WorldModel(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in world.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    world.tokenizer.fit(small_episodes(20).frames.flatten(0, 1), 0.5, 1.5)
    return world.eval()


def small_episodes(rows: int = 2, actions: int = 30) -> Episodes:
    generator = torch.Generator().manual_seed(5)
    return Episodes(
        torch.randint(0, 256, (rows, 3, 16, 24, 3), generator=generator, dtype=torch.uint8),
        torch.randint(0, 16, (rows, actions), generator=generator, dtype=torch.uint8),
        tuple(f"row-{i}" for i in range(rows)),
    )


@pytest.mark.parametrize(
    ("key_rope", "sink", "view"),
    [
        ("post", 0, {}),
        ("pre", 0, {"view_degrees": 90.0}),
        ("post", 3, {"view_degrees": 90.0, "rope_dims": (24, 36, 0), "view_dims": (36, 32)}),
        ("pre", 3, {"view_degrees": 90.0, "rope_dims": (20, 20, 20), "view_dims": (36, 32)}),
        ("pre", 3, {}),
    ],
)
@torch.no_grad()
def test_training_forward_equals_cached_passes(
    key_rope: KeyRope, sink: int, view: dict[str, Any]
) -> None:
    from losses import ForcedAttention, predict

    config, frames = dataclasses.replace(SMALL, sink_frames=sink, **view), 15
    world = small_world(config)
    generator = torch.Generator().manual_seed(1)
    shape = (2, frames, config.frame_tokens, config.channels)
    history, noisy = (torch.randn(shape, generator=generator) for _ in range(2))
    history_times, times = (torch.rand(2, frames, generator=generator) for _ in range(2))
    actions = torch.randint(0, 16, (2, frames), generator=generator)
    poses = walk_poses(actions)
    cosine, sine = rope_table(config, 0, frames, "cpu")
    want = predict(
        world,
        history,
        history_times,
        noisy,
        times,
        actions,
        poses,
        ForcedAttention(config, frames, "cpu"),
        (torch.cat((cosine, cosine)), torch.cat((sine, sine))),
    )

    cache = KVCache(
        config.num_layers,
        config.num_heads,
        config.head_dim,
        config.frame_tokens,
        preset("bf16", window_frames=config.window_frames, sink_frames=sink),
        layout="BSHD",
        dtype=torch.float32,
    )
    attend = CachedAttention(config, cache, "math", key_rope, torch.float32)
    for chunk in range(frames // 3):
        span = slice(3 * chunk, 3 * chunk + 3)
        attend.start = 3 * chunk * config.frame_tokens
        rope = rope_table(config, 3 * chunk, 3, "cpu")
        given = actions[:, span], attend, rope, world.sight(poses[:, span])
        got = world(noisy[:, span], times[:, span], *given)
        world(history[:, span], history_times[:, span], *given)
        cache.commit()
        torch.testing.assert_close(got, want[:, span], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rows_of_a_training_step_have_windows_of_their_own() -> None:
    from losses import ForcedAttention, predict

    world, frames, windows = small_world(), 15, (6, 9)
    generator = torch.Generator().manual_seed(1)
    shape = (2, frames, SMALL.frame_tokens, SMALL.channels)
    history, noisy = (torch.randn(shape, generator=generator) for _ in range(2))
    times = torch.rand(2, frames, generator=generator)
    actions = torch.randint(0, 16, (2, frames), generator=generator)
    cosine, sine = rope_table(SMALL, 0, frames, "cpu")
    table = torch.cat((cosine, cosine)), torch.cat((sine, sine))

    def predicted(attend: ForcedAttention) -> torch.Tensor:
        given = actions, walk_poses(actions), attend, table
        return predict(world, history, times, noisy, times, *given)

    mixed = predicted(ForcedAttention(SMALL, frames, "cpu", windows))
    for row, window in enumerate(windows):
        config = dataclasses.replace(SMALL, window_frames=window)
        alone = predicted(ForcedAttention(config, frames, "cpu"))
        torch.testing.assert_close(mixed[row], alone[row], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(mixed[1 - row, 9:], alone[1 - row, 9:], atol=1e-3)


@pytest.mark.parametrize(("frames", "windows"), [(66, ()), (66, (6, 9, 66)), (64 * 3, ())])
def test_the_sparse_mask_is_that_of_pytorch(frames: int, windows: tuple[int, ...]) -> None:
    """Lengths that are a whole number of blocks and that are not."""
    from losses import BLOCK, block_mask, visibility
    from torch.nn.attention.flex_attention import create_block_mask

    length, rows = 2 * frames * SMALL.frame_tokens, len(windows) or 1
    assert (length % BLOCK == 0) == (frames == 64 * 3)
    config = dataclasses.replace(SMALL, window_frames=60)
    visible = visibility(config, frames, "cpu", windows)
    want = create_block_mask(visible, rows, None, length, length, device="cpu")
    got = block_mask(visible, rows, length, "cpu")
    assert got.shape == want.shape
    for part in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
                 "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):  # fmt: skip
        assert torch.equal(getattr(got, part), getattr(want, part)), part
    assert want.full_kv_num_blocks is not None
    assert want.full_kv_num_blocks.any()


def test_keys_before_and_after_rope_give_the_same_video() -> None:
    world, episodes = small_world(), small_episodes()
    places: list[KeyRope] = ["post", "pre"]
    videos = [
        rollout(
            world,
            episodes,
            PlainCache(2, SMALL.window_frames * SMALL.frame_tokens, torch.float32),
            15,
            key_rope=key_rope,
            cache_dtype=torch.float32,
        )
        for key_rope in places
    ]
    assert (videos[0].int() - videos[1].int()).abs().max() <= 1
    assert videos[0][:, 3:].float().std() > 1


@pytest.mark.parametrize("key_rope", ["post", "pre"])
def test_kvquant_packs_keys_before_and_after_rope(key_rope: KeyRope) -> None:
    """Its ranges of channels are meant for keys before RoPE; both frames have to work."""
    world, episodes = small_world(), small_episodes(2)
    videos, caches = [], []
    for name in ("bf16", "kvquant"):
        shape = (SMALL.num_layers, SMALL.num_heads, SMALL.head_dim, SMALL.frame_tokens)
        caches.append(KVCache(*shape, preset(name)))
        videos.append(rollout(world, episodes, caches[-1], 15, key_rope=key_rope))
    ledger = caches[1].ledger()
    assert ledger.dense_tokens == 0
    assert ledger.bits_per_element == preset("kvquant").bits_per_element(
        2, SMALL.num_heads, 3 * SMALL.frame_tokens, SMALL.head_dim
    )
    # The given frames are the same in both runs, and so is what the first layer makes of them.
    given = slice(0, 3 * SMALL.frame_tokens)
    for exact, packed in zip(caches[0][0].read(), caches[1][0].read(), strict=True):
        x = exact[:, given].float()
        error = (x - packed[:, given].float()).square().mean() / x.square().mean()
        assert 1e-3 < float(error) < 0.2
    exact, packed = (video[:, 3:].float() for video in videos)
    assert 1 < float((exact - packed).square().mean()) < 0.1 * float(exact.var())


def test_rollout_depends_on_seed_and_row_but_not_on_the_batch() -> None:
    world, episodes = small_world(), small_episodes(3)
    window = SMALL.window_frames * SMALL.frame_tokens
    before = torch.random.get_rng_state()
    whole = rollout(world, episodes, PlainCache(2, window), 12, seeds=[7, 7, 8])
    alone = rollout(world, episodes.select([1]), PlainCache(2, window), 12, seeds=7)
    other = rollout(world, episodes.select([1]), PlainCache(2, window), 12, seeds=9)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (whole[1].int() - alone[0].int()).abs().max() <= 1
    assert (other[0, 3:].int() - alone[0, 3:].int()).abs().max() > 3
    assert torch.equal(whole[:, :3], episodes.frames)


def longer(episodes: Episodes, frames: int) -> Episodes:
    """The same rows with `frames` true frames, of which the first are the same."""
    generator = torch.Generator().manual_seed(11)
    shape = (len(episodes), frames - episodes.frames.shape[1], *episodes.frames.shape[2:])
    more = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return dataclasses.replace(episodes, frames=torch.cat((episodes.frames, more), 1))


@torch.no_grad()
def by_hand(
    world: WorldModel, episodes: Episodes, cache: PlainCache, frames: int, seed: int
) -> torch.Tensor:
    """What `rollout` shall do: commit the true chunks one by one, then denoise and commit."""
    config, names = world.config, episodes.names
    attend = CachedAttention(config, cache, "sdpa", "post")
    seeds, shape = [seed] * len(names), (3, config.frame_tokens, config.channels)
    chunks = list(episodes.frames.split(3, 1))
    true = len(chunks)
    for chunk in range(true + frames // 3):
        attend.start = chunk * 3 * config.frame_tokens
        table = rope_table(config, 3 * chunk, 3, "cpu")
        held = episodes.actions[:, 3 * chunk : 3 * chunk + 3].long()

        def network(x: torch.Tensor, time: float, held: Any = held, table: Any = table) -> Any:
            return world(x, torch.full(x.shape[:2], time), held, attend, table)

        if chunk >= true:
            x = row_noise(seeds, names, chunk, "start", shape)
            for time, following in ((0.0, 0.4), (0.4, 0.75), (0.75, 1.0)):
                clean = network(x, time)
                x = x + (following - time) / (1 - time) * (clean - x)
            chunks.append(world.tokenizer.decode(clean))
        clean = world.tokenizer.encode(chunks[chunk])
        noise = row_noise(seeds, names, chunk, "commit", shape)
        network(config.commit_time * clean + (1 - config.commit_time) * noise, config.commit_time)
        cache.commit()
    return torch.cat(chunks, 1)


@pytest.mark.parametrize("true_frames", [3, 6, 15])
def test_true_frames_are_committed_chunk_by_chunk_as_by_hand(true_frames: int) -> None:
    """With 15 the window of 9 slides while the true frames go in."""
    world, episodes = small_world(), longer(small_episodes(), true_frames)
    window, calls = SMALL.window_frames * SMALL.frame_tokens, list[tuple[int, int]]()
    caches = PlainCache(2, window), PlainCache(2, window)
    got = rollout(
        world, episodes, caches[0], 9, 4, on_chunk=lambda done, total: calls.append((done, total))
    )
    assert torch.equal(got, by_hand(world, episodes, caches[1], 9, 4))
    assert torch.equal(got[:, :true_frames], episodes.frames)
    assert calls == [(1, 3), (2, 3), (3, 3)]
    for layer in range(2):
        for one, other in zip(*(cache[layer].read() for cache in caches), strict=True):
            assert torch.equal(one, other)


def test_more_true_frames_change_what_is_generated() -> None:
    world, episodes = small_world(), longer(small_episodes(), 6)
    other = dataclasses.replace(episodes, frames=episodes.frames.clone())
    other.frames[:, :3] = 255 - other.frames[:, :3]
    one, two = (rollout(world, e, PlainCache(2), 3)[:, 6:].int() for e in (episodes, other))
    assert (one - two).abs().max() > 3


def test_rollout_counts_its_chunks() -> None:
    calls: list[tuple[int, int]] = []
    rollout(
        small_world(),
        small_episodes(1),
        PlainCache(2),
        9,
        on_chunk=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"frames": 10}, ConfigError, "multiple of 3"),
        ({"frames": 0}, ConfigError, "multiple of 3; try 3"),
        ({"frames": 60}, ShapeError, "actions"),
        ({"frames": 9, "seeds": [1]}, ShapeError, "seeds"),
        ({"frames": 9, "attention": "flash"}, ConfigError, "attention"),
        ({"frames": 9, "key_rope": "mid"}, ConfigError, "key_rope"),
    ],
)
def test_bad_arguments_are_named(
    arguments: dict[str, Any], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        rollout(small_world(), small_episodes(), PlainCache(2), **arguments)


def test_episodes_of_another_world_are_named() -> None:
    world, episodes = small_world(), small_episodes()
    wide = dataclasses.replace(episodes, frames=torch.zeros(2, 3, 16, 32, 3, dtype=torch.uint8))
    with pytest.raises(ShapeError, match=r"16, 32"):
        rollout(world, wide, PlainCache(2), 9)
    for frames in (0, 4):
        wrong = dataclasses.replace(episodes, frames=torch.zeros(2, frames, 16, 24, 3).byte())
        with pytest.raises(ShapeError, match=rf"got \({frames}, 16.*multiple of 3"):
            rollout(world, wrong, PlainCache(2), 9)
    with pytest.raises(ShapeError, match="got 30 a row, expected 33"):
        rollout(world, longer(episodes, 24), PlainCache(2), 9)
    unknown = dataclasses.replace(episodes, actions=episodes.actions + 16)
    with pytest.raises(ConfigError, match="actions"):
        rollout(world, unknown, PlainCache(2), 9)
    for name in ("frames", "actions", "camera"):
        listed = dataclasses.replace(episodes, **{name: [[0]]})
        with pytest.raises(ShapeError, match=f"got {name} of type list"):
            rollout(world, listed, PlainCache(2), 9)


def test_a_model_that_breaks_down_is_named() -> None:
    world = small_world()
    with torch.no_grad():
        world.head.bias.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="chunk 1"):
        rollout(world, small_episodes(), PlainCache(2), 9)


def test_rope_is_relative_and_exact_far_out() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 1, SMALL.frame_tokens, 1, 128, generator=generator).unbind(0)

    def logits(shift: int) -> torch.Tensor:
        return torch.einsum(
            "bshd,bthd->st",
            apply_rope(q, rope_table(SMALL, shift, 1, "cpu")),
            apply_rope(k, rope_table(SMALL, shift + 5, 1, "cpu")),
        )

    torch.testing.assert_close(logits(0), logits(100_000), rtol=1e-4, atol=1e-4)


def test_noise_of_a_row_is_its_own() -> None:
    both = row_noise([1, 2], ["a", "b"], 4, "start", (3,))
    assert torch.equal(both[1:], row_noise([2], ["b"], 4, "start", (3,)))
    assert not torch.equal(both[0], row_noise([1], ["a"], 5, "start", (3,))[0])


@pytest.mark.parametrize(
    "bad",
    [
        {"patch": 7},
        {"rope_dims": (44, 42, 40)},
        {"window_frames": 10},
        {"noise_levels": (0.1, 0.5)},
        {"noise_levels": (0.0, 0.5, 0.5)},
        {"noise_levels": (0.0, float("nan"))},
        {"commit_time": 1.5},
        {"commit_time": float("nan")},
        {"rope_theta": -1.0},
    ],
)
def test_bad_geometry_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WorldConfig(**bad)
    assert WorldConfig.from_dict(SMALL.to_dict()) == SMALL
