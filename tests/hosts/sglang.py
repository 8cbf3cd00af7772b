"""A denoising stage with the calling contract of SGLang's causal models, small, random weights.

Ours, from the description of that contract: one cache object per layer, whose one method writes a
chunk and returns what the chunk attends to; a stage that allocates them, resets them between
prompts, and keeps a second list for the negative prompt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FRAME = 16  # tokens a frame
HEADS, DIM = 2, 32
LAYERS = 2
WIDTH = HEADS * DIM


class View(NamedTuple):
    k: Tensor
    v: Tensor


class DenseCache:
    """What a host's own dense cache gives, said simply: all tokens, cut when they are read."""

    def __init__(
        self,
        *,
        batch_size: int,
        cache_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: Any,
        sink_tokens: int,
        global_end_index: Tensor,
        local_end_index: Tensor,
    ) -> None:
        self.cache_size, self.sink_tokens = cache_size, sink_tokens
        self.num_cache_heads, self.global_sink_tokens = num_heads, 0
        self.empty = torch.zeros(batch_size, 0, num_heads, head_dim, dtype=dtype, device=device)
        self.global_end_index, self.local_end_index = global_end_index, local_end_index
        self.reset_indices()

    def reset_indices(self) -> None:
        self.k = self.v = self.empty
        self.global_end_index.zero_()
        self.local_end_index.zero_()

    def can_direct_current_attention(self, tokens: int) -> bool:
        return self.sink_tokens == 0 and self.cache_size == tokens

    def pin_current_chunk(self, tokens: int) -> None:
        raise AssertionError("not in these tests")

    def update_and_get_attention_kv(
        self,
        *,
        key: Tensor,
        value: Tensor,
        current_chunk_start: int,
        cache_head_start: int | None = None,
        recent_window_tokens: int | None = None,
        debug_name: str = "",
    ) -> View:
        start, end = current_chunk_start, current_chunk_start + key.shape[1]
        first, count = cache_head_start or 0, key.shape[2]
        found = []
        for name, new in (("k", key), ("v", value)):
            held = getattr(self, name)
            if end > held.shape[1]:
                more = held.new_zeros(held.shape[0], end - held.shape[1], *held.shape[2:])
                held = torch.cat([held, more], 1)
            held[:, start:end, first : first + count] = new
            setattr(self, name, held)
            sink = min(self.sink_tokens, end)
            recent = max(sink, end - (self.cache_size - self.sink_tokens))
            if recent_window_tokens is not None:
                recent = max(recent, start - recent_window_tokens)
            seen = torch.cat([held[:, :sink], held[:, recent:end]], 1)
            found.append(seen[:, :, first : first + count])
        self.global_end_index.fill_(end)
        self.local_end_index.fill_(min(end, self.cache_size))
        return View(*found)


def _apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    """x [B, S, H, D] turned by cos, sin [S, D / 2]: neighbouring channels, or the two halves."""
    cos, sin = cos[:, None], sin[:, None]
    a, b = x.chunk(2, -1) if is_neox_style else (x[..., ::2], x[..., 1::2])
    turned = (a * cos - b * sin, b * cos + a * sin)
    if is_neox_style:
        return torch.cat(turned, -1).type_as(x)
    return torch.stack(turned, -1).flatten(-2).type_as(x)


