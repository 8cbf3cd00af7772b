"""Every host that has a fixture, small, in one list: for tests that go through all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.hosts import (
    causal_forcing_rolling,
    fastvideo,
    hy_worldplay,
    lightx2v,
    lingbot,
    longcat,
    longlive2,
    matrix_game_2,
    self_forcing,
    sglang,
)
from tests.hosts.packages import require_in_test

__all__ = ["CASES", "Case", "at"]


@dataclass(frozen=True)
class Case:
    """One host. make: builds it, the same weights every time. run: a video, the same every time.

    model: path from the host to the module that users compile ("" is the host itself); None where
    there is none. inside: path to what the last layer calls once a pass, behind its attention;
    method: what it is called by. options: of `attach`. own: labels of `state_of` that a run of
    the host itself changes.
    """

    adapter: str
    make: Callable[[], Any]
    run: Callable[[Any], Any]
    model: str | None
    inside: str
    method: str = "forward"
    options: dict[str, Any] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    prepare: Callable[[pytest.MonkeyPatch], None] = lambda _patch: None
    modules: tuple[str, ...] = ()  # files of packages

    def owners(self, host: Any) -> list[Any]:
        """What `state_of` is asked for: the host, its model and the files of both."""
        model = host if self.model is None else at(host, self.model)
        files = {type(x).__module__ for x in (host, model)} | set(self.modules)
        return [host, model, *(sys.modules[name] for name in sorted(files))]


def at(thing: Any, path: str) -> Any:
    """The attribute at a dotted path; numbers are indices."""
    for name in filter(None, path.split(".")):
        thing = thing[int(name)] if name.isdigit() else getattr(thing, name)
    return thing


def _anyflow() -> Any:
    require_in_test("diffusers", "transformers")
    from tests.hosts import anyflow_far

    return anyflow_far


def _sana() -> Any:
    require_in_test("diffusers", "transformers")
    from tests.hosts import sana_wm_refiner

    return sana_wm_refiner


def _flashdreams() -> Any:
    require_in_test("flashdreams")
    from tests.hosts import flashdreams

    return flashdreams


def _plain_attention(patch: pytest.MonkeyPatch) -> None:
    """AnyFlow's masks alone take most of the time on a CPU, and are no business of the cache's."""
    module = sys.modules[_anyflow().AnyFlowFARTransformer3DModel.__module__]

    def attention(q: Any, k: Any, v: Any, attn_mask: Any, **_: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        is_causal = attn_mask is not None
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal
        ).transpose(1, 2)

    patch.setattr(module, "dispatch_attention_fn", attention)


def _plain_rope(patch: pytest.MonkeyPatch) -> None:
    """flashdreams' own rotary kernel needs a GPU."""
    require_in_test("flashdreams")
    from flashdreams.recipes.wan.transformer.impl import modules

    patch.setattr(modules, "apply_rope_freqs", _flashdreams().rotated)


def _run_anyflow(host: Any) -> Any:
    chunks = [1, 2, 1, 2, 1]
    return _anyflow().rollout(host, chunks, _anyflow().cache_of(host, chunks))


