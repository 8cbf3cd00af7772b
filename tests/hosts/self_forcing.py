"""A pipeline with the calling contract of Self-Forcing, small and with random weights.

Ours, from the description of that contract: one dict of tensors per layer, allocated once; every
denoising step and a clean pass write the same slots; the window is rolled to the left behind the
sink when a chunk does not fit; a new prompt only replaces the index tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

GRID = (4, 4)  # rows and columns
FRAME = 16  # tokens a frame
HEADS, DIM = 2, 32
LAYERS = 2


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, S, H, D] against k, v [B, T, H, D]; the name that the attention module looks up."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def rope_table() -> Tensor:
    """Turns of positions 0 to 1023, complex [1024, D/2]: frames, rows and columns."""
    angles = []
    for pairs in (DIM // 2 - 2 * (DIM // 6), DIM // 6, DIM // 6):
        speeds = 100.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        angles.append(torch.arange(1024, dtype=torch.float64)[:, None] * speeds)
    joined = torch.cat(angles, 1)
    return torch.polar(torch.ones_like(joined), joined)


def causal_rope_apply(x: Tensor, grid_sizes: Tensor, freqs: Tensor, start_frame: int = 0) -> Tensor:
    """x [B, S, H, D], turned by frame, row and column in FP64; as the attention module calls it."""
    pairs = x.shape[3] // 2
    over = freqs.split([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3], dim=1)
    turned = []
    for row, (f, h, w) in zip(x, grid_sizes.tolist(), strict=True):
        numbers = torch.view_as_complex(row.double().unflatten(-1, (pairs, 2)).contiguous())
        turns = [
            over[0][start_frame : start_frame + f, None, None].expand(f, h, w, -1),
            over[1][None, :h, None].expand(f, h, w, -1),
            over[2][None, None, :w].expand(f, h, w, -1),
        ]
        numbers = numbers * torch.cat(turns, -1).reshape(f * h * w, 1, pairs)
        turned.append(torch.view_as_real(numbers).flatten(2))
    return torch.stack(turned).type_as(x)


class SelfAttention(nn.Module):
    def __init__(self, local_attn_size: int, sink_size: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM
        self.local_attn_size, self.sink_size = local_attn_size, sink_size
        self.max_attention_size = (21 if local_attn_size == -1 else local_attn_size) * FRAME
        self.freqs = rope_table()
        width = HEADS * DIM
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, kv_cache: dict[str, Any], current_start: int) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, DIM)) for f in (self.q, self.k, self.v))
        grid, frame = torch.tensor([[x.shape[1] // FRAME, *GRID]] * len(x)), current_start // FRAME
        q = causal_rope_apply(q, grid, self.freqs, start_frame=frame).type_as(v)
        k = causal_rope_apply(k, grid, self.freqs, start_frame=frame).type_as(v)
        sink = self.sink_size * FRAME
        end, new = current_start + q.shape[1], q.shape[1]
        size = kv_cache["k"].shape[1]
        local, known = kv_cache["local_end_index"].item(), kv_cache["global_end_index"].item()
        stop = local + end - known
        if self.local_attn_size != -1 and end > known and new + local > size:
            evicted = new + local - size
            rolled = local - evicted - sink
            for name in ("k", "v"):
                moved = kv_cache[name][:, sink + evicted : sink + evicted + rolled].clone()
                kv_cache[name][:, sink : sink + rolled] = moved
            stop -= evicted
        start = stop - new
        kv_cache["k"][:, start:stop] = k
        kv_cache["v"][:, start:stop] = v
        first = max(0, stop - self.max_attention_size)
        out = attention(q, kv_cache["k"][:, first:stop], kv_cache["v"][:, first:stop])
        kv_cache["global_end_index"].fill_(end)
        kv_cache["local_end_index"].fill_(stop)
        return self.o(out.flatten(2))


class Block(nn.Module):
    def __init__(self, local_attn_size: int, sink_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HEADS * DIM)
        self.self_attn = SelfAttention(local_attn_size, sink_size)
        self.cross_k = nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, x: Tensor, kv_cache: Any, crossattn_cache: Any, start: int) -> Tensor:
        x = x + self.self_attn(self.norm(x), kv_cache, start)
        if not crossattn_cache["is_init"]:
            crossattn_cache["is_init"] = True
            crossattn_cache["k"].copy_(
                self.cross_k(crossattn_cache["text"]).unflatten(-1, (HEADS, DIM))
            )
            crossattn_cache["v"].copy_(crossattn_cache["k"])
        q = x.unflatten(-1, (HEADS, DIM))
        return x + attention(q, crossattn_cache["k"], crossattn_cache["v"]).flatten(2)


class Model(nn.Module):
    def __init__(self, local_attn_size: int, sink_size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(local_attn_size, sink_size) for _ in range(LAYERS))

    def forward(self, x: Tensor, kv_cache: Any, crossattn_cache: Any, current_start: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, kv_cache[i], crossattn_cache[i], current_start)
        return x


class Generator(nn.Module):
    def __init__(self, local_attn_size: int, sink_size: int) -> None:
        super().__init__()
        self.model = Model(local_attn_size, sink_size)

    def forward(self, *args: Any) -> Tensor:
        return self.model(*args)


class CausalInferencePipeline(nn.Module):
    """Few steps, one list of caches."""

    LISTS = ("kv_cache1",)

    def __init__(self, local_attn_size: int = -1, sink_size: int = 0, steps: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.generator = Generator(local_attn_size, sink_size)
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.data.mul_(2.0)
        self.generator.bfloat16().requires_grad_(False)
        self.num_transformer_blocks, self.frame_seq_length = LAYERS, FRAME
        self.local_attn_size, self.steps = local_attn_size, steps
        self.crossattn_cache = None
        for name in self.LISTS:
            setattr(self, name, None)

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        frames = 21 if self.local_attn_size == -1 else self.local_attn_size
        shape = [batch_size, frames * FRAME, HEADS, DIM]
        for name in self.LISTS:
            entries = []
            for _ in range(self.num_transformer_blocks):
                entry = {n: torch.zeros(shape, dtype=dtype, device=device) for n in ("k", "v")}
                for index in ("global_end_index", "local_end_index"):
                    entry[index] = torch.tensor([0], dtype=torch.long, device=device)
                entries.append(entry)
            setattr(self, name, entries)

    def _initialize_crossattn_cache(self, batch_size: int, dtype: Any, device: Any) -> None:
        self.crossattn_cache = [
            {
                **{
                    n: torch.zeros([batch_size, 8, HEADS, DIM], dtype=dtype, device=device)
                    for n in "kv"
                },
                "is_init": False,
            }
            for _ in range(self.num_transformer_blocks)
        ]

    def inference(self, noise: Tensor, chunks: list[int], text: Tensor) -> Tensor:
        """noise [B, frames * FRAME, width] in chunks of so many frames; returns the video."""
        if getattr(self, self.LISTS[0]) is None:
            self._initialize_kv_cache(noise.shape[0], noise.dtype, noise.device)
            self._initialize_crossattn_cache(noise.shape[0], noise.dtype, noise.device)
        else:
            for i in range(self.num_transformer_blocks):
                self.crossattn_cache[i]["is_init"] = False
                for name in self.LISTS:
                    for index in ("global_end_index", "local_end_index"):
                        getattr(self, name)[i][index] = torch.tensor(
                            [0], dtype=torch.long, device=noise.device
                        )
        for entry in self.crossattn_cache:
            entry["text"] = text
        out, start = [], 0
        for frames in chunks:
            x = noise[:, start : start + frames * FRAME]
            for step in range(self.steps + 1):
                results = [
                    self.generator(x, getattr(self, name), self.crossattn_cache, start)
                    for name in self.LISTS
                ]
                guided = results[0] if len(results) == 1 else 2 * results[0] - results[1]
                if step < self.steps:
                    x = 0.5 * x + 0.5 * torch.tanh(guided)
            out.append(x)
            start += frames * FRAME
        return torch.cat(out, 1)


class CausalDiffusionInferencePipeline(CausalInferencePipeline):
    """With guidance: a positive and a negative list."""

    LISTS = ("kv_cache_pos", "kv_cache_neg")


def noise_of(frames: int, seed: int = 0, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, frames * FRAME, HEADS * DIM, generator=generator).bfloat16()


def text_of(seed: int = 9, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 8, HEADS * DIM, generator=generator).bfloat16()
