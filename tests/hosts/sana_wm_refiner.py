"""The real refiner pipeline of SANA-WM in diffusers, small and with random weights."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaWMLTX2RefinerTransformer3DModel
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from diffusers.pipelines.sana_wm.refiner import SanaWMLTX2Refiner
from torch import Tensor

__all__ = ["SanaWMRefinerKVCache"]

LAYERS, HEADS, DIM = 2, 2, 32
SIDE = 4
FRAME = SIDE * SIDE  # tokens
BLOCK, WINDOW = 3, 11  # frames; the window includes the sink of one and the block


def model_of(layers: int = LAYERS, heads: int = HEADS, **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SanaWMLTX2RefinerTransformer3DModel(
            **{
                "in_channels": 8,
                "out_channels": 8,
                "num_attention_heads": heads,
                "attention_head_dim": DIM,
                "cross_attention_dim": heads * DIM,
                "audio_in_channels": 8,
                "audio_out_channels": 8,
                "audio_num_attention_heads": 2,
                "audio_attention_head_dim": 8,
                "audio_cross_attention_dim": 16,
                "num_layers": layers,
                "caption_channels": 32,
                "gated_attn": False,
                **changes,
            }
        )
    return model.bfloat16().eval().requires_grad_(False)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pipeline_of(model: Any) -> Any:
    """The real pipeline; text embeddings are random instead of encoded."""
    pipeline = SanaWMLTX2Refiner(
        transformer=model,
        connectors=None,
        tokenizer=None,
        text_encoder=None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
    )
    pipeline.set_progress_bar_config(disable=True)

    def encode(prompt: str, *, device: Any, dtype: Any) -> tuple[Tensor, Tensor]:
        return normal(1, 6, 32, seed=len(prompt)).to(dtype), torch.ones(1, 6)

    pipeline._encode_prompt = encode
    return pipeline


def run(pipeline: Any, blocks: int, *, seed: int = 1, last: int = BLOCK, **options: Any) -> Tensor:
    """The refined latents [B, C, F, H, W]: a sink, then blocks, the last one of `last` frames."""
    frames = options.get("sink_size", 1) + BLOCK * (blocks - 1) + last
    side = options.pop("size", (SIDE, SIDE))
    latents = normal(1, 8, frames, *side, seed=seed)
    return pipeline(
        latents, "a street", fps=24.0, output_type="latent",
        generator=torch.Generator().manual_seed(seed), **options,
    )  # fmt: skip
