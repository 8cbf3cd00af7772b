"""A critic that tells generated chunks from true ones, patch by patch.

Squared error alone rewards a blurred guess wherever detail cannot be known; the critic asks that a
chunk looks like one of the world, wherever its detail ends up. It sees the pixels of a whole chunk,
so that it judges motion too, and the actions held in it (a projection discriminator, Miyato and
Koyama 2018). Its loss compares each made chunk with the true one of the same place, and penalises
its gradient on both (arXiv 2501.05441, equations 5 and 6): it then has no reason to saturate, and
where it cannot tell the two apart it is flat.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from parallel import average_gradients
from torch import nn

from steadykv.world.config import WorldConfig


class Critic(nn.Module):
    """Logits of patches of about half a frame: chunks [N,C,H,W,3] and actions [N,C] -> [N,h,w]."""

    def __init__(self, config: WorldConfig, width: int = 96):
        super().__init__()
        sizes = (3 * config.chunk_frames, width, 2 * width, 4 * width)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 4, 2, 1) for a, b in itertools.pairwise(sizes))
        self.mix = nn.Conv2d(sizes[-1], sizes[-1], 3, 1, 1)
        self.out = nn.Conv2d(sizes[-1], 1, 1)
        self.action = nn.Embedding(config.num_actions, sizes[-1])
        nn.init.normal_(self.action.weight, std=0.02)
        for module in (*self.layers, self.mix):
            nn.init.kaiming_normal_(module.weight, 0.2)

    def forward(self, chunks: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        x = chunks.permute(0, 1, 4, 2, 3).flatten(1, 2).sub(0.2).div(0.15)
        x = x.contiguous(memory_format=torch.channels_last)
        for layer in (*self.layers, self.mix):
            x = F.leaky_relu(layer(x), 0.2)
        held = self.action(actions).mean(1)[:, :, None, None]
        return self.out(x).squeeze(1) + (x * held).mean(1)


class Judge:
    """The critic with its optimizer."""

    def __init__(self, config: WorldConfig, device: str, processes: int, penalty: float):
        self.critic = Critic(config).to(device)
        self.parameters = list(self.critic.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=2e-4, betas=(0.0, 0.99))
        self.processes, self.device, self.penalty = processes, device.split(":")[0], penalty
        self.ratio = torch.ones((), device=device)

    def learn(self, true: torch.Tensor, made: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """One step on true and made chunks [N,C,H,W,3]; returns its loss, log 2 in ignorance.

        The penalty is half of `penalty` times the squared gradient of the logits' sum, a patch.
        """
        self.optimizer.zero_grad()
        chunks = torch.cat((true, made)).detach().requires_grad_()
        logits = self.critic(chunks, torch.cat((actions, actions)))
        (slope,) = torch.autograd.grad(logits.sum(), chunks, create_graph=True)
        steepness = slope.square().sum() / (logits.numel() / 2)  # of true and made, a patch
        of_true, of_made = logits.chunk(2)
        loss = F.softplus(of_made - of_true).mean()
        (loss + self.penalty / 2 * steepness).backward()
        average_gradients(self.parameters, self.processes)
        self.optimizer.step()
        return loss.detach()

    def scale(self, ratio: torch.Tensor, is_used: bool) -> torch.Tensor:
        """A running mean of `ratio`, which stays as it is from the moment the critic is used."""
        if not is_used:
            self.ratio = torch.lerp(self.ratio, ratio, 0.1)
        return self.ratio

    def doubt(self, true: torch.Tensor, made: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """How much less true `made` looks, to be lowered; differentiable in `made` alone."""
        with torch.autocast(self.device, torch.bfloat16):
            with torch.no_grad():
                of_true = self.critic(true, actions).float()
            return F.softplus(of_true - self.critic(made, actions).float()).mean()
