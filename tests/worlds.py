"""A tiny world model with random weights, whose video depends on what its cache returns."""

from __future__ import annotations

import torch

from steadykv.world import Episodes, WorldConfig, WorldModel

TINY = WorldConfig(
    num_layers=2,
    num_heads=2,
    head_dim=32,
    width=48,
    hidden_width=64,
    image_height=32,
    image_width=48,
    patch=8,
    channels=24,
    chunk_frames=3,
    window_frames=15,
    rope_dims=(12, 10, 10),
    noise_levels=(0.0, 0.5),
)


def tiny_world(config: WorldConfig = TINY) -> WorldModel:
    """Every parameter random: the gates, closed at the start of training, are open."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        world = WorldModel(config)
        for name, parameter in world.named_parameters():
            scale = 1.0 if "norm" in name else 0.5
            parameter.data.normal_(std=scale * max(parameter.shape[-1], 1) ** -0.5)
            if "_norm" in name:
                # Sharp attention: logits of a few units, as in a trained model.
                parameter.data.add_(1.5)
    world.tokenizer.fit(tiny_episodes(20, config=config).frames.flatten(0, 1), 0.5, 1.5)
    return world.eval().requires_grad_(False)


def broken_world() -> WorldModel:
    """The tiny world with NaN in the scale of one layer's keys."""
    world = tiny_world()
    broken = [p for name, p in world.named_parameters() if "key_norm" in name]
    broken[0].data.fill_(float("nan"))
    return world


def tiny_episodes(count: int, frames: int = 60, config: WorldConfig = TINY) -> Episodes:
    """Smooth random first frames and random actions."""
    generator = torch.Generator().manual_seed(1)
    size = (config.image_height, config.image_width)
    coarse = torch.rand((count * config.chunk_frames, 3, 4, 4), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")
    pixels = (smooth.movedim(1, -1) * 120).round().to(torch.uint8)
    actions = torch.randint(0, config.num_actions, (count, frames), generator=generator)
    return Episodes(
        pixels.unflatten(0, (count, config.chunk_frames)),
        actions.to(torch.uint8),
        tuple(f"walk-{index}" for index in range(count)),
    )
