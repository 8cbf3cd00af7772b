"""Patches of pixels as a few numbers each: a fixed linear code, fitted to the training frames.

Takes the place of the autoencoder of larger models. A patch is described by its leading principal
components, each divided by a power of its deviation: fine detail, which has little energy, is then
less drowned by a noise that is the same for all of them.
"""

from __future__ import annotations

import torch
from torch import nn

from steadykv.world.config import WorldConfig


class Tokenizer(nn.Module):
    """Frames uint8 [B,F,H,W,3] <-> latents FP32 [B,F,P,C]; patches P in row-major order.

    Its three tensors stay FP32 whatever the model computes in.
    """

    def __init__(self, config: WorldConfig):
        super().__init__()
        self.config = config
        numbers = 3 * config.patch**2
        self.mean = nn.Parameter(torch.zeros(numbers), requires_grad=False)
        self.encoder = nn.Parameter(torch.zeros(config.channels, numbers), requires_grad=False)
        self.decoder = nn.Parameter(torch.zeros(numbers, config.channels), requires_grad=False)

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """Frames uint8 [B,F,H,W,3] -> latents FP32 [B,F,P,C] on the tokenizer's device."""
        pixels = self._patches(frames.to(self.mean.device)).float() / 255
        return (pixels - self.mean) @ self.encoder.T

    def pixels(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [B,F,P,C] -> FP32 [B,F,H,W,3], 0 for black and 1 for white, not clamped."""
        config, size = self.config, self.config.patch
        x = latents.float() @ self.decoder.T + self.mean
        batch, count = x.shape[:2]
        x = x.view(batch, count, config.rows, config.columns, size, size, 3)
        shape = (batch, count, config.image_height, config.image_width, 3)
        return x.permute(0, 1, 2, 4, 3, 5, 6).reshape(shape)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [B,F,P,C] -> frames uint8 [B,F,H,W,3], clamped and rounded."""
        return (self.pixels(latents) * 255).clamp(0, 255).round().to(torch.uint8)

    @torch.no_grad()
    def fit(self, frames: torch.Tensor, power: float, largest: float) -> None:
        """Set the code to the principal components of `frames` uint8 [N,H,W,3].

        A component of deviation d is divided by d**power; all are then scaled alike, so that the
        first has deviation `largest`.
        """
        patches = self._patches(frames.unsqueeze(0)).flatten(0, 2).double() / 255
        mean = patches.mean(0)
        covariance = (patches - mean).T @ (patches - mean) / len(patches)
        values, vectors = torch.linalg.eigh(covariance)
        spread = values.flip(0)[: self.config.channels].clamp_min(1e-12).sqrt()
        factors = spread**-power
        factors = factors * (largest / (factors[0] * spread[0]))
        basis = vectors.flip(1)[:, : self.config.channels]
        self.mean.copy_(mean)
        self.encoder.copy_((basis * factors).T)
        self.decoder.copy_(basis / factors)

    def _patches(self, frames: torch.Tensor) -> torch.Tensor:
        """[B,F,H,W,3] -> [B,F,P,3*patch*patch]."""
        config, size = self.config, self.config.patch
        batch, count = frames.shape[:2]
        x = frames.reshape(batch, count, config.rows, size, config.columns, size, 3)
        return x.permute(0, 1, 2, 4, 3, 5, 6).reshape(batch, count, config.frame_tokens, -1)
