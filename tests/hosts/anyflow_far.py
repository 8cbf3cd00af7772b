"""The real AnyFlow-FAR transformer of diffusers, small, with random weights, and its rollouts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers import (
    AnyFlowFARPipeline,
    AnyFlowFARTransformer3DModel,
    FlowMapEulerDiscreteScheduler,
)
from torch import Tensor

LAYERS, HEADS, DIM = 2, 2, 32
SIDE = 16  # rows and columns of latents
FULL, COMPRESSED = (SIDE // 2) ** 2, (SIDE // 4) ** 2  # tokens of a frame
LIMIT = 3  # chunks that are in full, the newest included


def model_of(layers: int = LAYERS, heads: int = HEADS, **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AnyFlowFARTransformer3DModel(
            **{
                "num_attention_heads": heads,
                "attention_head_dim": DIM,
                "in_channels": 4,
                "out_channels": 4,
                "text_dim": 16,
                "freq_dim": 16,
                "ffn_dim": 32,
                "num_layers": layers,
                "full_chunk_limit": LIMIT,
                "rope_max_seq_len": 64,
                **changes,
            }
        )
    return model.bfloat16().eval().requires_grad_(False)


def cache_of(model: Any, chunks: list[int], batch: int = 1, size: tuple[int, int] = (SIDE, SIDE)):
    """Zeros, as long as the pipeline makes them."""
    full, old = (size[0] // 2) * (size[1] // 2), (size[0] // 4) * (size[1] // 4)
    heads = model.config.num_attention_heads
    lengths = {
        "full_cache": LIMIT * max(chunks) * full,
        "compressed_cache": max(0, len(chunks) - LIMIT + 1) * max(chunks) * old,
    }
    return {
        layer: {
            name: torch.zeros(2, batch, heads, length, DIM, dtype=torch.bfloat16)
            for name, length in lengths.items()
        }
        for layer in range(model.config.num_layers)
    }


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rollout(
    model: Any,
    chunks: list[int],
    kv_cache: Any,
    *,
    seed: int = 1,
    batch: int = 1,
    steps: int = 1,
    size: tuple[int, int] = (SIDE, SIDE),
    until: int | None = None,
) -> Tensor:
    """A video [B, F, C, H, W]: denoising passes over a chunk, then one over everything so far."""
    x = normal(batch, sum(chunks), 4, *size, seed=seed)
    text = normal(batch, 6, 16, seed=seed + 100)
    video = torch.zeros_like(x)
    state = {"num_cached_chunks": 0, "is_cache_step": False}
    for number in range(len(chunks) if until is None else until):
        so_far = chunks[: number + 1]
        start, end = sum(so_far[:-1]), sum(so_far)
        part = x[:, start:end]
        for step in range(steps):
            t = torch.full((batch, end - start), 900.0 / (step + 1))
            velocity, _ = model(
                hidden_states=part, timestep=t, r_timestep=torch.zeros_like(t),
                encoder_hidden_states=text, chunk_partition=so_far, kv_cache=kv_cache,
                kv_cache_flag=copy.deepcopy(state), return_dict=False,
            )  # fmt: skip
            part = part - 0.5 * velocity
        video[:, start:end] = part
        if number + 1 < len(chunks):
            store(model, video[:, :end], so_far, text, kv_cache, number)
            state["num_cached_chunks"] += 1
    return video


def store(model: Any, video: Tensor, chunks: list[int], text: Tensor, kv_cache: Any, count: int):
    """The cache pass over all frames so far."""
    zeros = torch.zeros(video.shape[:2])
    height, width = video.shape[-2:]
    mask = model.build_attention_mask(
        chunk_partition=chunks, height=height, width=width, mode="cache"
    )
    model(
        hidden_states=video, timestep=zeros, r_timestep=zeros, encoder_hidden_states=text,
        chunk_partition=chunks, kv_cache=kv_cache, attention_mask=mask, return_dict=False,
        kv_cache_flag={"num_cached_chunks": count, "is_cache_step": True},
    )  # fmt: skip


def pipeline_of(model: Any) -> Any:
    """The real pipeline, without what it encodes text and pixels with."""
    pipeline = AnyFlowFARPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        transformer=model,
        scheduler=FlowMapEulerDiscreteScheduler(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run_pipeline(pipeline: Any, chunks: list[int], guidance: float) -> Tensor:
    return pipeline(
        prompt_embeds=normal(1, 6, 16, seed=5),
        negative_prompt_embeds=normal(1, 6, 16, seed=6) if guidance > 1 else None,
        height=64, width=64, num_frames=4 * (sum(chunks) - 1) + 1,
        chunk_partition=chunks, num_inference_steps=1, guidance_scale=guidance,
        output_type="latent", generator=torch.Generator().manual_seed(1),
    ).frames  # fmt: skip
