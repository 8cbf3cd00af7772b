"""An action-conditioned causal video diffusion transformer.

Built like the models whose caches this library packs: chunks of frames are denoised together while
they attend to the keys and values of earlier chunks; queries and keys are RMS-normed and carry a
3-axis rotary embedding; time and action enter by adaptive layer norm. It predicts the clean latents
(x-prediction) of a rectified flow x_t = t * latents + (1 - t) * noise; the latents are those of a
fixed linear tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from steadykv.errors import ShapeError
from steadykv.world.config import WorldConfig
from steadykv.world.pose import PoseFeatures, turned, view_table
from steadykv.world.rope import apply_rope
from steadykv.world.tokenizer import Tokenizer

Table = tuple[torch.Tensor, torch.Tensor]
# (layer, q, k, v, table) -> attention output [B,S,H,D]; each of q k v is [B,S,H,D], before the
# rotary embedding of `table` and, in a world that is told where it looks, after that of `view`.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Table], torch.Tensor]


class Block(nn.Module):
    """One transformer layer; its modulation is the shared one plus a learned offset."""

    def __init__(self, config: WorldConfig):
        super().__init__()
        self.config = config
        self.query_key_value = nn.Linear(config.width, 3 * config.attention_width, bias=False)
        self.output = nn.Linear(config.attention_width, config.width, bias=False)
        self.query_norm = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.key_norm = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.expand = nn.Linear(config.width, config.hidden_width, bias=False)
        self.contract = nn.Linear(config.hidden_width, config.width, bias=False)
        self.modulation_offset = nn.Parameter(torch.zeros(6, config.width))

    def forward(
        self,
        x: torch.Tensor,
        modulation: torch.Tensor,
        layer: int,
        attend: Attend,
        table: Table,
        view: Table | None = None,
    ) -> torch.Tensor:
        """x [B,F,P,W] (frames, tokens a frame, width), modulation [B,F,6,W]; returns x's shape."""
        batch, frames, tokens, width = x.shape
        parts = (modulation + self.modulation_offset).unsqueeze(3).unbind(2)
        shift_attention, scale_attention, gate_attention, shift_mlp, scale_mlp, gate_mlp = parts

        h = F.layer_norm(x, (width,)) * (1 + scale_attention) + shift_attention
        qkv = self.query_key_value(h).view(
            batch, frames * tokens, 3, self.config.num_heads, self.config.head_dim
        )
        q, k, v = qkv.unbind(2)
        q, k = self.query_norm(q).to(v.dtype), self.key_norm(k).to(v.dtype)
        if view is not None:
            q, k = turned(q, view), turned(k, view)
        h = attend(layer, q, k, v, table)
        x = x + gate_attention * self.output(h.reshape(batch, frames, tokens, -1))

        h = F.layer_norm(x, (width,)) * (1 + scale_mlp) + shift_mlp
        return x + gate_mlp * self.contract(F.gelu(self.expand(h), approximate="tanh"))


class Sight(NamedTuple):
    """Where frames are seen from: features [B,F,P,W] and, with `view_dims`, `view_table`'s."""

    features: torch.Tensor
    view: Table | None


class WorldModel(nn.Module):
    """Predicts clean frames from noisy ones, the buttons held, and what `attend` looks back at."""

    def __init__(self, config: WorldConfig):
        super().__init__()
        self.config = config
        width = config.width
        self.tokenizer = Tokenizer(config)
        self.embed = nn.Linear(config.channels, width)
        self.position = nn.Parameter(torch.zeros(config.frame_tokens, width))
        self.pose = PoseFeatures(config) if config.view_degrees else None
        self.action = nn.Embedding(config.num_actions, width)
        self.time_expand = nn.Linear(256, width)
        self.time_contract = nn.Linear(width, width)
        self.modulation = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_modulation = nn.Parameter(torch.zeros(2, width))
        self.head = nn.Linear(width, config.channels)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # Gates start closed and the head starts at zero: the model begins as the identity on its
        # residual stream.
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.head.weight)

    def sight(self, poses: torch.Tensor) -> Sight | None:
        """What the model is told of frames with `poses` [B,F,3] (`walk_poses`); it may be kept.

        None for a model without `view_degrees`.
        """
        if self.pose is None:
            return None
        turns = any(self.config.view_dims)
        return Sight(self.pose(poses), view_table(self.config, poses) if turns else None)

    def forward(
        self,
        latents: torch.Tensor,
        times: torch.Tensor,
        actions: torch.Tensor,
        attend: Attend,
        table: Table,
        sight: Sight | None = None,
    ) -> torch.Tensor:
        """Clean latents FP32, in the shape of `latents`.

        latents [B,F,P,C], times [B,F] in [0,1], actions int64 [B,F]; what `sight` says of the same
        frames is asked for by a model with `view_degrees` (else ShapeError).
        """
        batch, count = latents.shape[:2]
        x = self.embed(latents.to(self.embed.weight.dtype)) + self.position
        view = None
        if self.pose is not None:
            if sight is None:
                raise ShapeError("sight: got none, expected that of the frames' poses; ask sight()")
            x, view = x + sight.features, sight.view
        condition = self.time_contract(F.silu(self.time_expand(time_features(times).to(x.dtype))))
        condition = condition + self.action(actions)
        x = x + condition.unsqueeze(2)
        modulation = self.modulation(F.silu(condition)).view(batch, count, 6, self.config.width)
        for layer, block in enumerate(self.blocks):
            x = block(x, modulation, layer, attend, table, view)
        shift, scale = self.final_modulation
        return self.head(F.layer_norm(x, (self.config.width,)) * (1 + scale) + shift).float()


def time_features(times: torch.Tensor) -> torch.Tensor:
    """Sinusoids of flow time [B,F] -> FP32 [B,F,256]."""
    steps = torch.arange(128, device=times.device).float()
    frequencies = torch.exp(-steps / 128 * 9.21)  # 1 to 1e-4
    angles = times.float().unsqueeze(-1) * 1000 * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotate(q: torch.Tensor, k: torch.Tensor, table: Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of q and k [B,S,H,D] with the rotary embedding of `table`."""
    return apply_rope(q, table), apply_rope(k, table)
