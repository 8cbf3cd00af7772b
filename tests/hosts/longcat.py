"""A pipeline with the calling contract of LongCat-Video, small and with random weights.

Ours, from the description of that contract: a clean pass over the condition latents returns
{layer: (k, v)} of [1, H, S, D], normed per head and before RoPE; every noisy pass repeats an entry
to the guidance batch, joins it with its own keys and rotates all of them from position 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

HEADS, DIM = 2, 32
WIDTH = HEADS * DIM
LAYERS = 3


def rotated(x: Tensor) -> Tensor:
    """A rotary embedding of [B, H, S, D] from position 0, in FP32."""
    half = x.shape[-1] // 2
    frequencies = 50.0 ** -(torch.arange(half) / half)
    angles = torch.arange(x.shape[2])[:, None] * frequencies
    a, b = x.float().chunk(2, -1)
    turned = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    return torch.cat(turned, -1).type_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, return_kv: bool = False) -> Any:
        q, k, v = self.heads_of(x)
        stored = (k.clone(), v.clone())
        out = self.attend(rotated(q), rotated(k), v)
        return (out, stored) if return_kv else out

    def forward_with_kv_cache(self, x: Tensor, kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.heads_of(x)
        old_k, old_v = kv_cache
        assert old_k.shape[0] in (1, x.shape[0])
        if old_k.shape[0] == 1:
            old_k, old_v = (t.repeat(x.shape[0], 1, 1, 1) for t in (old_k, old_v))
        padded = torch.cat([torch.empty_like(old_k).zero_(), q], dim=2)
        k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        return self.attend(rotated(padded)[:, :, -x.shape[1] :], rotated(k), v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn, self.text = Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, y: Tensor, return_kv: bool, kv_cache: Any, skip_crs_attn: bool
    ) -> Any:
        if kv_cache is not None:
            kv_cache = (kv_cache[0].to(x.device), kv_cache[1].to(x.device))
            out = self.attn.forward_with_kv_cache(self.norm(x), kv_cache)
        else:
            out = self.attn(self.norm(x), return_kv=return_kv)
        if return_kv:
            out, kv_cache = out
        x = x + out
        if not skip_crs_attn:
            x = x + self.text(y)
        return (x, kv_cache) if return_kv else x


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        return_kv: bool = False,
        kv_cache_dict: Any = {},  # noqa: B006  # as the host has it
        skip_crs_attn: bool = False,
        offload_kv_cache: bool = False,
    ) -> Any:
        """hidden_states [B, width, T, h, w]."""
        x = hidden_states.flatten(2).transpose(1, 2)
        found = {}
        for i, block in enumerate(self.blocks):
            entry = kv_cache_dict.get(i, None)
            out = block(x, encoder_hidden_states, return_kv, entry, skip_crs_attn)
            if return_kv:
                x, (k, v) = out
                found[i] = (
                    (k.cpu(), v.cpu()) if offload_kv_cache else (k.contiguous(), v.contiguous())
                )
            else:
                x = out
        x = x.transpose(1, 2).reshape(hidden_states.shape)
        return (x, found) if return_kv else x


class LongCatVideoPipeline:
    def __init__(self, steps: int = 3) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.dit = Transformer()
        self.dit.bfloat16().requires_grad_(False)
        self.steps = steps

    def _update_kv_cache_dict(self, kv_cache_dict: Any) -> None:
        self.kv_cache_dict = kv_cache_dict

    def _cache_clean_latents(
        self, cond_latents: Tensor, model_max_length: int, offload_kv_cache: bool
    ) -> None:
        _, kv_cache_dict = self.dit(
            cond_latents,
            torch.zeros(1, 1, WIDTH),
            return_kv=True,
            skip_crs_attn=True,
            offload_kv_cache=offload_kv_cache,
        )
        self._update_kv_cache_dict(kv_cache_dict)

    def _get_kv_cache_dict(self) -> Any:
        return self.kv_cache_dict

    def generate_vc(
        self, latents: Tensor, condition: int, text: Tensor, offload_kv_cache: bool = False
    ) -> Tensor:
        """latents [1, width, T, h, w], of which the first `condition` frames are clean."""
        clean, x = latents[:, :, :condition], latents[:, :, condition:]
        self._cache_clean_latents(clean, 8, offload_kv_cache=offload_kv_cache)
        kv_cache_dict = self._get_kv_cache_dict()
        for _ in range(self.steps):
            both = self.dit(torch.cat([x] * 2), text, kv_cache_dict=kv_cache_dict)
            negative, positive = both.chunk(2)
            x = 0.5 * x + 0.5 * torch.tanh(2 * positive - negative)
        return torch.cat([clean, x], dim=2)


def noise_of(frames: int, seed: int = 0, size: tuple[int, int] = (4, 4)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, WIDTH, frames, *size, generator=generator).bfloat16()


def text_of(seed: int = 9) -> Tensor:
    """[2, 1, width]: negative, positive."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 1, WIDTH, generator=generator).bfloat16()


def long_video(
    pipeline: LongCatVideoPipeline, conditions: list[int], seed: int = 0, **options: Any
) -> list[Tensor]:
    """A segment for each entry, conditioned on so many of the newest frames."""
    newest, found = noise_of(max(conditions), seed), []
    for number, condition in enumerate(conditions):
        latents = torch.cat([newest[:, :, -condition:], noise_of(5, seed + 10 + number)], dim=2)
        newest = pipeline.generate_vc(latents, condition, text_of(seed), **options)
        found.append(newest)
        newest = torch.cat([newest, newest], dim=2)
    return found
