"""A pipeline with the calling contract of Matrix-Game 2, small and with random weights.

Ours, from the description of that contract: the caches of Self-Forcing, one of mouse actions
[B * tokens, window, heads, dim] and one of the keyboard's [B, window, heads, dim], both indexed in
frames and rolled by themselves; grid sizes of one dimension; three noisy passes and a clean one;
all caches made anew in every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.hosts import self_forcing
from tests.hosts.self_forcing import DIM, HEADS, LAYERS, SelfAttention, stored, weights_of

GRID = (4, 5)
ACTION_HEADS, ACTION_DIM = 4, 16
WIDTH = HEADS * DIM
CACHES = ("kv_cache1", "kv_cache_mouse", "kv_cache_keyboard", "crossattn_cache")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return self_forcing.attention(q, k, v)


def causal_rope_apply(x: Tensor, grid_sizes: Tensor, freqs: Tensor, start_frame: int = 0) -> Tensor:
    """As in Self-Forcing, but one grid [3] for the whole batch."""
    frames, rows, columns = grid_sizes.tolist()
    grids = torch.tensor([[frames, rows, columns]] * len(x))
    return self_forcing.causal_rope_apply(x, grids, freqs, start_frame)


class GameAttention(SelfAttention):
    def forward(self, x: Tensor, kv_cache: dict[str, Any], current_start: int) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, DIM)) for f in (self.q, self.k, self.v))
        grid, frame = self.grid_sizes(x)[0], current_start // self.frame
        q = causal_rope_apply(q, grid, self.freqs, start_frame=frame).type_as(v)
        k = causal_rope_apply(k, grid, self.freqs, start_frame=frame).type_as(v)
        stop = stored(kv_cache, k, v, current_start, self.sink_size * self.frame)
        first = max(0, stop - self.max_attention_size)
        out = attention(q, kv_cache["k"][:, first:stop], kv_cache["v"][:, first:stop])
        return self.o(out.flatten(2))


class Actions(nn.Module):
    """Mouse: each place over the frames of the window. Keyboard: every token over them."""

    def __init__(self) -> None:
        super().__init__()
        inner = ACTION_HEADS * ACTION_DIM
        self.mouse_q, self.keyboard_q = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner)
        self.mouse_kv = nn.Linear(WIDTH + 2, 2 * inner)
        self.keyboard_kv = nn.Linear(4, 2 * inner)
        self.mouse_o, self.keyboard_o = nn.Linear(inner, WIDTH), nn.Linear(inner, WIDTH)

    def forward(
        self, x: Tensor, mouse: Tensor, keyboard: Tensor, caches: list[Any], start_frame: int
    ) -> Tensor:
        batch, frames = len(x), mouse.shape[1]
        heads = (ACTION_HEADS, ACTION_DIM)
        # [B * tokens, F, C]
        places = x.unflatten(1, (frames, -1)).transpose(1, 2).flatten(0, 1)
        moved = mouse.repeat_interleave(len(places) // batch, 0)
        k, v = self.mouse_kv(torch.cat([places, moved], -1)).chunk(2, -1)
        k, v = k.unflatten(-1, heads), v.unflatten(-1, heads)
        stop = stored(caches[0], k, v, start_frame)
        q = self.mouse_q(places).unflatten(-1, heads)
        out = attention(q, caches[0]["k"][:, :stop], caches[0]["v"][:, :stop])
        out = self.mouse_o(out.flatten(2)).unflatten(0, (batch, -1)).transpose(1, 2).flatten(1, 2)
        x = x + out
        k, v = self.keyboard_kv(keyboard).chunk(2, -1)
        stop = stored(caches[1], k.unflatten(-1, heads), v.unflatten(-1, heads), start_frame)
        q = self.keyboard_q(x).unflatten(-1, heads)
        out = attention(q, caches[1]["k"][:, :stop], caches[1]["v"][:, :stop])
        return x + self.keyboard_o(out.flatten(2))


class GameBlock(nn.Module):
    def __init__(self, local_attn_size: int, sink_size: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.self_attn = GameAttention(local_attn_size, sink_size, grid)
        self.cross_q = nn.Linear(WIDTH, WIDTH)
        self.action_model = Actions()

    def forward(
        self, x: Tensor, mouse: Tensor, keyboard: Tensor, caches: list[Any], start: int
    ) -> Tensor:
        x = x + self.self_attn(self.norm(x), caches[0], start)
        if not caches[3]["is_init"]:
            caches[3]["is_init"] = True
            caches[3]["k"].fill_(0.5)
            caches[3]["v"].fill_(0.25)
        q = self.cross_q(x).unflatten(-1, (HEADS, DIM))
        x = x + attention(q, caches[3]["k"], caches[3]["v"]).flatten(2)
        return self.action_model(x, mouse, keyboard, caches[1:3], start // self.self_attn.frame)


class GameModel(nn.Module):
    def __init__(self, *window: Any) -> None:
        super().__init__()
        self.local_attn_size = window[0]
        self.blocks = nn.ModuleList(GameBlock(*window) for _ in range(LAYERS))

    def forward(self, x: Tensor, mouse: Tensor, keyboard: Tensor, lists: Any, start: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, mouse, keyboard, [entries[i] for entries in lists], start)
        return x


class GameGenerator(nn.Module):
    def __init__(self, *window: Any) -> None:
        super().__init__()
        self.model = GameModel(*window)

    def forward(self, *args: Any) -> Tensor:
        return self.model(*args)


class CausalInferencePipeline(nn.Module):
    def __init__(self, local_attn_size: int = 6, grid: tuple[int, int] = GRID) -> None:
        super().__init__()
        self.generator = weights_of(lambda: GameGenerator(local_attn_size, 0, grid))
        self.num_transformer_blocks, self.frame_seq_length = LAYERS, grid[0] * grid[1]
        self.local_attn_size = self.generator.model.local_attn_size
        for name in CACHES[:3]:
            setattr(self, name, None)

    def _entries(self, shape: list[int], dtype: torch.dtype, device: Any) -> list[dict[str, Any]]:
        return [
            {n: torch.zeros(shape, dtype=dtype, device=device) for n in ("k", "v")}
            | {
                index: torch.tensor([0], dtype=torch.long, device=device)
                for index in ("global_end_index", "local_end_index")
            }
            for _ in range(self.num_transformer_blocks)
        ]

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        size = self.local_attn_size * self.frame_seq_length
        self.kv_cache1 = self._entries([batch_size, size, HEADS, DIM], dtype, device)

    def _initialize_kv_cache_mouse_and_keyboard(
        self, batch_size: int, dtype: torch.dtype, device: Any
    ) -> None:
        shape = [self.local_attn_size, ACTION_HEADS, ACTION_DIM]
        places = batch_size * self.frame_seq_length
        self.kv_cache_keyboard = self._entries([batch_size, *shape], dtype, device)
        self.kv_cache_mouse = self._entries([places, *shape], dtype, device)

    def _initialize_crossattn_cache(self, batch_size: int, dtype: Any, device: Any) -> None:
        entries = self._entries([batch_size, 7, HEADS, DIM], dtype, device)
        self.crossattn_cache = [{"k": e["k"], "v": e["v"], "is_init": False} for e in entries]

    def inference(self, noise: Tensor, mouse: Tensor, keyboard: Tensor) -> Tensor:
        """noise [B, F * tokens, C]; mouse [B, F, 2]; keyboard [B, F, 4]; chunks of 3 frames."""
        self.kv_cache1 = self.kv_cache_keyboard = self.kv_cache_mouse = self.crossattn_cache = None
        made = {"batch_size": len(noise), "dtype": noise.dtype, "device": noise.device}
        self._initialize_kv_cache(**made)
        self._initialize_kv_cache_mouse_and_keyboard(**made)
        self._initialize_crossattn_cache(**made)
        out = []
        for first in range(0, mouse.shape[1], 3):
            start, frames = first * self.frame_seq_length, slice(first, first + 3)
            x = noise[:, start : start + 3 * self.frame_seq_length]
            lists = [getattr(self, name) for name in CACHES]
            for step in range(4):
                result = self.generator(x, mouse[:, frames], keyboard[:, frames], lists, start)
                if step < 3:
                    x = 0.5 * x + 0.5 * torch.tanh(result)
            out.append(x)
        return torch.cat(out, 1)


def inputs_of(frames: int, seed: int = 0, batch: int = 1, frame: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(frames * frame, WIDTH), (frames, 2), (frames, 4)]
    return [torch.randn(batch, *shape, generator=generator).bfloat16() for shape in shapes]
