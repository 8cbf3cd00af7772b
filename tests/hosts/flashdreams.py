"""The real Wan 2.1 and Cosmos transformers of flashdreams, tiny, with random weights, on a CPU.

Two things of the package need a GPU and are replaced here, in both of the runs that are compared:
the attention backend, by the package's own one for any device, and its Triton kernel for rotary
embeddings, by plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HEADS, DIM, LAYERS = 2, 32, 2
FRAME = 16  # tokens of a frame of 8x8 latents


def rotated(x: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
    """x [B, S, H, D] turned by freqs [S, 1, 1, D], in place as the kernel does it."""
    angles = freqs[:, 0, 0].float()[None, :, None]
    y = x.float()
    if interleaved:
        other = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
    else:
        first, second = y.chunk(2, -1)
        other = torch.cat([-second, first], -1)
    return x.copy_(y * angles.cos() + other * angles.sin())


def prepared(kind: Any, config: Any) -> Any:
    """The transformer with attention that runs on a CPU, and weights that make attention matter."""
    from flashdreams.core.attention import NativeAttention

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = kind(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in transformer.parameters():
        if parameter.dim() > 1:
            scale = 1.5 / parameter.shape[-1] ** 0.5
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    transformer.requires_grad_(False)
    for module in transformer.modules():
        if hasattr(module, "attn_op"):
            module.attn_op = NativeAttention("bshd", "math")
    return transformer


def wan(chunk: int = 1, window: int = 3, sink: int = 1, **changes: Any) -> Any:
    """A Wan 2.1 transformer; chunk, window (without sink) and sink in frames."""
    from flashdreams.recipes.wan.transformer.wan21 import Wan21Transformer

    return prepared(Wan21Transformer, wan_config(chunk, window, sink, **changes))


def two_networks(chunk: int = 1, window: int = 3, sink: int = 1) -> Any:
    """A Wan 2.2 transformer: a network for noisy steps and one for the others."""
    from flashdreams.recipes.wan.transformer.wan22 import Wan22Transformer, Wan22TransformerConfig

    parts = {
        name: wan_config(chunk, window, sink)
        for name in ("transformer_high_noise", "transformer_low_noise")
    }
    return prepared(Wan22Transformer, Wan22TransformerConfig(**parts))


def wan_config(
    chunk: int,
    window: int,
    sink: int,
    *,
    rotates_on_read: bool = False,
    guided: bool = False,
    cuda_graph: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    batch_shape: tuple[int, ...] = (1,),
) -> Any:
    from flashdreams.recipes.wan.transformer.impl.network import WanDiTNetworkConfig
    from flashdreams.recipes.wan.transformer.wan21 import Wan21TransformerConfig

    network = WanDiTNetworkConfig(
        text_len=8,
        in_dim=4,
        dim=HEADS * DIM,
        ffn_dim=128,
        freq_dim=16,
        text_dim=16,
        out_dim=4,
        num_heads=HEADS,
        num_layers=LAYERS,
        apply_rope_before_kvcache=not rotates_on_read,
    )
    return Wan21TransformerConfig(
        network=network,
        dtype=dtype,
        batch_shape=batch_shape,
        len_t=chunk,
        window_size_t=window,
        sink_size_t=sink,
        guidance_scale=3.0 if guided else 1.0,
        compile_network=False,
        use_cuda_graph=cuda_graph,
    )


def cosmos(chunk: int = 1, window: int = 3, sink: int = 1) -> Any:
    """A Cosmos transformer, whose queries and keys are normed per head."""
    from flashdreams.recipes.cosmos.transformer import CosmosTransformer, CosmosTransformerConfig
    from flashdreams.recipes.cosmos.transformer.impl.network import CosmosDiTNetworkConfig

    network = CosmosDiTNetworkConfig(
        in_channels=5,
        out_channels=4,
        model_channels=HEADS * DIM,
        num_blocks=LAYERS,
        num_heads=HEADS,
        adaln_lora_dim=8,
        crossattn_proj_in_channels=16,
        crossattn_emb_channels=16,
    )
    config = CosmosTransformerConfig(
        network=network,
        len_t=chunk,
        window_size_t=window,
        sink_size_t=sink,
        compile_network=False,
        use_cuda_graph=False,
    )
    return prepared(CosmosTransformer, config)


def text_of(seed: int, dtype: torch.dtype, batch: tuple[int, ...] = (1,)) -> Tensor:
    return torch.randn(*batch, 8, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attended(host: Any) -> list[Any]:
    """The self-attention modules of every network."""
    return [m for m in host.modules() if type(m).__name__ == "SelfAttention"]


def rollout(host: Any, chunks: int, seed: int = 0, passes: int = 2, size: int = 8) -> list[Tensor]:
    """A video: `passes` denoising passes and a clean one for each chunk. Returns the flows."""
    config = host.config
    guided = {"negative_text_embeddings": text_of(seed + 1, config.dtype, config.batch_shape)}
    cache = host.initialize_autoregressive_cache(
        height=size,
        width=size,
        text_embeddings=text_of(seed, config.dtype, config.batch_shape),
        **(guided if config.guidance_scale > 1.0 else {}),
    )
    generator = torch.Generator().manual_seed(seed)
    flows = []
    for index in range(chunks):
        cache.start(index)
        x = torch.randn(host.latent_shape, generator=generator).to(config.dtype)
        for step in range(passes):
            time = torch.tensor(900.0 - 400.0 * step, dtype=config.dtype)
            flow = host.predict_flow(x, time, cache)
            flows.append(flow)
            x = x - 0.5 * flow
        host.finalize_kv_cache(x, torch.tensor(0.0, dtype=config.dtype), cache)
        cache.finalize(index)
        flows.append(x)
    return flows
