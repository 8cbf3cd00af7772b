"""A critic that tells generated chunks from true ones, patch by patch.

Squared error alone rewards a blurred guess wherever detail cannot be known; the critic asks that a
chunk looks like one of the world, wherever its detail ends up. It sees the latents of a whole
chunk, so that it judges motion too, **each component divided by its deviation**: what tells a blur
from a picture are components of a hundredth of the first one's deviation, and in pixels a critic of
this size did not find them. It is told the actions held (a projection discriminator, Miyato and
Koyama 2018). Its loss compares each made chunk with the true one of the same place, and penalises
its gradient on both (arXiv 2501.05441, equations 5 and 6): it then has no reason to saturate.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel import average_gradients
from torch import nn

from steadykv.world.config import WorldConfig


class Critic(nn.Module):
    """Logits of patches: scaled latents [N,C,P,D] and actions [N,C] -> [N, rows, columns]."""

    def __init__(self, config: WorldConfig, width: int = 256):
        super().__init__()
        self.grid = (config.rows, config.columns)
        self.mix = nn.Conv2d(config.chunk_frames * config.channels, width, 1)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(3))
        self.out = nn.Conv2d(width, 1, 1)
        self.action = nn.Embedding(config.num_actions, width)
        nn.init.normal_(self.action.weight, std=0.02)
        for module in (self.mix, *self.layers):
            nn.init.kaiming_normal_(module.weight, 0.2)

    def forward(self, chunks: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        x = chunks.transpose(2, 3).unflatten(3, self.grid).flatten(1, 2)
        for layer in (self.mix, *self.layers):
            x = F.leaky_relu(layer(x), 0.2)
        held = self.action(actions).mean(1)[:, :, None, None]
        return self.out(x).squeeze(1) + (x * held).mean(1)


class Judge:
    """The critic with its optimizer; chunks are latents [N,C,P,D], actions [N,C]."""

    def __init__(self, config: WorldConfig, device: str, processes: int, penalty: float):
        self.critic = Critic(config).to(device)
        self.parameters = list(self.critic.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=2e-4, betas=(0.0, 0.99))
        self.processes, self.device, self.penalty = processes, device.split(":")[0], penalty
        self.deviation: torch.Tensor | None = None  # of each component, [D]
        self.ratio: torch.Tensor | None = None

    def learn(self, true: torch.Tensor, made: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """One step on true and made chunks; returns its loss, log 2 in ignorance.

        The penalty is half of `penalty` times the squared gradient of the logits' sum, a patch.
        """
        if self.deviation is None:
            self.deviation = true.flatten(0, 2).std(0).clamp_min(1e-6)
            if self.processes > 1:
                dist.broadcast(self.deviation, 0)
        self.optimizer.zero_grad()
        chunks = (torch.cat((true, made)) / self.deviation).detach().requires_grad_()
        logits = self.critic(chunks, torch.cat((actions, actions)))
        (slope,) = torch.autograd.grad(logits.sum(), chunks, create_graph=True)
        steepness = slope.square().sum() / (logits.numel() / 2)  # of true and made, a patch
        of_true, of_made = logits.chunk(2)
        loss = F.softplus(of_made - of_true).mean()
        (loss + self.penalty / 2 * steepness).backward()
        average_gradients(self.parameters, self.processes)
        self.optimizer.step()
        return loss.detach()

    def scale(self, ratio: torch.Tensor | None) -> torch.Tensor:
        """A running mean of `ratio`, or without one, once the critic is heard, as it then was.

        A critic that is at a loss should not push as hard as a good one.
        """
        if ratio is not None:
            self.ratio = ratio if self.ratio is None else torch.lerp(self.ratio, ratio, 0.1)
        assert self.ratio is not None
        return self.ratio

    def doubt(self, true: torch.Tensor, made: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """How much less true `made` looks, to be lowered; differentiable in `made` alone."""
        assert self.deviation is not None
        with torch.autocast(self.device, torch.bfloat16):
            with torch.no_grad():
                of_true = self.critic(true / self.deviation, actions).float()
            of_made = self.critic(made / self.deviation, actions).float()
            return F.softplus(of_true - of_made).mean()
