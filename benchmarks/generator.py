"""A causal video generator of real size and random weights: what a cache is worked by.

The transformer of Wan 2.1 (Apache-2.0, arXiv 2503.20314), one chunk of frames at a time: patches of
16 x 2 x 2 latents, blocks of self-attention and a feed-forward layer modulated by the noise level,
RMS norm over all channels of queries and keys, everything in BF16. Left out: the cross-attention to
the text, rotary positions, and classifier-free guidance. They only add time, the same to every
cache, so that a cache's share of it is larger here than in the real model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = 64  # latents of one token
FREQUENCIES = 256
NOISE_LEVELS = (1.0, 0.75, 0.5, 0.25)  # of the denoising passes; then a clean one at 0
GAIN = 2**0.5  # of the norms: logits of standard deviation 2, so that tokens are told apart
PASSES = len(NOISE_LEVELS) + 1

# (layer, q, k, v) -> result; all [1, S, H, D]
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Layers, heads, head dim, channels of the feed-forward layer, and the tokens of a chunk."""

    layers: int
    heads: int
    head_dim: int
    hidden: int
    frame_tokens: int
    chunk_frames: int = 3

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_frames * self.frame_tokens


SHAPES = {
    "1.3b": Shape(layers=30, heads=12, head_dim=128, hidden=8960, frame_tokens=1560),
    "14b": Shape(layers=40, heads=40, head_dim=128, hidden=13824, frame_tokens=1560),
    "tiny": Shape(layers=2, heads=2, head_dim=64, hidden=192, frame_tokens=16),
}


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = (shape.heads, shape.head_dim)
        self.modulation = nn.Parameter(torch.empty(6, 1, 1, shape.width))
        self.q, self.k, self.v, self.out = (nn.Linear(shape.width, shape.width) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(shape.width, eps=1e-6) for _ in range(2))
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: Tensor, level: Tensor, layer: int, attention: Attention) -> Tensor:
        shift, scale, gate, shift_up, scale_up, gate_up = self.modulation + level
        h = _modulated(x, shift, scale)
        parts = (self.norm_q(self.q(h)), self.norm_k(self.k(h)), self.v(h))
        attended = attention(layer, *(part.unflatten(2, self.heads) for part in parts))
        x = x + gate * self.out(attended.flatten(2))
        h = F.gelu(self.up(_modulated(x, shift_up, scale_up)), approximate="tanh")
        return x + gate_up * self.down(h)


class Generator(nn.Module):
    """Velocity of a chunk of latents [1, S, 64] at a noise level, BF16."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, shape.width)
        self.time = nn.Sequential(
            nn.Linear(FREQUENCIES, shape.width),
            nn.SiLU(),
            nn.Linear(shape.width, shape.width),
            nn.SiLU(),
            nn.Linear(shape.width, 6 * shape.width),
        )
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, PATCH)

    def forward(self, x: Tensor, level: float, attention: Attention) -> Tensor:
        octaves = torch.arange(FREQUENCIES // 2, device=x.device) / (FREQUENCIES // 2)
        angles = 1000 * level * torch.exp(-math.log(10000) * octaves)
        waves = torch.cat((angles.cos(), angles.sin())).to(x.dtype)
        modulation = self.time(waves).view(6, 1, 1, -1)
        h = self.embed(x)
        for layer, block in enumerate(self.blocks):
            h = block(h, modulation, layer, attention)
        return self.head(F.layer_norm(h, h.shape[-1:]))


def new_generator(shape: Shape, device: torch.device, seed: int = 0) -> Generator:
    """Random weights in BF16, drawn on the device from a generator of its own."""
    with torch.device("meta"):  # what torch would draw comes from the global generator
        network = Generator(shape)
    network = network.to(torch.bfloat16).to_empty(device=device).requires_grad_(False)
    rng = torch.Generator(device).manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, module.in_features**-0.5, generator=rng)
            module.bias.zero_()
        elif isinstance(module, nn.RMSNorm):
            module.weight.fill_(GAIN)
        elif isinstance(module, Block):
            module.modulation.normal_(0, 0.1, generator=rng)
    return network


def generate_chunk(network: Generator, noise: Tensor, attention: Attention) -> Tensor:
    """A chunk of latents from `noise` [1, S, 64]: passes that denoise it, then the clean one."""
    x = noise
    for level, following in zip(NOISE_LEVELS, (*NOISE_LEVELS[1:], 0.0), strict=True):
        x = x + (following - level) * network(x, level, attention)
    network(x, 0.0, attention)
    return x


def chunk_noise(shape: Shape, chunk: int, device: torch.device) -> Tensor:
    """What chunk number `chunk` starts from, the same for every cache: BF16 [1, S, 64]."""
    rng = torch.Generator(device).manual_seed(chunk)
    noise = torch.randn(1, shape.chunk_tokens, PATCH, generator=rng, device=device)
    return noise.to(torch.bfloat16)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
