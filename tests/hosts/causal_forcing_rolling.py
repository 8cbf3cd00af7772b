"""A pipeline with the calling contract of rolling forcing, small and with random weights.

Ours, from the description of that contract: a query holds as many blocks of frames as there are
denoising steps, the first of them is written; block 0 is kept unrotated and rotated at every read
to sit before the working window, which is read by a slice of its own; a clean call follows, which
copies its slice and turns block 0 in the copy; the buffer has three frames more than are attended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.hosts.self_forcing import causal_rope_apply, rope_table

FRAME = 8  # tokens a frame
BLOCK_FRAMES = 3
BUFFER_FRAMES, ATTENDED_FRAMES = 24, 21
HEADS, DIM = 2, 32
WIDTH = HEADS * DIM
LAYERS = 2


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, S, H, D] against k, v [B, T, H, D]; the name that self-attention looks up."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def text_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same for cross-attention, which has a function of its own."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, frame: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM
        self.frame_length, self.block_length = frame, BLOCK_FRAMES * frame
        self.max_attention_size = ATTENDED_FRAMES * frame
        self.freqs = rope_table()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def turned(self, x: Tensor, first_frame: int) -> Tensor:
        tokens = self.frame_length
        grid = torch.tensor([[x.shape[1] // tokens, 2, tokens // 2]])
        return causal_rope_apply(x, grid, self.freqs, start_frame=first_frame).type_as(x)

    def forward(self, x: Tensor, kv_cache: Any, start: int, updating_cache: bool) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, DIM)) for f in (self.q, self.k, self.v))
        block, frame, place = self.block_length, self.frame_length, start // self.frame_length
        turned_q, turned_k = self.turned(q, place), self.turned(k, place)
        # Only the first block of the query is stored.
        end, size = start + block, kv_cache["k"].shape[1]
        local, known = kv_cache["local_end_index"].item(), kv_cache["global_end_index"].item()
        new, stop = end - known, local + end - known
        if new > 0 and new + local > size:
            evicted = new + local - size
            rolled = local - evicted - block
            for name in ("k", "v"):
                moved = kv_cache[name][:, block + evicted : block + evicted + rolled].clone()
                kv_cache[name][:, block : block + rolled] = moved
            stop -= evicted
        first = stop - block
        stored = k if first == 0 else turned_k
        kv_cache["k"][:, first:stop] = stored[:, :block]
        kv_cache["v"][:, first:stop] = v[:, :block]
        if new > 0:
            kv_cache["global_end_index"].fill_(end)
            kv_cache["local_end_index"].fill_(stop)
        if first == 0:
            return self.o(attention(turned_q, turned_k, v).flatten(2))
        if updating_cache:
            begin = max(0, stop - self.max_attention_size)
            keys = kv_cache["k"][:, begin:stop].clone()
            values = kv_cache["v"][:, begin:stop]
            if begin == 0:
                keys[:, :block] = self.turned(keys[:, :block], 0)
            return self.o(attention(turned_q, keys, values).flatten(2))
        room = self.max_attention_size - q.shape[1] - block
        begin = max(block, first - room)
        keys, values = kv_cache["k"][:, begin:first], kv_cache["v"][:, begin:first]
        anchor_place = place - keys.shape[1] // frame - BLOCK_FRAMES
        anchor = self.turned(kv_cache["k"][:, :block], anchor_place)
        anchor_values = kv_cache["v"][:, :block]
        all_keys = torch.cat([anchor, keys, turned_k], 1)
        all_values = torch.cat([anchor_values, values, v], 1)
        return self.o(attention(turned_q, all_keys, all_values).flatten(2))


class Block(nn.Module):
    def __init__(self, frame: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.self_attn = SelfAttention(frame)
        self.cross = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kv_cache: Any, crossattn_cache: Any, *where: Any) -> Tensor:
        x = x + self.self_attn(self.norm(x), kv_cache, *where)
        if not crossattn_cache["is_init"]:
            crossattn_cache["is_init"] = True
            text = self.cross(crossattn_cache["text"]).unflatten(-1, (HEADS, DIM))
            crossattn_cache["k"], crossattn_cache["v"] = text, text
        q = x.unflatten(-1, (HEADS, DIM))
        return x + text_attention(q, crossattn_cache["k"], crossattn_cache["v"]).flatten(2)


class Model(nn.Module):
    def __init__(self, frame: int) -> None:
        super().__init__()
        self.local_attn_size = -1
        self.blocks = nn.ModuleList(Block(frame) for _ in range(LAYERS))


class Generator(nn.Module):
    def __init__(self, frame: int) -> None:
        super().__init__()
        self.model = Model(frame)

    def forward(
        self, x: Tensor, kv_cache: Any, crossattn_cache: Any, current_start: int,
        updating_cache: bool = False,
    ) -> Tensor:  # fmt: skip
        for block, entry, text in zip(self.model.blocks, kv_cache, crossattn_cache, strict=True):
            x = block(x, entry, text, current_start, updating_cache)
        return x


class CausalInferencePipeline(nn.Module):
    def __init__(self, steps: int = 4, frame: int = FRAME) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.generator = Generator(frame)
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.data.mul_(2.0)
        self.generator.bfloat16().requires_grad_(False)
        self.num_transformer_blocks, self.frame_seq_length = LAYERS, frame
        self.num_frame_per_block, self.steps = BLOCK_FRAMES, steps
        self.local_attn_size = -1
        self.kv_cache_clean = None
        self.crossattn_cache = None

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        shape = [batch_size, BUFFER_FRAMES * self.frame_seq_length, HEADS, DIM]
        self.kv_cache_clean = [
            {
                "k": torch.zeros(shape, dtype=dtype, device=device),
                "v": torch.zeros(shape, dtype=dtype, device=device),
                "global_end_index": torch.tensor([0], dtype=torch.long, device=device),
                "local_end_index": torch.tensor([0], dtype=torch.long, device=device),
            }
            for _ in range(self.num_transformer_blocks)
        ]

    def _initialize_crossattn_cache(self, batch_size: int, dtype: Any, device: Any) -> None:
        self.crossattn_cache = [{"is_init": False} for _ in range(self.num_transformer_blocks)]

    def inference_rolling_forcing(self, noise: Tensor, text: Tensor) -> Tensor:
        """noise [B, blocks * 3 * FRAME, width]; the video, one clean block after the other."""
        if self.kv_cache_clean is None:
            self._initialize_kv_cache(
                batch_size=noise.shape[0], dtype=noise.dtype, device=noise.device
            )
            self._initialize_crossattn_cache(
                batch_size=noise.shape[0], dtype=noise.dtype, device=noise.device
            )
        else:
            for entry in self.crossattn_cache:
                entry["is_init"] = False
            for entry in self.kv_cache_clean:
                for index in ("global_end_index", "local_end_index"):
                    entry[index] = torch.tensor([0], dtype=torch.long, device=noise.device)
        for entry in self.crossattn_cache:
            entry["text"] = text
        tokens = BLOCK_FRAMES * self.frame_seq_length
        blocks = noise.shape[1] // tokens
        video, waiting = torch.zeros_like(noise), noise.clone()
        for window in range(blocks + self.steps - 1):
            first, last = max(0, window - self.steps + 1), min(blocks - 1, window)
            start, end = first * tokens, (last + 1) * tokens
            caches = (self.kv_cache_clean, self.crossattn_cache)
            video[:, start:end] = torch.tanh(self.generator(waiting[:, start:end], *caches, start))
            waiting[:, start:end] = 0.5 * waiting[:, start:end] + 0.5 * video[:, start:end]
            clean = video[:, start : start + tokens]
            self.generator(clean, *caches, start, updating_cache=True)
        return video


def noise_of(blocks: int, seed: int = 0, frame: int = FRAME) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, blocks * BLOCK_FRAMES * frame, WIDTH)
    return torch.randn(shape, generator=generator).bfloat16()


def text_of(seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 8, WIDTH, generator=generator).bfloat16()