OUT = "blocks.1.self_attn.o"
CASES: dict[str, Case] = {
    "self-forcing": Case(
        "self-forcing",
        lambda: self_forcing.CausalInferencePipeline(6, 3),
        lambda host: host.inference(self_forcing.noise_of(15), [3] * 5, self_forcing.text_of()),
        "generator.model",
        f"generator.model.{OUT}",
        own=frozenset({"0..crossattn_cache"}),
    ),
    "causal-forcing-rolling": Case(
        "causal-forcing-rolling",
        lambda: causal_forcing_rolling.CausalInferencePipeline(2),
        lambda host: host.inference_rolling_forcing(
            causal_forcing_rolling.noise_of(5), causal_forcing_rolling.text_of()
        ),
        "generator.model",
        f"generator.model.{OUT}",
        own=frozenset({"0..crossattn_cache"}),
    ),
    "matrix-game-2": Case(
        "matrix-game-2",
        lambda: matrix_game_2.CausalInferencePipeline(6),
        lambda host: host.inference(*matrix_game_2.inputs_of(15)),
        "generator.model",
        f"generator.model.{OUT}",
        own=frozenset(f"0..{name}" for name in matrix_game_2.CACHES[1:]),
    ),
    "lingbot-world": Case(
        "lingbot-world",
        lambda: lingbot.CausalPipeline(7, 2),
        lambda host: host.generate(lingbot.noise_of(16), lingbot.text_of(), 4),
        "model",
        f"model.{OUT}",
    ),
    "fastvideo": Case(
        "fastvideo",
        lambda: fastvideo.CausalStage(9, 3),
        lambda host: host.forward(fastvideo.noise_of(15), [3] * 5),
        "transformer",
        "transformer.blocks.1.to_out",
        own=frozenset({"0..frame_seq_length"}),
    ),
    "fastvideo, Matrix-Game-2, keys before RoPE": Case(
        "fastvideo",
        lambda: fastvideo.MatrixGame2Stage(9, 3, "relativistic"),
        lambda host: host.forward(fastvideo.noise_of(15), [3] * 5),
        "transformer",
        "transformer.blocks.1.to_out",
        own=frozenset({"0..frame_seq_length"}),
    ),
    "longlive2": Case(
        "longlive2",
        longlive2.CausalDiffusionInferencePipeline,
        lambda host: host.inference(longlive2.noise_of(12)),
        "generator.model",
        f"generator.model.{OUT}",
    ),
    "longcat-video": Case(
        "longcat-video",
        lambda: longcat.LongCatVideoPipeline(1),
        lambda host: longcat.long_video(host, [2, 2, 2]),
        "dit",
        "dit.blocks.1.attn.proj",
    ),
    "hy-worldplay": Case(
        "hy-worldplay",
        hy_worldplay.WorldPlayPipeline,
        lambda host: host(
            hy_worldplay.noise_of(12), hy_worldplay.texts_of(1), hy_worldplay.cameras_of(12)
        ),
        "transformer",
        "transformer.blocks.1.attn.out",
        options={"frame_tokens": hy_worldplay.FRAME},
        own=frozenset({"0.._kv_caches"}),
    ),
    "anyflow-far": Case(
        "anyflow-far",
        lambda: _anyflow().model_of(),
        _run_anyflow,
        "",
        "blocks.1.attn1.to_out.0",
        prepare=_plain_attention,
        own=frozenset({"0.rope._freqs_cache", "1.rope._freqs_cache"}),
    ),
    "sana-wm-refiner": Case(
        "sana-wm-refiner",
        lambda: _sana().pipeline_of(_sana().model_of()),
        lambda host: _sana().run(host, 4),
        "transformer",
        "transformer.transformer_blocks.1.attn1.to_out.0",
        own=frozenset({"1.._diffusers_hook"}),
    ),
    "flashdreams": Case(
        "flashdreams",
        lambda: _flashdreams().wan(),
        lambda host: _flashdreams().rollout(host, 5),
        "network",
        "network.blocks.1.self_attn.attn_op",
        prepare=_plain_rope,
        own=frozenset({"0.._output_height", "0.._output_width"}),
    ),
    "sglang": Case(
        "sglang",
        lambda: sglang.CausalDMDDenoisingStage(9, 3),
        lambda host: host.forward(sglang.noise_of(15), [3] * 5),
        "transformer",
        "transformer.blocks.1.attn",
    ),
    "lightx2v": Case(
        "lightx2v",
        lambda: lightx2v.Runner(7, 1),
        lambda host: host.run(lightx2v.noise_of(12)),
        None,
        "model.transformer_weights.blocks.1.compute_phases.0.self_attn_1",
        method="apply",
    ),
}
