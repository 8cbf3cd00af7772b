"""SGLang's causal video models: a denoising stage allocates one cache object per layer.

`attach` takes a stage; an engine that builds its caches by itself uses `SGLangCache` instead.
Written for the calling contract of sglang 0.5.23 (Apache-2.0).
"""

from __future__ import annotations

import sys
from math import gcd
from typing import Any

import torch
from torch import nn

from steadykv.errors import HostError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.aside import set_aside
from steadykv.hosts.before_rope import STORE_KEYS, KeyTurns, stores_before_rope
from steadykv.hosts.contract import need, need_arguments
from steadykv.hosts.queries import observe_attention
from steadykv.hosts.seen_rotation import SeenRotation
from steadykv.hosts.sglang_cache import KVView, SGLangCache

__all__ = ["ADAPTERS", "KVView", "SGLangCache"]

TITLE = "SGLang"
NEGATIVE = "_reset_or_init_negative_caches"
# What the attention layers call their kernels, with and without sequence parallelism.
KERNELS = ("attn", "ulysses_attn", "full_head_attn")
# Rotary embeddings, and how many tensors each of them turns.
EMBEDDINGS = {"_apply_rotary_emb": 1, "apply_flashinfer_rope_qk_inplace": 2}
ARGUMENTS = (
    *("batch_size", "kv_cache_size", "num_attention_heads", "attention_head_dim", "dtype"),
    *("device", "use_int_indices", "sink_tokens", "global_sink_tokens", "attention_window_size"),
    "allow_growth",
)


def matches(host: Any) -> bool:
    """A denoising stage that allocates caches."""
    return {"_allocate_causal_kv_cache", "causal_kv_cache", "transformer"} <= set(dir(host))


def check(host: Any) -> None:
    """The allocation and its arguments, and the transformer."""
    need_arguments(TITLE, host._allocate_causal_kv_cache, *ARGUMENTS)
    need(TITLE, host, "num_transformer_blocks", int)
    need(TITLE, host, "transformer", nn.Module)


def kernels(host: Any) -> list[nn.Module]:
    """The attention kernels of every layer."""
    named = host.transformer.named_modules()
    return [module for path, module in named if path.rpartition(".")[2] in KERNELS]


def rotation_of(session: Session, host: Any) -> SeenRotation:
    """Its rotary embedding, of whatever name: an attention file calls one of these functions."""
    seen, found = SeenRotation(session), 0
    files = {type(module).__module__ for module in host.transformer.modules()}
    for module in (sys.modules[file] for file in sorted(files) if file in sys.modules):
        for name, tensors in EMBEDDINGS.items():
            if callable(vars(module).get(name)):
                seen.watch(module, name, tensors)
                found += 1
    if not found:
        raise HostError(
            f"{TITLE}: got {', '.join(sorted(files))} without a function "
            f"{' or '.join(map(repr, EMBEDDINGS))}: expected the rotary embedding that attention "
            "calls; leave store_keys out to store keys after it"
        )
    return seen


def install(session: Session, host: Any) -> None:
    """Replace the allocation, and let attention show its queries."""
    branch = "main"
    set_aside(session, host, ("causal_kv_cache", "causal_kv_cache_neg"))
    seen = rotation_of(session, host) if stores_before_rope(session) else None

    def allocate(
        _original: Any,
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
    ) -> list[SGLangCache]:
        window = attention_window_size or kv_cache_size
        if global_sink_tokens or allow_growth or window != kv_cache_size:
            raise HostError(
                f"{TITLE}: a cache of {kv_cache_size} tokens with global_sink_tokens="
                f"{global_sink_tokens}, allow_growth={allow_growth}, attention_window_size="
                f"{window}: expected a sink and a window that fill it, and no growth; run this "
                "model without attach"
            )
        frame = gcd(getattr(host, "num_token_per_frame", None) or window, window, sink_tokens)
        cache = session.build(
            branch,
            layers=host.num_transformer_blocks,
            heads=num_attention_heads,
            head_dim=attention_head_dim,
            frame_tokens=frame,
            dtype=dtype,
            device=device,
            window_frames=window // frame,
            sink_frames=sink_tokens // frame,
        )
        turns = None if seen is None else KeyTurns.of(session, branch, seen, frame)
        return [
            SGLangCache(
                batch_size=batch_size,
                cache_size=kv_cache_size,
                num_heads=num_attention_heads,
                head_dim=attention_head_dim,
                dtype=dtype,
                device=device,
                use_int_indices=use_int_indices,
                sink_tokens=sink_tokens,
                store=layer,
                readers=session.readers,
                warn=session.warn,
                turns=turns,
            )
            for layer in cache
        ]

    def negative(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal branch
        branch = "negative"
        try:
            return original(*args, **kwargs)
        finally:
            branch = "main"

    session.patches.wrap(host, "_allocate_causal_kv_cache", allocate)
    if hasattr(host, NEGATIVE):
        session.patches.wrap(host, NEGATIVE, negative)
    for kernel in kernels(host):
        observe_attention(session, kernel, "forward")


ADAPTERS = (
    Adapter(
        name="sglang",
        title=TITLE,
        expects="a CausalDMDDenoisingStage of SGLang diffusion",
        page="docs/hosts/sglang.md",
        matches=matches,
        check=check,
        install=install,
        options=STORE_KEYS,
        aliases=("sglang-diffusion",),
    ),
)
