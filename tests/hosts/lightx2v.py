"""A runner with the calling contract of LightX2V's autoregressive models, small, random weights.

Ours, from the description of that contract: a manager builds the pool that the configuration names
out of a registry; the model computes places in a window, rolls it before it stores, and reads keys
and values of one sequence, without a batch. `step_kv_cache` keeps one cache per denoising step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.hosts.self_forcing import causal_rope_apply, rope_table

FRAME = 16  # tokens a frame
HEADS, DIM = 2, 32
LAYERS = 2
WIDTH = HEADS * DIM

SELF_ATTN_KV_CACHE_REGISTRY: dict[tuple[str, bool], Any] = {}


def register_self_attn_kv_cache(
    scheme: str, cache_cls: Any, *, step: bool = False, kwargs_builder: Any = None
) -> None:
    SELF_ATTN_KV_CACHE_REGISTRY[(scheme, step)] = (cache_cls, kwargs_builder or (lambda *_: {}))


class DensePool:
    """What a host's own pool does: it copies when the window rolls."""

    current_step = 0

    def __init__(self, *, steps: int = 1, **sizes: Any) -> None:
        self.sizes, self.steps = sizes, steps

    def _init_kv_buffer(self) -> None:
        s = self.sizes
        shape = (s["num_layers"], s["cache_size"], s["num_heads"], s["head_dim"])
        self.buffers = [
            torch.zeros(2, *shape, dtype=s["dtype"], device=s["device"]) for _ in range(self.steps)
        ]
        self.ends = [[(0, 0)] * s["num_layers"] for _ in range(self.steps)]

    reset = _init_kv_buffer

    def get_global_end(self, layer: int) -> int:
        return self.ends[self.current_step][layer][0]

    def get_local_end(self, layer: int) -> int:
        return self.ends[self.current_step][layer][1]

    def set_ends(self, layer: int, global_end: int, local_end: int) -> None:
        self.ends[self.current_step][layer] = (global_end, local_end)

    def roll_window(self, layer: int, sink: int, evicted: int) -> None:
        buffer = self.buffers[self.current_step][:, layer]
        end = self.get_local_end(layer)
        buffer[:, sink : end - evicted] = buffer[:, sink + evicted : end].clone()

    def store_kv(self, k: Tensor, v: Tensor, a: int, b: int, layer: int) -> None:
        self.buffers[self.current_step][0, layer, a:b] = k
        self.buffers[self.current_step][1, layer, a:b] = v

    def k_cache(self, layer: int, a: int | None = None, b: int | None = None) -> Tensor:
        return self.buffers[self.current_step][0, layer, a:b]

    def v_cache(self, layer: int, a: int | None = None, b: int | None = None) -> Tensor:
        return self.buffers[self.current_step][1, layer, a:b]


register_self_attn_kv_cache("fp", DensePool)
register_self_attn_kv_cache(
    "fp",
    DensePool,
    step=True,
    kwargs_builder=lambda config, _a, _q: {"steps": config["infer_steps"]},
)


class KVCacheManager:
    def __init__(self, config: dict[str, Any], device: Any) -> None:
        self.config, self.ar_config, self.device = config, config["ar_config"], device
        self.self_attn_kv_cache: Any = None

    def _create_kv_caches(self, frames: int) -> None:
        local = self.ar_config["local_attn_size"]
        self.kv_size = (frames if local == -1 else local) * FRAME
        scheme = self.ar_config.get("kv_cache_scheme", "fp")
        step = self.ar_config.get("step_kv_cache", False)
        kind, builder = SELF_ATTN_KV_CACHE_REGISTRY[(scheme, step)]
        self.self_attn_kv_cache = kind(
            num_layers=LAYERS,
            cache_size=self.kv_size,
            num_heads=HEADS,
            head_dim=DIM,
            dtype=torch.bfloat16,
            device=self.device,
            **builder(self.config, self.ar_config, {}),
        )
        self.self_attn_kv_cache._init_kv_buffer()


class Kernel:
    """One layer's attention, not a module: weights are plain objects in this host."""

    def apply(self, q: Tensor, k: Tensor, v: Tensor, **_lengths: Any) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)


