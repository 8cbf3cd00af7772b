"""Pipelines with the calling contracts of LingBot-World v1-fast and v2, small, random weights.

Ours, from the description of those contracts: `generate` lets an initializer make its list, which
nothing else holds; the model is called by keywords with latents [C, F, rows, columns] and
`max_attention_size`; v1 keeps everything, v2 a window with a sink; v2 may warm up on a list that it
drops, and its pretrained model has a second list without the prompt. Under Ulysses every process
has all tokens of its share of the heads.
"""

from __future__ import annotations

import threading
import types
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.hosts import self_forcing
from tests.hosts.self_forcing import DIM, LAYERS, causal_rope_apply, rope_table, stored, weights_of

HEADS, CHANNELS = 4, 4
WIDTH = HEADS * DIM
INDICES = ("global_end_index", "local_end_index")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return self_forcing.attention(q, k, v)


class CausalAttention(nn.Module):
    def __init__(self, local_attn_size: int, sink_size: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM
        self.local_attn_size, self.sink_size = local_attn_size, sink_size
        self.freqs = rope_table()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def project(self, x: Tensor, grid: Tensor, start: int, share: slice) -> list[Tensor]:
        """Rotated q, k and v of a share of the heads."""
        q, k, v = (f(x).unflatten(-1, (HEADS, DIM))[:, :, share] for f in (self.q, self.k, self.v))
        frame = start // int(grid[0, 1:].prod())
        q = causal_rope_apply(q, grid, self.freqs, start_frame=frame).type_as(v)
        return [q, causal_rope_apply(k, grid, self.freqs, start_frame=frame).type_as(v), v]

    def store(self, kv_cache: dict[str, Any], k: Tensor, v: Tensor, start: int, frame: int) -> int:
        if self.local_attn_size != -1:
            return stored(kv_cache, k, v, start, self.sink_size * frame)
        end = start + k.shape[1]
        kv_cache["k"][:, start:end] = k
        kv_cache["v"][:, start:end] = v
        for name in INDICES:
            kv_cache[name].fill_(end)
        return end

    def forward(
        self, x: Tensor, grid: Tensor, kv_cache: Any, start: int, max_attention_size: int
    ) -> Tensor:
        q, k, v = self.project(x, grid, start, slice(None))
        stop = self.store(kv_cache, k, v, start, int(grid[0, 1:].prod()))
        first = max(0, stop - max_attention_size)
        out = attention(q, kv_cache["k"][:, first:stop], kv_cache["v"][:, first:stop])
        return self.o(out.flatten(2))


class Exchange:
    """Stands for the collective calls of Ulysses: every rank's heads, joined, at every rank."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.parts: list[Any] = [None] * ranks

    def joined(self, rank: int, part: Tensor) -> Tensor:
        self.parts[rank] = part
        self.barrier.wait()
        whole = torch.cat(self.parts, 2)
        self.barrier.wait()
        return whole


def shard(module: CausalAttention, rank: int, ranks: int, exchange: Exchange) -> None:
    """Replace the forward of an attention module, as Ulysses does."""
    share = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)

    def forward(
        self: Any, x: Tensor, grid: Tensor, kv_cache: Any, start: int, max_attention_size: int
    ) -> Tensor:
        q, k, v = self.project(x, grid, start, share)
        q, k, v = (t[:, : x.shape[1]] for t in (q, k, v))  # padding is cut off behind RoPE
        tokens = torch.tensor(k.shape[1])  # bounds of slices are tensors here
        stop = self.store(kv_cache, k, v, start, int(grid[0, 1:].prod()))
        assert stop - tokens <= kv_cache["local_end_index"]
        first = (torch.tensor(stop) - max_attention_size).clamp(min=0)
        out = attention(q, kv_cache["k"][:, first:stop], kv_cache["v"][:, first:stop])
        return self.o(exchange.joined(rank, out).flatten(2))

    module.forward = types.MethodType(forward, module)


class Block(nn.Module):
    def __init__(self, local_attn_size: int, sink_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.self_attn = CausalAttention(local_attn_size, sink_size)
        self.cross_k = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, text: Tensor, grid: Tensor, kv_cache: Any, crossattn_cache: Any, *rest: int
    ) -> Tensor:
        x = x + self.self_attn(self.norm(x), grid, kv_cache, *rest)
        if not crossattn_cache["is_init"]:
            crossattn_cache["is_init"].fill_(1)
            crossattn_cache["k"].copy_(self.cross_k(text).unflatten(-1, (HEADS, DIM)))
            crossattn_cache["v"].copy_(crossattn_cache["k"])
        q = x.unflatten(-1, (HEADS, DIM))
        return x + attention(q, crossattn_cache["k"], crossattn_cache["v"]).flatten(2)


class WorldModel(nn.Module):
    def __init__(self, local_attn_size: int, sink_size: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(dim=WIDTH, num_heads=HEADS, num_layers=LAYERS)
        self.embed, self.head = nn.Linear(CHANNELS * 4, WIDTH), nn.Linear(WIDTH, CHANNELS * 4)
        self.blocks = nn.ModuleList(Block(local_attn_size, sink_size) for _ in range(LAYERS))

    def forward(
        self, x: list[Tensor], t: Any, context: list[Tensor], kv_cache: Any = None,
        crossattn_cache: Any = None, current_start: int = 0, max_attention_size: int = 1_000_000,
        frame_seqlen: int | None = None,
    ) -> list[Tensor]:  # fmt: skip
        c, f, rows, columns = x[0].shape
        patches = x[0].reshape(c, f, rows // 2, 2, columns // 2, 2).permute(1, 2, 4, 0, 3, 5)
        tokens = self.embed(patches.reshape(1, -1, c * 4))
        grid = torch.tensor([[f, rows // 2, columns // 2]])
        for i, block in enumerate(self.blocks):
            tokens = block(
                tokens, context[0], grid, kv_cache[i], crossattn_cache[i], current_start,
                max_attention_size,
            )  # fmt: skip
        out = self.head(tokens).reshape(f, rows // 2, columns // 2, c, 2, 2)
        return [out.permute(3, 0, 1, 4, 2, 5).reshape(x[0].shape)]


class FastPipeline:
    """v1-fast: the initializer is not told how long a frame is."""

    def __init__(
        self,
        local_attn_size: int = -1,
        sink_size: int = 0,
        shards: tuple[int, int, Any] | None = None,
    ) -> None:
        self.model = weights_of(lambda: WorldModel(local_attn_size, sink_size))
        self.local_attn_size, self.sink_size = local_attn_size, sink_size
        self.patch_size, self.pipe_dtype, self.device = (1, 2, 2), torch.bfloat16, "cpu"
        self.sp_size = 1
        if shards is not None:
            rank, self.sp_size, exchange = shards
            for block in self.model.blocks:
                shard(block.self_attn, rank, self.sp_size, exchange)

    def _initialize_self_kv_cache(
        self, num_layers: int, shape: list[int], dtype: torch.dtype, device: Any
    ) -> list[dict[str, Any]]:
        return [
            {n: torch.zeros(shape, dtype=dtype, device=device) for n in ("k", "v")}
            | {n: torch.tensor([0], dtype=torch.long, device=device) for n in INDICES}
            for _ in range(num_layers)
        ]

    def _initialize_crossattn_cache(
        self, num_layers: int, shape: list[int], dtype: torch.dtype, device: Any
    ) -> list[dict[str, Any]]:
        return [
            {n: torch.zeros(shape, dtype=dtype, device=device) for n in ("k", "v")}
            | {"is_init": torch.tensor(0, dtype=torch.int32, device=device)}
            for _ in range(num_layers)
        ]

    def _lists(self, frames: int, frame: int, **more: Any) -> dict[str, Any]:
        kinds = {"num_layers": LAYERS, "dtype": self.pipe_dtype, "device": self.device}
        size = (self.local_attn_size if self.local_attn_size > -1 else frames) * frame
        shape = [1, size, HEADS // self.sp_size, DIM]
        return {
            "kv_cache": self._initialize_self_kv_cache(shape=shape, **kinds, **more),
            "crossattn_cache": self._initialize_crossattn_cache(shape=[1, 8, HEADS, DIM], **kinds),
            "max_attention_size": size,
        }

    def generate(
        self,
        noise: Tensor,
        text: Tensor,
        chunk_size: int = 3,
        max_attention_size: int | None = None,
    ) -> Tensor:
        """noise [C, F, rows, columns]; returns the video."""
        frame = noise.shape[-2] * noise.shape[-1] // 4
        calls = self._lists(noise.shape[1], frame)
        if max_attention_size is not None:
            calls["max_attention_size"] = max_attention_size
        return self._sample(noise, chunk_size, frame, [{"context": [text], **calls}], 4)

    def _sample(
        self, noise: Tensor, chunk_size: int, frame: int, branches: list[Any], steps: int
    ) -> Tensor:
        out = []
        for i, x in enumerate(noise.split(chunk_size, dim=1)):
            start = i * chunk_size * frame
            for step in range(steps + 1):
                found = [
                    self.model(x=[x], t=step, current_start=start, **calls)[0] for calls in branches
                ]
                guided = found[0] if len(found) == 1 else 2 * found[0] - found[1]
                if step < steps:
                    x = 0.5 * x + 0.5 * torch.tanh(guided)
            out.append(x)
        return torch.cat(out, 1)


class CausalPipeline(FastPipeline):
    """v2: the fast model is told the frame's length; the pretrained one has two lists."""

    def __init__(
        self, local_attn_size: int = 18, sink_size: int = 6, infer_mode: str = "causal_fast"
    ) -> None:
        super().__init__(local_attn_size, sink_size)
        self.infer_mode, self.use_chunked_kv = infer_mode, False

    def _initialize_self_kv_cache(
        self, num_layers: int, shape: list[int], dtype: torch.dtype, device: Any,
        frame_seqlen: int | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        return super()._initialize_self_kv_cache(num_layers, shape, dtype, device)

    def prewarm(self, noise: Tensor, chunk_size: int = 4) -> None:
        """One pass over a list that is dropped, of the shapes that `generate` will use."""
        frame = noise.shape[-2] * noise.shape[-1] // 4
        zeros = torch.zeros_like(noise[:, :chunk_size])
        calls = self._lists(noise.shape[1], frame, frame_seqlen=frame)
        self.model(
            x=[zeros], t=0, context=[torch.zeros(1, 8, WIDTH).bfloat16()], current_start=0,
            frame_seqlen=frame, **calls,
        )  # fmt: skip

    def generate(
        self,
        noise: Tensor,
        text: Tensor,
        chunk_size: int = 4,
        max_attention_size: int | None = None,
    ) -> Tensor:
        frame, frames = noise.shape[-2] * noise.shape[-1] // 4, noise.shape[1]
        if self.infer_mode == "causal_pretrain":
            branches = [
                {"context": [words], **self._lists(frames, frame)} for words in (text, 0 * text)
            ]
            return self._sample(noise, chunk_size, frame, branches, 2)
        calls = self._lists(frames, frame, frame_seqlen=frame)
        if max_attention_size is not None:
            calls["max_attention_size"] = max_attention_size
        branches = [{"context": [text], "frame_seqlen": frame, **calls}]
        return self._sample(noise, chunk_size, frame, branches, 4)


def noise_of(frames: int, seed: int = 0, size: tuple[int, int] = (8, 8)) -> Tensor:
    """Latents; the default size has 16 tokens a frame."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(CHANNELS, frames, *size, generator=generator).bfloat16()


def text_of(seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 8, WIDTH, generator=generator).bfloat16()
