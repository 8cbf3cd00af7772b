"""Stages with the calling contract of FastVideo's causal Wan and Matrix-Game-2, small.

Ours, from the description of that contract: one list of dicts a call, returned by the initializer;
an entry is replaced by its `.detach()` before it is written; a window is rolled behind the sink;
the index fields are tensors or ints. Causal Wan reads its window by one slice and raises beyond 21
frames without one. Matrix-Game-2 reads [:, :e] and trims that. "relativistic" keeps keys before
their rotation and rotates the window from 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.hosts.self_forcing import causal_rope_apply, rope_table

FRAME = 8
HEADS, DIM = 2, 32
WIDTH = HEADS * DIM
LAYERS = 2


class LocalAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    """x [B, S, H, D] turned by cos, sin [S, D / 2], in the dtype of x; what causal Wan calls."""
    assert not is_neox_style
    cos, sin = (t[:, None].to(x.dtype) for t in (cos, sin))
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def rotated(x: Tensor, start: int) -> Tensor:
    """x [B, S, H, D] turned by token positions from `start` on."""
    half = x.shape[-1] // 2
    positions = torch.arange(start, start + x.shape[1], dtype=torch.float64)
    angles = positions[:, None] * 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    return _apply_rotary_emb(x, angles.cos().float(), angles.sin().float(), is_neox_style=False)


def trimmed(k: Any, v: Any, length: int, sink: int) -> tuple[Tensor, Tensor]:
    """The first `sink` and the newest tokens, `length` together, of k and v [B, S, H, D]."""
    if sink == 0 or k.shape[1] <= length:
        return k[:, -length:], v[:, -length:]
    tail = length - sink
    return tuple(torch.cat([x[:, :sink], x[:, sink:][:, -tail:]], 1) for x in (k, v))


class SelfAttention(nn.Module):
    """attn1 of both; `trims` makes it the one of Matrix-Game-2."""

    def __init__(self, local: int, sink: int, policy: str, trims: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM
        self.local_attn_size, self.sink_size = local, sink
        self.rope_cache_policy, self.trims = policy, trims
        self.attn = LocalAttention()
        self.freqs = rope_table()

    def turned(self, x: Tensor, start: int) -> Tensor:
        """Frames of FRAME tokens by Matrix-Game-2's function, tokens by that of causal Wan."""
        if not self.trims:
            return rotated(x, start).type_as(x)
        grid = torch.tensor([[x.shape[1] // FRAME, 2, FRAME // 2]])
        return causal_rope_apply(x, grid, self.freqs, start_frame=start // FRAME).type_as(x)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_cache: dict[str, Any], current_start: int,
        frame_seqlen: int,
    ) -> Tensor:  # fmt: skip
        raw = self.rope_cache_policy == "relativistic"
        if not raw:
            q, k = self.turned(q, current_start), self.turned(k, current_start)
        stored = k
        sink, new = self.sink_size * frame_seqlen, q.shape[1]
        attended = (21 if self.local_attn_size == -1 else self.local_attn_size) * frame_seqlen
        end = current_start + new
        if self.local_attn_size == -1 and end > attended:
            raise ValueError(f"local_attn_size=-1 keeps 21 frames; got {end} tokens")
        size = kv_cache["k"].shape[1]
        known, local = (int(kv_cache[f"{name}_end_index"]) for name in ("global", "local"))
        stop = local + end - known
        if self.local_attn_size != -1 and end > known and new + local > size:
            evicted = new + local - size
            rolled = local - evicted - sink
            for name in ("k", "v"):
                moved = kv_cache[name][:, sink + evicted : sink + evicted + rolled].clone()
                kv_cache[name][:, sink : sink + rolled] = moved
            stop -= evicted
        else:
            for name in ("k", "v"):
                kv_cache[name] = kv_cache[name].detach()
        kv_cache["k"][:, stop - new : stop] = stored
        kv_cache["v"][:, stop - new : stop] = v
        if self.trims:
            length = min(stop, attended)
            keys, values = trimmed(kv_cache["k"][:, :stop], kv_cache["v"][:, :stop], length, sink)
        else:
            first = max(0, stop - attended)
            keys, values = kv_cache["k"][:, first:stop], kv_cache["v"][:, first:stop]
        window = min(stop, attended)
        if raw:
            q, keys = self.turned(q, window - new), self.turned(keys, 0)
        for name, value in (("global", end), ("local", stop)):
            if isinstance(kv_cache[f"{name}_end_index"], Tensor):
                kv_cache[f"{name}_end_index"].fill_(value)
            else:
                kv_cache[f"{name}_end_index"] = value
        if not self.trims:
            return self.attn(q, keys, values)
        q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
        return nn.functional.scaled_dot_product_attention(q, keys, values).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, *attention: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attn1 = SelfAttention(*attention)

    def forward(self, x: Tensor, kv_cache: Any, start: int, frame: int) -> Tensor:
        hidden = self.norm1(x)
        q, k, v = (f(hidden).unflatten(-1, (HEADS, DIM)) for f in (self.to_q, self.to_k, self.to_v))
        out = self.attn1(q, k, v, kv_cache, start, frame_seqlen=frame)
        return x + self.to_out(out.flatten(2))


class Transformer(nn.Module):
    def __init__(self, *attention: Any) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_dim = HEADS, DIM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block(*attention) for _ in range(LAYERS))
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.data.mul_(2.0)
        self.bfloat16().requires_grad_(False)

    def forward(self, x: Tensor, kv_cache: Any, start: int, frame: int) -> Tensor:
        for block, entry in zip(self.blocks, kv_cache, strict=True):
            x = block(x, entry, start, frame)
        return x


class CausalStage:
    """The causal Wan stage. No module: a plain object that is called with a batch."""

    trims = False

    def __init__(
        self, local: int = 9, sink: int = 3, policy: str = "absolute", frame: int = FRAME,
        steps: int = 2, guided: bool = False,
    ) -> None:  # fmt: skip
        self.transformer = Transformer(local, sink, policy, self.trims)
        self.transformer_2 = None
        self.num_transformer_blocks = LAYERS
        self.num_frames_per_block, self.sliding_window_num_frames = 3, 21
        self.local_attn_size, self.sink_size = local, sink
        self.tokens, self.steps, self.guided = frame, steps, guided

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> list[Any]:
        local = self.local_attn_size
        frames = self.sliding_window_num_frames if local == -1 else local
        shape = [batch_size, frames * self.frame_seq_length, HEADS, DIM]
        return [
            {
                "k": torch.zeros(shape, dtype=dtype, device=device),
                "v": torch.zeros(shape, dtype=dtype, device=device),
                "global_end_index": torch.tensor([0], dtype=torch.long, device=device),
                "local_end_index": torch.tensor([0], dtype=torch.long, device=device),
            }
            for _ in range(self.num_transformer_blocks)
        ]

    def _initialize_crossattn_cache(self, batch_size: int, *_: Any) -> list[Any]:
        return []

    def forward(self, noise: Tensor, chunks: list[int]) -> Tensor:
        """noise [B, frames * tokens, width] in chunks of so many frames; the video."""
        self.frame_seq_length = self.tokens
        lists = [
            self._initialize_kv_cache(
                batch_size=noise.shape[0], dtype=noise.dtype, device=noise.device
            )
            for _ in range(1 + self.guided)
        ]
        out, start = [], 0
        for frames in chunks:
            x = noise[:, start : start + frames * self.tokens]
            for step in range(self.steps + 1):
                results = [self.transformer(x + i, c, start, self.tokens)
                           for i, c in enumerate(lists)]  # fmt: skip
                if step < self.steps:
                    x = 0.5 * x + 0.5 * torch.tanh(results[0] if not self.guided else sum(results))
            out.append(x)
            start += frames * self.tokens
        return torch.cat(out, 1)


class MatrixGame2Stage(CausalStage):
    trims = True

    def _initialize_action_kv_cache(self, *_: Any) -> tuple[list[Any], list[Any]]:
        return [], []


def noise_of(frames: int, seed: int = 0, tokens: int = FRAME) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, frames * tokens, WIDTH, generator=generator).bfloat16()
