"""The hosts of `store_keys="before_rope"`, small, in one form: made, run, changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.hosts import causal_forcing_rolling, fastvideo, lightx2v, longlive2, self_forcing, sglang

__all__ = ["CASES", "Case", "constant", "state_owners"]


@dataclass(frozen=True)
class Case:
    """make: the host. run: a video of so many chunks of 3 frames (2 in LongLive), by seed.

    weights: (weight, bias) of the projection of "q" or "k" in each layer. frame: tokens.
    module: the file that has its rotary embedding. branch: one that is there. chunk: its frames.
    is_raw: whether the host itself keeps its first chunk unrotated.
    """

    make: Callable[[], Any]
    run: Callable[[Any, int, int], Tensor]
    project: Callable[[Any, str], Iterable[tuple[Tensor, Tensor]]]
    frame: int
    module: Any
    branch: str = "main"
    chunk: int = 3
    is_raw: bool = False


def linear(layers: Iterable[Any]) -> list[tuple[Tensor, Tensor]]:
    return [(layer.weight.data, layer.bias.data) for layer in layers]


def self_forcing_of(host: Any, name: str) -> Any:
    return linear(getattr(b.self_attn, name) for b in host.generator.model.blocks)


def fastvideo_of(host: Any, name: str) -> Any:
    return linear(getattr(b, f"to_{name}") for b in host.transformer.blocks)


def longlive_of(host: Any, name: str) -> Any:
    return linear(getattr(b.self_attn, name) for b in host._dit_model.blocks)


def sglang_of(host: Any, name: str) -> Any:
    width = sglang.WIDTH
    share = slice(width * "qkv".index(name), width * ("qkv".index(name) + 1))
    layers = [b.to_qkv for b in host.transformer.blocks]
    return [(layer.weight.data[share], layer.bias.data[share]) for layer in layers]


def lightx2v_of(host: Any, name: str) -> Any:
    number = "qkv".index(name)
    return [
        (w[number], b[number]) for w, b in zip(host.model.weights, host.model.biases, strict=True)
    ]


def fused(host: Any, is_neox: bool) -> Any:
    for block in host.transformer.blocks:
        block.is_fused, block.is_neox = True, is_neox
    return host


def in_place(host: Any) -> Any:
    for block in host.model.transformer_weights.blocks:
        block.compute_phases[0].causal_rope.is_in_place = True
    return host


def sglang_case(make: Callable[[], Any]) -> Case:
    return Case(
        make,
        lambda host, n, seed: host.forward(sglang.noise_of(3 * n, seed), [3] * n),
        sglang_of,
        sglang.FRAME,
        sglang,
    )


def lightx2v_case(make: Callable[[], Any], branch: str = "main") -> Case:
    return Case(
        make,
        lambda host, n, seed: host.run(lightx2v.noise_of(3 * n, seed)),
        lightx2v_of,
        lightx2v.FRAME,
        lightx2v,
        branch,
    )


def fastvideo_case(make: Callable[[], Any]) -> Case:
    return Case(
        make,
        lambda host, n, seed: host.forward(fastvideo.noise_of(3 * n, seed), [3] * n),
        fastvideo_of,
        fastvideo.FRAME,
        fastvideo,
    )


CASES = {
    "self-forcing": Case(
        lambda: self_forcing.CausalInferencePipeline(9, 3),
        lambda host, n, seed: host.inference(
            self_forcing.noise_of(3 * n, seed), [3] * n, self_forcing.text_of(seed)
        ),
        self_forcing_of,
        self_forcing.FRAME,
        self_forcing,
    ),
    "fastvideo": fastvideo_case(lambda: fastvideo.CausalStage(9, 3)),
    "fastvideo matrix-game": fastvideo_case(lambda: fastvideo.MatrixGame2Stage(9, 3)),
    "longlive": Case(
        lambda: longlive2.CausalDiffusionInferencePipeline(8, 2, guidance_scale=2.0),
        lambda host, n, seed: host.inference(longlive2.noise_of(2 * n, seed)),
        longlive_of,
        longlive2.FRAME,
        longlive2,
        branch="negative",
        chunk=2,
    ),
    "rolling": Case(
        lambda: causal_forcing_rolling.CausalInferencePipeline(4),
        lambda host, n, seed: host.inference_rolling_forcing(
            causal_forcing_rolling.noise_of(n, seed), causal_forcing_rolling.text_of(seed)
        ),
        self_forcing_of,
        causal_forcing_rolling.FRAME,
        causal_forcing_rolling,
        is_raw=True,
    ),
    "sglang": sglang_case(lambda: sglang.CausalDMDDenoisingStage(9, 3)),
    "sglang, fused": sglang_case(lambda: fused(sglang.CausalDMDDenoisingStage(9, 3), False)),
    "sglang, fused halves": sglang_case(lambda: fused(sglang.CausalDMDDenoisingStage(9, 3), True)),
    "lightx2v": lightx2v_case(lambda: lightx2v.Runner(9, 3)),
    "lightx2v in place": lightx2v_case(lambda: in_place(lightx2v.Runner(9, 3))),
    "lightx2v, a cache per step": lightx2v_case(
        lambda: lightx2v.Runner(9, 3, step_caches=True), "step 1"
    ),
}
"""By name; windows of 9 frames with 3 of sink (LongLive: 8 with 2)."""


def state_owners(case: Case, host: Any) -> list[Any]:
    """What has to be as before behind the block."""
    found = [host, case.module]
    if hasattr(host, "transformer"):
        found.append(host.transformer)
    if isinstance(host, lightx2v.Runner):
        blocks = host.model.transformer_weights.blocks
        found += [phase for b in blocks for phase in vars(b.compute_phases[0]).values()]
    return found


def constant(case: Case, host: Any, name: str) -> Any:
    """The host with queries or keys that are one and the same for all tokens, before RoPE."""
    generator = torch.Generator().manual_seed(3)
    for weight, bias in case.project(host, name):
        weight.zero_()
        bias.copy_(torch.randn(bias.shape, generator=generator))
    return host