class CausalRope:
    """One layer's rotary embedding: q and k [1, S, H, D] at once."""

    def __init__(self) -> None:
        self.is_in_place = False

    def apply(
        self, q: Tensor, k: Tensor, freqs: Tensor, grid_sizes: Tensor, start_frame: int
    ) -> tuple[Tensor, Tensor]:
        turned = [causal_rope_apply(x, grid_sizes, freqs, start_frame=start_frame) for x in (q, k)]
        if self.is_in_place:
            turned = [x.copy_(y) for x, y in zip((q, k), turned, strict=True)]
        return turned[0], turned[1]


class Model:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [
            torch.randn(3, WIDTH, WIDTH, generator=generator).mul(0.2).bfloat16()
            for _ in range(LAYERS)
        ]
        self.biases = [torch.zeros(3, WIDTH).bfloat16() for _ in range(LAYERS)]
        self.transformer_weights = SimpleNamespace(
            blocks=[
                SimpleNamespace(
                    compute_phases=[SimpleNamespace(self_attn_1=Kernel(), causal_rope=CausalRope())]
                )
                for _ in range(LAYERS)
            ]
        )
        self.seq_p_group, self.freqs = None, rope_table()
        self.kv_cache_manager: Any = None

    def infer(self, x: Tensor, segment: int) -> Tensor:
        manager = self.kv_cache_manager
        pool, settings = manager.self_attn_kv_cache, manager.ar_config
        limit = settings.get("max_attention_size", manager.kv_size)
        for layer in range(LAYERS):
            weights = zip(self.weights[layer], self.biases[layer], strict=True)
            q, k, v = ((x @ w + b).unflatten(-1, (HEADS, DIM)) for w, b in weights)
            new = k.shape[0]
            phase = self.transformer_weights.blocks[layer].compute_phases[0]
            frames = new // FRAME
            grid = torch.tensor([[frames, 2, FRAME // 2]])
            q, k = phase.causal_rope.apply(
                q.unsqueeze(0),
                k.unsqueeze(0),
                self.freqs,
                grid_sizes=grid,
                start_frame=segment * settings["num_frame_per_chunk"],
            )
            q, k = q.type_as(v)[0], k.type_as(v)[0]
            end = (segment + 1) * new
            known, local = pool.get_global_end(layer), pool.get_local_end(layer)
            stop = local + end - known
            rolls = settings["local_attn_size"] != -1 and end > known
            if rolls and new + local > manager.kv_size:
                evicted = new + local - manager.kv_size
                pool.roll_window(layer, settings["sink_size"] * FRAME, evicted)
                stop -= evicted
            pool.store_kv(k, v, stop - new, stop, layer)
            pool.set_ends(layer, end, stop)
            first = max(0, stop - limit)
            keys, values = pool.k_cache(layer, first, stop), pool.v_cache(layer, first, stop)
            x = x + torch.tanh(phase.self_attn_1.apply(q=q, k=keys, v=values, max_seqlen_q=new))
        return x


class Runner:
    def __init__(
        self,
        local: int = 7,
        sink: int = 1,
        chunk: int = 3,
        steps: int = 2,
        step_caches: bool = False,
        **more: Any,
    ) -> None:
        self.config = {
            "infer_steps": steps,
            "ar_config": {
                "local_attn_size": local,
                "sink_size": sink,
                "num_frame_per_chunk": chunk,
                "step_kv_cache": step_caches,
                **more,
            },
        }
        self.model = Model()

    def init_kv_cache_manager(self, frames: int) -> None:
        self.model.kv_cache_manager = KVCacheManager(self.config, torch.device("cpu"))
        self.model.kv_cache_manager._create_kv_caches(frames)

    def run(self, noise: Tensor) -> Tensor:
        """noise [S, WIDTH]: a video in chunks of `num_frame_per_chunk` frames."""
        size = self.config["ar_config"]["num_frame_per_chunk"] * FRAME
        self.init_kv_cache_manager(noise.shape[0] // FRAME)
        pool, steps = self.model.kv_cache_manager.self_attn_kv_cache, self.config["infer_steps"]
        is_stepped = self.config["ar_config"]["step_kv_cache"]
        out = []
        for segment, x in enumerate(noise.split(size)):
            for step in range(steps + 1):
                if is_stepped or not isinstance(pool, DensePool):
                    pool.current_step = min(step, steps - 1)  # the clean pass is the last one's
                flow = self.model.infer(x, segment)
                if step < steps:
                    x = 0.5 * x + 0.5 * torch.tanh(flow)
            out.append(x)
        return torch.cat(out)


def noise_of(frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(frames * FRAME, WIDTH, generator=generator).bfloat16()
