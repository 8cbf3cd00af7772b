"""flashdreams (Wan 2.1, Wan 2.2, Cosmos): one cache object per layer, written between two hooks.

A transformer's `initialize_autoregressive_cache` asks each layer's `self_attn.initialize_cache` for
such an object, once per rollout and guidance branch. Cross-attention has a builder of its own and
stays dense. Written for the calling contract of flashdreams 0.1.0 (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

import torch
from torch import Tensor

from steadykv.cache import KVCache
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.before_rope import STORE_KEYS, KeyTurns, stores_before_rope
from steadykv.hosts.blocks import BlockCache, untraced, untraced_methods
from steadykv.hosts.contract import module_of, need, need_arguments
from steadykv.hosts.seen_rotation import SeenRotation

__all__ = ["ADAPTERS"]

TITLE = "flashdreams"
PARTS = ("transformer_high_noise", "transformer_low_noise")  # of Wan 2.2; each has its own caches
EMBEDDINGS = ("apply_rope_freqs",)
ARGUMENTS = ("batch_size", "chunk_size", "window_size", "sink_size", "device", "dtype")


def transformers(host: Any) -> Iterator[tuple[str, Any]]:
    """What has a network of its own, and how its branches are called."""
    if hasattr(host, PARTS[0]):
        yield from (
            (part.removeprefix("transformer_") + " ", getattr(host, part)) for part in PARTS
        )
    else:
        yield "", host


def matches(host: Any) -> bool:
    """A transformer of the package's own interface, with one network or two."""
    names = set(dir(host))
    return {"initialize_autoregressive_cache", "predict_flow", "finalize_kv_cache"} <= names


def check(host: Any) -> None:
    """Each layer's builder and attention, and the switch of CUDA graphs."""
    if hasattr(host, PARTS[0]):
        need(TITLE, host, PARTS[1])
    for _, part in transformers(host):
        need(TITLE, part, "_use_cuda_graph", bool)
        need(TITLE, part, "config.guidance_scale", (int, float))
        need(TITLE, part, "config.len_t", int)
        need(TITLE, part, "config.network.patch_size.0", int)
        for index in range(len(need(TITLE, part, "network.blocks", torch.nn.ModuleList))):
            attention = need(TITLE, part, f"network.blocks.{index}.self_attn")
            need(TITLE, attention, "n_heads", int)
            need(TITLE, attention, "head_dim", int)
            need(TITLE, attention, "attn_op", torch.nn.Module)
            need_arguments(TITLE, need(TITLE, attention, "initialize_cache"), *ARGUMENTS)
            if is_rotated_on_read(attention):
                need(TITLE, attention, "norm_q", torch.nn.Module)


def is_rotated_on_read(attention: Any) -> bool:
    """Whether keys are stored before RoPE, which is then applied by their place in the window."""
    return not getattr(attention, "apply_rope_before_kvcache", True)


def observe_queries(session: Session, attention: Any, observe: Callable[[Tensor], None]) -> None:
    """Show every pass's queries, in the frame of the cached keys: after RoPE if those are.

    [B, S, H, D] where attention begins, or [..., S, H·D] behind the norm that comes before RoPE.
    A compiled network does not notice hooks that come later, but it does notice another `forward`.
    """

    def attended(original: Any, *args: Any, **kwargs: Any) -> Any:
        observe(args[0] if args else kwargs["query"])
        return original(*args, **kwargs)

    def normed(original: Any, *args: Any, **kwargs: Any) -> Any:
        q = original(*args, **kwargs)
        observe(q)
        return q

    if is_rotated_on_read(attention):
        session.patches.wrap(attention.norm_q, "forward", normed)
    else:
        session.patches.wrap(attention.attn_op, "forward", attended)


def install(session: Session, host: Any) -> None:
    """Let every self-attention build our object, and show its queries."""
    for prefix, part in transformers(host):
        _install(session, part, prefix)


def _install(session: Session, host: Any, prefix: str) -> None:
    if host._use_cuda_graph:
        session.warn("CUDA graphs are off while attached: a replay would not call the cache")
        session.patches.set(host, "_use_cuda_graph", False)
    names = ("positive", "negative") if host.config.guidance_scale > 1.0 else ("main",)
    blocks = host.network.blocks
    is_compiled = hasattr(host.network, "_orig_mod")
    kind = untraced_methods(BlockCache) if is_compiled else BlockCache
    seen: SeenRotation | None = None
    if stores_before_rope(session) and not is_rotated_on_read(blocks[0].self_attn):
        seen = SeenRotation(session)
        seen.watch_all(TITLE, module_of(blocks[0].self_attn), EMBEDDINGS)
    frames = host.config.len_t // host.config.network.patch_size[0]
    built: list[KVCache] = []  # of the newest rollout, one for each branch
    turns: list[KeyTurns] = []  # of the branch that was built last
    newest: dict[int, BlockCache] = {}  # by block: the one that was written last

    def begin(original: Any, *args: Any, **kwargs: Any) -> Any:
        built.clear()
        return original(*args, **kwargs)

    def replace(index: int) -> None:
        attention = blocks[index].self_attn

        def initialize(
            _original: Any,
            batch_size: int,
            chunk_size: int,
            window_size: int,
            sink_size: int,
            device: Any,
            dtype: torch.dtype,
        ) -> BlockCache:
            del batch_size  # that of the first write counts
            if index == 0:
                # A context-parallel rank may hold a part of a frame only.
                frame = chunk_size // frames if chunk_size % frames == 0 else chunk_size
                frame = gcd(frame, window_size, sink_size)
                branch = names[len(built)] if len(built) < len(names) else f"branch {len(built)}"
                built.append(
                    session.build(
                        prefix + branch,
                        layers=len(blocks),
                        heads=attention.n_heads,
                        head_dim=attention.head_dim,
                        frame_tokens=frame,
                        dtype=dtype,
                        device=device,
                        window_frames=(sink_size + window_size) // frame,
                        sink_frames=sink_size // frame,
                    )
                )
                if seen is not None:
                    turns[:] = [KeyTurns.of(session, prefix + branch, seen, frame)]
            sizes = (chunk_size, window_size, sink_size)
            return kind(built[-1][index], *sizes, wrote, turns[0] if turns else None)

        def wrote(cache: BlockCache) -> None:
            newest[index] = cache

        def observe(q: Tensor) -> None:
            if index in newest:
                cache = newest[index]
                q = q.reshape(-1, cache.chunk_size, attention.n_heads, attention.head_dim)
                if cache.turns is not None:
                    q = cache.turns.before(q)
                cache.layer.observe_queries(q)

        session.patches.wrap(attention, "initialize_cache", initialize)
        if session.needs_queries:
            shown = untraced(observe) if is_compiled else observe
            observe_queries(session, attention, shown)

    session.patches.wrap(host, "initialize_autoregressive_cache", begin)
    for index in range(len(blocks)):
        replace(index)


ADAPTERS = (
    Adapter(
        name="flashdreams",
        title=TITLE,
        expects="a flashdreams transformer, such as pipeline.diffusion_model.transformer",
        page="docs/hosts/flashdreams.md",
        matches=matches,
        check=check,
        install=install,
        options=STORE_KEYS,
        aliases=("flashdreams-wan", "flashdreams-cosmos"),
    ),
)