def apply_flashinfer_rope_qk_inplace(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, *, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """Both at once and in place, as a fused kernel that takes BF16 alone."""
    if q.dtype != torch.bfloat16:
        raise RuntimeError(f"failed to dispatch data type {q.dtype}")
    for x in (q, k):
        x.copy_(_turned_by_kernel(x, *cos_sin_cache.chunk(2, -1), is_neox))
    return q, k


_turned_by_kernel = _apply_rotary_emb  # a kernel does not call the host's other function


class Kernel(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attn = Kernel()
        self.head_start = 0
        self.is_fused, self.is_neox = False, False

    def forward(self, x: Tensor, cache: Any, start: int, recent: int | None) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        positions = torch.arange(start, start + x.shape[1])[:, None]
        angles = positions * 100.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
        cos, sin = angles.cos(), angles.sin()
        if self.is_fused:
            both = torch.cat([cos, sin], -1)
            q, k = apply_flashinfer_rope_qk_inplace(
                q.contiguous(), k.contiguous(), both, is_neox=self.is_neox
            )
            q, k = q.type_as(v), k.type_as(v)
        else:
            q = _apply_rotary_emb(q, cos, sin, is_neox_style=self.is_neox).type_as(v)
            k = _apply_rotary_emb(k, cos, sin, is_neox_style=self.is_neox).type_as(v)
        if cache.can_direct_current_attention(k.shape[1]):
            return self.attn(q, k, v).flatten(2)
        view = cache.update_and_get_attention_kv(
            key=k,
            value=v,
            current_chunk_start=start,
            cache_head_start=self.head_start,
            recent_window_tokens=recent,
            debug_name="fixture",
        )
        return self.attn(q, view.k, view.v).flatten(2)


class Transformer(nn.Module):
    num_attention_heads, attention_head_dim = HEADS, DIM

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(LAYERS))

    def forward(self, x: Tensor, caches: Any, start: int, recent: int | None) -> Tensor:
        for block, cache in zip(self.blocks, caches, strict=True):
            x = x + torch.tanh(block(x, cache, start, recent))
        return x


class CausalDMDDenoisingStage:
    """window, sink: frames. guided: with a second list of caches. recent: of every noisy pass."""

    def __init__(
        self, window: int = 4, sink: int = 1, guided: bool = False, recent: int | None = None
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.transformer = Transformer()
        for parameter in self.transformer.parameters():
            parameter.data.mul_(3.0)
        self.transformer.bfloat16().requires_grad_(False)
        self.num_transformer_blocks, self.num_token_per_frame = LAYERS, FRAME
        self.sliding_window_num_frames, self.sink_size = window, sink
        self.guided, self.recent = guided, recent
        self.causal_kv_cache: list[Any] | None = None
        self.causal_kv_cache_neg: list[Any] | None = None

    def _allocate_causal_kv_cache(
        self,
        *,
        batch_size: int,
        kv_cache_size: int,
        num_attention_heads: int,
        attention_head_dim: int,
        dtype: torch.dtype,
        device: Any,
        use_int_indices: bool = False,
        sink_tokens: int = 0,
        global_sink_tokens: int = 0,
        attention_window_size: int | None = None,
        allow_growth: bool = False,
    ) -> list[Any]:
        return [
            DenseCache(
                batch_size=batch_size,
                cache_size=kv_cache_size,
                num_heads=num_attention_heads,
                head_dim=attention_head_dim,
                dtype=dtype,
                device=device,
                sink_tokens=sink_tokens,
                global_end_index=torch.zeros(1, dtype=torch.long, device=device),
                local_end_index=torch.zeros(1, dtype=torch.long, device=device),
            )
            for _ in range(self.num_transformer_blocks)
        ]

    def _initialize_kv_cache(self, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        size = self.sliding_window_num_frames * self.num_token_per_frame
        self.causal_kv_cache = self._allocate_causal_kv_cache(
            batch_size=batch_size,
            kv_cache_size=size,
            num_attention_heads=self.transformer.num_attention_heads,
            attention_head_dim=self.transformer.attention_head_dim,
            dtype=dtype,
            device=device,
            use_int_indices=True,
            sink_tokens=self.sink_size * self.num_token_per_frame,
            attention_window_size=size,
        )

    def _reset_or_init_negative_caches(self, batch_size: int, dtype: Any, device: Any) -> None:
        if self.causal_kv_cache_neg is not None:
            for cache in self.causal_kv_cache_neg:
                cache.reset_indices()
            return
        before = self.causal_kv_cache
        self._initialize_kv_cache(batch_size, dtype, device)
        self.causal_kv_cache_neg, self.causal_kv_cache = self.causal_kv_cache, before

    def forward(self, noise: Tensor, chunks: list[int], passes: int = 2) -> Tensor:
        """noise [B, frames * FRAME, WIDTH], in chunks of so many frames; returns the video."""
        arguments = (noise.shape[0], noise.dtype, noise.device)
        if self.causal_kv_cache is None:
            self._initialize_kv_cache(*arguments)
        else:
            for cache in self.causal_kv_cache:
                cache.reset_indices()
        lists = [self.causal_kv_cache]
        if self.guided:
            self._reset_or_init_negative_caches(*arguments)
            lists.append(self.causal_kv_cache_neg)
        out, start = [], 0
        for frames in chunks:
            x = noise[:, start : start + frames * FRAME]
            for step in range(passes + 1):
                recent = None if step == passes else self.recent
                flows = [
                    self.transformer(x - 0.2 * i, caches, start, recent)
                    for i, caches in enumerate(lists)
                ]
                if step < passes:
                    x = 0.5 * x + 0.5 * torch.tanh(2 * flows[0] - flows[-1])
            out.append(x)
            start += frames * FRAME
        return torch.cat(out, 1)


def noise_of(frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, frames * FRAME, WIDTH, generator=generator).bfloat16()
