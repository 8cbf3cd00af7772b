"""The model's own rollouts, made anew now and then: histories as they are in use."""

from __future__ import annotations

import numpy as np
import torch
from speed import own_cache
from walks import Sequences, Walks

from steadykv.world import Episodes, WorldModel, rollout
from steadykv.world.weights import place


class OwnWalks:
    """`count` rollouts after true beginnings, under the true actions."""

    def __init__(self, model: WorldModel, device: str, count: int):
        self.device, self.count = device, count
        self.dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.world = place(WorldModel(model.config), device, self.dtype)
        self.seed = 0
        self.made = torch.empty(0)
        self.true = Sequences(self.made, self.made, self.made)

    def refresh(
        self,
        weights: dict[str, torch.Tensor],
        walks: Walks,
        rng: np.random.Generator,
        begin: int,
        frames: int,
    ) -> None:
        """Roll out the given weights (by name): `frames` frames after `begin` true ones."""
        own = dict(self.world.named_parameters())
        for name, value in weights.items():
            own[name].data.copy_(value)
        self.true = true = walks.sample(self.count, begin + frames, rng)
        names = tuple(str(i) for i in range(self.count))
        held = true.actions.to("cpu", torch.uint8)
        camera = true.poses if self.world.config.view_degrees else None
        episodes = Episodes(true.frames[:, :begin].cpu(), held, names, camera=camera)
        self.seed += 1
        seeds = [self.seed * 1000 + i for i in range(self.count)]
        video = rollout(self.world, episodes, own_cache(self.world), frames, seeds)
        self.made = video.to(self.device)

    def sample(
        self, batch: int, length: int, rng: np.random.Generator
    ) -> tuple[torch.Tensor, Sequences]:
        """Own frames uint8 [B,length,H,W,3], and the true sequences; they start at whole chunks."""
        size = self.world.config.chunk_frames
        starts = size * rng.integers((self.made.shape[1] - length) // size + 1, size=batch)
        rows = rng.integers(self.count, size=batch)
        index = torch.from_numpy(starts[:, None] + np.arange(length)).to(self.device)
        row = torch.from_numpy(rows)[:, None].to(self.device)
        return self.made[row, index], Sequences(*(part[row, index] for part in self.true))
