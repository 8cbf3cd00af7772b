"""Transformers with the calling contract of HY-WorldPlay, small and with random weights.

Ours, from a description of that contract, without a look at the host's code: a call with
`is_cache=True` over selected clean frames, renumbered from 0, returns a new list of dicts; keys and
values exist in a RoPE and a PRoPE version, side by side [B, H, S, 2D] or on the batch axis
[2B, H, S, D]; each version is attended by itself. The second kind has text keys in the same dict.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FRAME = 16  # tokens a frame
HEADS, DIM = 2, 32
WIDTH = HEADS * DIM
LAYERS = 2


def sageattn(q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND") -> Tensor:
    """Attention of q [B, H, S, D] by the name that the attention module looks up."""
    assert tensor_layout == "HND"
    return nn.functional.scaled_dot_product_attention(q, k, v)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x [B, H, S, D] with its pairs turned by angles [S, D / 2]."""
    a, b = x.float().chunk(2, -1)
    pairs = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    return torch.cat(pairs, -1).type_as(x)


def rope(x: Tensor, start: int) -> Tensor:
    """By the token's frame, counted from `start`."""
    frames = start + torch.arange(x.shape[2]) // FRAME
    return turned(x, frames[:, None] * 30.0 ** -(torch.arange(DIM // 2) / (DIM // 2)))


def prope(x: Tensor, cameras: Tensor) -> Tensor:
    """By the camera [S] of the token's frame; values are turned as well."""
    return turned(x, cameras[:, None] * torch.linspace(1, 2, DIM // 2))


class Attention(nn.Module):
    def __init__(self, on_batch_axis: bool) -> None:
        super().__init__()
        self.on_batch_axis = on_batch_axis
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.text = nn.Linear(WIDTH, 2 * WIDTH)
        self.axis = 0 if on_batch_axis else 3

    def forward(
        self, x: Tensor, text: Tensor, cameras: Tensor, start: int, cache: Any, is_cache: bool
    ) -> tuple[Tensor, dict[str, Any] | None]:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4).unbind(0)
        axis = self.axis
        q = torch.cat([rope(q, start), prope(q, cameras)], axis)
        k = torch.cat([rope(k, start), prope(k, cameras)], axis)
        v = torch.cat([v, prope(v, cameras)], axis)
        if self.on_batch_axis:
            return self.with_text(q, k, v, text, cache, is_cache)
        stored = {"k": k, "v": v} if is_cache else None
        if not is_cache and cache["k"] is not None:
            k, v = torch.cat([cache["k"], k], dim=2), torch.cat([cache["v"], v], dim=2)
        halves = zip(q.chunk(2, 3), k.chunk(2, 3), v.chunk(2, 3), strict=True)
        joined = torch.cat([sageattn(*half, tensor_layout="HND") for half in halves], 3)
        return self.out(joined.transpose(1, 2).flatten(2)), stored

    def with_text(
        self, q: Tensor, k: Tensor, v: Tensor, text: Tensor, cache: Any, is_cache: bool
    ) -> tuple[Tensor, dict[str, Any] | None]:
        k_txt, v_txt = self.text(text).unflatten(-1, (2, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        k_txt, v_txt = (t.repeat(2, 1, 1, 1) for t in (k_txt, v_txt))
        if is_cache:
            stored = {"k_vision": k, "v_vision": v, "k_txt": k_txt, "v_txt": v_txt}
        else:
            stored = None
            k_txt, v_txt = cache.get("k_txt", k_txt), cache.get("v_txt", v_txt)
            if cache["k_vision"] is not None:
                k = torch.cat([cache["k_vision"], k], dim=2)
                v = torch.cat([cache["v_vision"], v], dim=2)
        k, v = torch.cat([k_txt, k], dim=2), torch.cat([v_txt, v], dim=2)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        out = torch.cat(out.chunk(2, 0), 3)
        return self.out(out.transpose(1, 2).flatten(2)), stored


class Block(nn.Module):
    def __init__(self, on_batch_axis: bool) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention(on_batch_axis)
        self.cross = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, text: Tensor, *args: Any) -> tuple[Tensor, Any]:
        out, stored = self.attn(self.norm(x), text, *args)
        x = x + out
        k, v = self.cross(text).unflatten(-1, (2, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        q = x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        return x + sageattn(q, k, v).transpose(1, 2).flatten(2), stored


class Transformer(nn.Module):
    def __init__(self, on_batch_axis: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block(on_batch_axis) for _ in range(LAYERS))
        self.bfloat16().requires_grad_(False)
        self.names = ("k_vision", "v_vision") if on_batch_axis else ("k", "v")

    def forward(
        self,
        x: Tensor,
        text: Tensor,
        cameras: Tensor,
        start: int = 0,
        kv_cache: Any = None,
        is_cache: bool = False,
    ) -> Any:
        found = []
        for i, block in enumerate(self.blocks):
            x, stored = block(x, text, cameras, start, None if is_cache else kv_cache[i], is_cache)
            found.append(stored)
        return found if is_cache else x


class WorldPlayPipeline:
    """Chunks of 4 frames; memory gives the newest `recent` frames and `retrieved` older ones."""

    def __init__(
        self,
        on_batch_axis: bool = False,
        branches: int = 1,
        recent: int = 6,
        retrieved: int = 2,
        steps: int = 3,
    ) -> None:
        self.transformer = Transformer(on_batch_axis)
        self.recent, self.retrieved, self.steps = recent, retrieved, steps
        self._kv_caches: list[Any] = [None] * branches
        self.interleaved = False

    def selected(self, done: int) -> list[int]:
        """Frames for the next chunk; not contiguous once there are more than are held."""
        older = max(0, done - self.recent)
        step = max(1, older // max(1, self.retrieved))
        return [*range(0, older, step)][: self.retrieved] + [*range(older, done)]

    def __call__(self, noise: Tensor, texts: list[Tensor], cameras: Tensor) -> Tensor:
        """noise [B, frames · FRAME, width], cameras [frames]."""
        names = self.transformer.names
        for branch in range(len(self._kv_caches)):
            self._kv_caches[branch] = [dict.fromkeys(names) for _ in range(LAYERS)]
        per_frame, done = list(noise.split(FRAME, 1)), 0
        turns = cameras.repeat_interleave(FRAME)
        while done < len(per_frame):
            chosen = self.selected(done)
            x = torch.cat(per_frame[done : done + 4], 1)
            span = slice(done * FRAME, done * FRAME + x.shape[1])
            for step in range(self.steps):
                results = []
                for branch, text in enumerate(texts):
                    if step == 0 and done and (self.interleaved or branch == 0):
                        for other in [branch] if self.interleaved else range(len(texts)):
                            self.rebuild(other, texts[other], per_frame, chosen, turns)
                    results.append(
                        self.transformer(x, text, turns[span], len(chosen), self._kv_caches[branch])
                    )
                guided = results[0] if len(results) == 1 else 2 * results[0] - results[1]
                x = 0.5 * x + 0.5 * torch.tanh(guided)
            per_frame[done : done + 4] = x.split(FRAME, 1)
            done += 4
        return torch.cat(per_frame, 1)

    def rebuild(
        self, branch: int, text: Tensor, per_frame: list[Tensor], chosen: list[int], turns: Tensor
    ) -> None:
        clean = torch.cat([per_frame[frame] for frame in chosen], 1)
        cameras = torch.cat([turns[frame * FRAME : (frame + 1) * FRAME] for frame in chosen])
        self._kv_caches[branch] = self.transformer(clean, text, cameras, is_cache=True)


def noise_of(frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, frames * FRAME, WIDTH, generator=generator).bfloat16()


def texts_of(branches: int = 1, seed: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 8, WIDTH, generator=generator).bfloat16() for _ in range(branches)]


def cameras_of(frames: int, seed: int = 5) -> Tensor:
    return torch.randn(frames, generator=torch.Generator().manual_seed(seed)).cumsum(0) * 0.1
