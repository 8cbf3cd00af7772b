"""A pipeline with the calling contract of LongLive 2.0, small and with random weights.

Ours, from the description of that contract: attention clones the whole cache, rolls and writes the
clone, and prepends its sink where the window starts behind it; what has to change in the cache is
collected and applied after all layers. Two lists are always allocated. An entry also has pinned
indices and a flag for the host's own quantization. Window and sink are put on the attention modules
for the length of a call.
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


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, S, H, D] against k, v [B, T, H, D]; the name that self-attention looks up."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, frame: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.frame = HEADS, DIM, frame
        self.local_attn_size, self.sink_size, self.max_attention_size = 24, 0, 24 * frame
        self.freqs = rope_table()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def turned(self, x: Tensor, start: int) -> Tensor:
        grid = torch.tensor([[x.shape[1] // self.frame, 2, self.frame // 2]])
        frame = start // self.frame
        return causal_rope_apply(x, grid, self.freqs, start_frame=frame).type_as(x)

    def forward(self, x: Tensor, kv_cache: Any, start: int, relative: bool) -> tuple[Tensor, Any]:
        q, k, v = (f(x).unflatten(-1, (HEADS, DIM)) for f in (self.q, self.k, self.v))
        new, end, sink = q.shape[1], start + q.shape[1], self.sink_size * self.frame
        stored = k if relative else self.turned(k, start)
        assert not kv_cache.get("quantized", False)
        assert kv_cache["pinned_start"].item() == -1
        assert kv_cache["pinned_len"].item() == 0
        size = kv_cache["k"].shape[1]
        known, local = (kv_cache[f"{name}_end_index"].item() for name in ("global", "local"))
        stop, move = local + end - known, None
        keys, values = kv_cache["k"].clone(), kv_cache["v"].clone()
        if end > known and new + local > size:
            evicted = new + local - size
            move = (sink, evicted, local - evicted - sink)
            stop -= evicted
            for x in (keys, values):
                rolled(x, *move)
        keys[:, stop - new : stop] = stored
        values[:, stop - new : stop] = v
        first = max(0, stop - self.max_attention_size)
        if sink > 0 and first > 0:
            near = max(sink, stop - self.max_attention_size + sink)
            keys, values = (torch.cat([x[:, :sink], x[:, near:stop]], 1) for x in (keys, values))
        else:
            keys, values = keys[:, first:stop], values[:, first:stop]
        place = keys.shape[1] - new if relative else start
        keys = self.turned(keys, 0) if relative else keys
        out = self.o(attention(self.turned(q, place), keys, values).flatten(2))
        return out, (move, stop - new, stop, end, stored, v)


def rolled(x: Any, sink: int, evicted: int, length: int) -> None:
    x[:, sink : sink + length] = x[:, sink + evicted : sink + evicted + length].clone()


class Block(nn.Module):
    def __init__(self, frame: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.self_attn = SelfAttention(frame)

    def forward(self, x: Tensor, *cache: Any) -> tuple[Tensor, Any]:
        out, update = self.self_attn(self.norm(x), *cache)
        return x + out, update


class Model(nn.Module):
    def __init__(self, frame: int) -> None:
        super().__init__()
        self.use_relative_rope = False
        self.blocks = nn.ModuleList(Block(frame) for _ in range(LAYERS))

    def forward(self, x: Tensor, kv_cache: Any, current_start: int) -> Tensor:
        updates = []
        for block, entry in zip(self.blocks, kv_cache, strict=True):
            x, update = block(x, entry, current_start, self.use_relative_rope)
            updates.append(update)
        for entry, (move, first, stop, end, k, v) in zip(kv_cache, updates, strict=True):
            if move is not None:
                rolled(entry["k"], *move)
                rolled(entry["v"], *move)
            entry["k"][:, first:stop] = k
            entry["v"][:, first:stop] = v
            entry["global_end_index"].fill_(end)
            entry["local_end_index"].fill_(stop)
        return x


class Generator(nn.Module):
    def __init__(self, frame: int) -> None:
        super().__init__()
        self.model = Model(frame)

    def forward(self, *args: Any) -> Tensor:
        return self.model(*args)


class CausalDiffusionInferencePipeline(nn.Module):
    def __init__(
        self, window: int = 8, sink: int = 2, chunk: int = 2, frame: int = FRAME, steps: int = 2,
        guidance_scale: float = 1.0, relative: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.generator = Generator(frame)
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.data.mul_(2.0)
        self.generator.bfloat16().requires_grad_(False)
        self.num_transformer_blocks, self.frame_seq_length = LAYERS, frame
        self.num_frame_per_block, self.steps = chunk, steps
        self.local_attn_size, self.sink_size = window, sink
        self.quantize_kv = self.multi_shot_sink = self.shot_clean_recache = False
        self.use_relative_rope, self.guidance_scale = relative, guidance_scale
        self.kv_cache_pos = self.kv_cache_neg = None

    @property
    def _dit_model(self) -> Model:
        return self.generator.model

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        shape = [batch_size, self.local_attn_size * self.frame_seq_length, HEADS, DIM]
        block = self.num_frame_per_block * self.frame_seq_length
        for name in ("kv_cache_pos", "kv_cache_neg"):
            entries = []
            for _ in range(self.num_transformer_blocks):
                entry = {n: torch.zeros(shape, dtype=dtype, device=device) for n in ("k", "v")}
                for index, value in (
                    ("global_end_index", 0), ("local_end_index", 0), ("pinned_start", -1),
                    ("pinned_len", 0),
                ):  # fmt: skip
                    entry[index] = torch.tensor([value], dtype=torch.long, device=device)
                entry |= {"quantized": False, "block_token_size": block, "num_heads": HEADS}
                entry |= {"max_blocks": shape[1] // block, "num_filled_blocks": 0}
                entries.append(entry)
            setattr(self, name, entries)

    def _initialize_crossattn_cache(self, batch_size: int, dtype: Any, device: Any) -> None:
        pass

    def _pin_current_chunk(self, kv_cache: Any, current_num_frames: int) -> None:
        tokens = current_num_frames * self.frame_seq_length
        for entry in kv_cache:
            entry["pinned_start"].fill_(int(kv_cache[0]["local_end_index"].item()) - tokens)
            entry["pinned_len"].fill_(min(self.sink_size * self.frame_seq_length, tokens))

    def _zero_kv_data(self, kv_cache: Any, current_start_tokens: int) -> None:
        for entry in kv_cache:
            entry["local_end_index"].fill_(0)
            entry["global_end_index"].fill_(current_start_tokens)

    def inference(self, noise: Tensor, scene_cuts: tuple[int, ...] = ()) -> Tensor:
        """noise [B, frames * FRAME, width]; the video. scene_cuts: chunks that start a scene."""
        if self.kv_cache_pos is None:
            self._initialize_kv_cache(
                batch_size=noise.shape[0], dtype=noise.dtype, device=noise.device
            )
        else:
            for entry in [*self.kv_cache_pos, *self.kv_cache_neg]:
                for index in ("global_end_index", "local_end_index"):
                    entry[index] = torch.tensor([0], dtype=torch.long, device=noise.device)
                entry["pinned_start"].fill_(-1)
                entry["pinned_len"].zero_()
        modules = [block.self_attn for block in self._dit_model.blocks]
        before = [(m.max_attention_size, m.sink_size) for m in modules]
        for module in modules:
            module.max_attention_size = self.local_attn_size * self.frame_seq_length
            module.sink_size = self.sink_size
        self._dit_model.use_relative_rope = self.use_relative_rope
        try:
            return self._inference_inner(noise, scene_cuts)
        finally:
            self._dit_model.use_relative_rope = False
            for module, (attended, sink) in zip(modules, before, strict=True):
                module.max_attention_size, module.sink_size = attended, sink

    def _inference_inner(self, noise: Tensor, scene_cuts: tuple[int, ...]) -> Tensor:
        tokens, out = self.num_frame_per_block * self.frame_seq_length, []
        for chunk, start in enumerate(range(0, noise.shape[1], tokens)):
            x = noise[:, start : start + tokens]
            for step in range(self.steps + 1):
                result = self.generator(x, self.kv_cache_pos, start)
                if self.guidance_scale != 1.0:
                    other = self.generator(0.5 * x, self.kv_cache_neg, start)
                    result = other + self.guidance_scale * (result - other)
                if step < self.steps:
                    x = 0.5 * x + 0.5 * torch.tanh(result)
            if chunk in scene_cuts:
                self._pin_current_chunk(self.kv_cache_pos, self.num_frame_per_block)
            out.append(x)
        return torch.cat(out, 1)


def noise_of(frames: int, seed: int = 0, tokens: int = FRAME) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, frames * tokens, WIDTH, generator=generator).bfloat16()
