"""A pipeline with the calling contract of Self-Forcing, small and with random weights.

Ours, from the description of that contract: one dict of tensors per layer, allocated once; every
denoising step and a clean pass write the same slots; the window is rolled to the left behind the
sink when a chunk does not fit; a new prompt only replaces the index tensors.
"""

from __future__ import annotations

from collections.abc import Callable
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
        turns = torch.cat(turns, -1).reshape(f * h * w, 1, pairs)
        numbers = numbers * turns.to(x.device)
        turned.append(torch.view_as_real(numbers).flatten(2))
    return torch.stack(turned).type_as(x)


def stored(
    cache: dict[str, Any], k: Tensor, v: Tensor, start: int, sink: int = 0, rolls: bool = True
) -> int:
    """Write k, v [B, S, H, D] at token (or frame) `start`; returns where they end in the buffer.

    Where they do not fit, what lies behind the sink moves to the left first.
    """
    end, new, size = start + k.shape[1], k.shape[1], cache["k"].shape[1]
    local, known = cache["local_end_index"].item(), cache["global_end_index"].item()
    stop = local + end - known
    if rolls and end > known and new + local > size:
        evicted = new + local - size
        rolled = local - evicted - sink
        for name in ("k", "v"):
            moved = cache[name][:, sink + evicted : sink + evicted + rolled].clone()
            cache[name][:, sink : sink + rolled] = moved
        stop -= evicted
    cache["k"][:, stop - new : stop] = k
    cache["v"][:, stop - new : stop] = v
    cache["global_end_index"].fill_(end)
    cache["local_end_index"].fill_(stop)
    return stop


class SelfAttention(nn.Module):
    def __init__(self, local_attn_size: int, sink_size: int, grid: tuple[int, int] = GRID) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM
        self.local_attn_size, self.sink_size = local_attn_size, sink_size
        self.grid, self.frame = grid, grid[0] * grid[1]
        self.max_attention_size = (21 if local_attn_size == -1 else local_attn_size) * self.frame
        self.freqs = rope_table()
        width = HEADS * DIM
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def grid_sizes(self, x: Tensor) -> Tensor:
        return torch.tensor([[x.shape[1] // self.frame, *self.grid]] * len(x))

    def forward(self, x: Tensor, kv_cache: dict[str, Any], current_start: int) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, DIM)) for f in (self.q, self.k, self.v))
        grid, frame = self.grid_sizes(x), current_start // self.frame
        q = causal_rope_apply(q, grid, self.freqs, start_frame=frame).type_as(v)
        k = causal_rope_apply(k, grid, self.freqs, start_frame=frame).type_as(v)
        rolls, sink = self.local_attn_size != -1, self.sink_size * self.frame
        stop = stored(kv_cache, k, v, current_start, sink, rolls)
        first = max(0, stop - self.max_attention_size)
        out = attention(q, kv_cache["k"][:, first:stop], kv_cache["v"][:, first:stop])
        return self.o(out.flatten(2))


class Block(nn.Module):
    def __init__(self, *window: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HEADS * DIM)
        self.self_attn = SelfAttention(*window)
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
    def __init__(self, *window: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*window) for _ in range(LAYERS))

    def forward(self, x: Tensor, kv_cache: Any, crossattn_cache: Any, current_start: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, kv_cache[i], crossattn_cache[i], current_start)
        return x


class Generator(nn.Module):
    def __init__(self, *window: Any) -> None:
        super().__init__()
        self.model = Model(*window)

    def forward(self, *args: Any) -> Tensor:
        return self.model(*args)


def weights_of(make: Callable[[], nn.Module]) -> nn.Module:
    """A BF16 module whose weights are the same every time, and large enough to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make()
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2.0)
    return module.bfloat16().requires_grad_(False)


class CausalInferencePipeline(nn.Module):
    """Few steps, one list of caches."""

    LISTS = ("kv_cache1",)

    def __init__(
        self,
        local_attn_size: int = -1,
        sink_size: int = 0,
        steps: int = 2,
        grid: tuple[int, int] = GRID,
    ) -> None:
        super().__init__()
        self.generator = weights_of(lambda: Generator(local_attn_size, sink_size, grid))
        self.num_transformer_blocks, self.frame_seq_length = LAYERS, grid[0] * grid[1]
        self.local_attn_size, self.steps = local_attn_size, steps
        self.crossattn_cache = None
        for name in self.LISTS:
            setattr(self, name, None)

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        frames = 21 if self.local_attn_size == -1 else self.local_attn_size
        shape = [batch_size, frames * self.frame_seq_length, HEADS, DIM]
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
        """noise [B, frames * tokens, width] in chunks of so many frames; returns the video."""
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
            x = noise[:, start : start + frames * self.frame_seq_length]
            for step in range(self.steps + 1):
                results = [
                    self.generator(x, getattr(self, name), self.crossattn_cache, start)
                    for name in self.LISTS
                ]
                guided = results[0] if len(results) == 1 else 2 * results[0] - results[1]
                if step < self.steps:
                    x = 0.5 * x + 0.5 * torch.tanh(guided)
            out.append(x)
            start += frames * self.frame_seq_length
        return torch.cat(out, 1)


class CausalDiffusionInferencePipeline(CausalInferencePipeline):
    """With guidance: a positive and a negative list."""

    LISTS = ("kv_cache_pos", "kv_cache_neg")


def noise_of(frames: int, seed: int = 0, batch: int = 1, frame: int = FRAME) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, frames * frame, HEADS * DIM, generator=generator).bfloat16()


def text_of(seed: int = 9, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 8, HEADS * DIM, generator=generator).bfloat16()
