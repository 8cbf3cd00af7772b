"""A critic that tells generated chunks from true ones, patch by patch.

Squared error alone rewards a blurred guess wherever detail cannot be known; the critic asks that a
chunk looks like one of the world, wherever its detail ends up. It sees the pixels of a whole chunk,
so that it judges motion too, and the actions held in it (a projection discriminator, Miyato and
Koyama 2018), with hinge loss and spectral norm.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from parallel import average_gradients
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from steadykv.world.config import WorldConfig


class Critic(nn.Module):
    """Logits of patches of about half a frame: chunks [N,C,H,W,3] and actions [N,C] -> [N,h,w]."""

    def __init__(self, config: WorldConfig, width: int = 96):
        super().__init__()
        sizes = (3 * config.chunk_frames, width, 2 * width, 4 * width)
        self.layers = nn.ModuleList(
            spectral_norm(nn.Conv2d(a, b, 4, 2, 1)) for a, b in itertools.pairwise(sizes)
        )
        self.mix = spectral_norm(nn.Conv2d(sizes[-1], sizes[-1], 3, 1, 1))
        self.out = spectral_norm(nn.Conv2d(sizes[-1], 1, 1))
        self.action = nn.Embedding(config.num_actions, sizes[-1])
        nn.init.normal_(self.action.weight, std=0.02)

    def forward(self, chunks: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        x = chunks.permute(0, 1, 4, 2, 3).flatten(1, 2).sub(0.2).div(0.15)
        x = x.contiguous(memory_format=torch.channels_last)
        for layer in (*self.layers, self.mix):
            x = F.leaky_relu(layer(x), 0.2)
        held = self.action(actions).mean(1)[:, :, None, None]
        return self.out(x).squeeze(1) + (x * held).mean(1)


class Judge:
    """The critic with its optimizer."""

    def __init__(self, config: WorldConfig, device: str, processes: int):
        self.critic = Critic(config).to(device)
        self.parameters = list(self.critic.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=8e-4, betas=(0.5, 0.9), weight_decay=0.0
        )
        self.processes, self.device = processes, device.split(":")[0]

    def learn(self, true: torch.Tensor, made: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """One step on true and made chunks [N,C,H,W,3]; returns its loss."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.critic(torch.cat((true, made)), torch.cat((actions, actions)))
        of_true, of_made = logits.float().chunk(2)
        loss = F.relu(1 - of_true).mean() + F.relu(1 + of_made).mean()
        loss.backward()
        average_gradients(self.parameters, self.processes)
        self.optimizer.step()
        return loss.detach()

    def gain(self, made: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """How true `made` looks, to be raised; differentiable in `made` alone."""
        with torch.autocast(self.device, torch.bfloat16):
            return self.critic(made, actions).float().mean()
