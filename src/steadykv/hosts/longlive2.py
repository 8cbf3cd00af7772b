"""LongLive 2.0: attention edits a clone of the cache, and the cache is written after all layers.

Such a clone shares the packed history and holds the newest chunk alone. Written for the calling
contract of NVlabs/LongLive 7860ad9 (Apache-2.0), for one scene: what pins or zeroes a part of the
buffer is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from steadykv.errors import HostError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.aside import set_aside
from steadykv.hosts.before_rope import STORE_KEYS, KeyTurns, stores_before_rope
from steadykv.hosts.cloned import DeferredLayer
from steadykv.hosts.contract import module_of, need, need_arguments, need_function
from steadykv.hosts.copies import Asked, observe_next_attention
from steadykv.hosts.dicts import IndexedEntry, geometry_of
from steadykv.hosts.seen_rotation import SeenRotation

__all__ = ["ADAPTERS"]

TITLE = "LongLive 2.0"
PAGE = "docs/hosts/longlive2.md"
LISTS = {"positive": "kv_cache_pos", "negative": "kv_cache_neg"}
# Options of the pipeline whose caches the adapter cannot follow, and what they do.
REFUSED = {
    "quantize_kv": "its own NVFP4 cache",
    "multi_shot_sink": "pinned scene sinks",
    "shot_clean_recache": "a zeroed buffer at scene cuts",
}
EMBEDDINGS = ("causal_rope_apply", "rope_apply")
EDITS = ("_pin_current_chunk", "_zero_kv_data", "_update_sink_for_scene_cut")


def matches(host: Any) -> bool:
    """A pipeline that can pin chunks."""
    return {"_pin_current_chunk", "_initialize_kv_cache", "generator"} <= set(dir(host))


def check(host: Any) -> None:
    """The initializer, the window, and none of what is not covered."""
    need_arguments(TITLE, host._initialize_kv_cache, "batch_size", "dtype", "device")
    for name, what in REFUSED.items():
        if need(TITLE, host, name):
            raise HostError(f"{TITLE}: got {name} ({what}): expected it off; see {PAGE}")
    for name in ("num_transformer_blocks", "frame_seq_length", "num_frame_per_block", "sink_size"):
        need(TITLE, host, name, int)
    if need(TITLE, host, "local_attn_size", int) == -1:
        raise HostError(
            f"{TITLE}: got local_attn_size -1: expected a window, such as 32; see {PAGE}"
        )
    attention = need(TITLE, host, "_dit_model.blocks.0.self_attn")
    for name in ("num_heads", "head_dim", "max_attention_size"):
        need(TITLE, attention, name, int)
    need_function(TITLE, module_of(attention), "attention")


def install(session: Session, host: Any) -> None:
    """Replace the initializer, refuse edits of the buffer, and let attention show its queries."""
    attention = host._dit_model.blocks[0].self_attn
    asked, seen = Asked(), None
    is_relative = getattr(host, "use_relative_rope", False)
    if stores_before_rope(session) and not is_relative:
        seen = SeenRotation(session)
        seen.watch_all(TITLE, module_of(attention), EMBEDDINGS)
    block_tokens = host.num_frame_per_block * host.frame_seq_length

    def entries(branch: str, batch: int, dtype: torch.dtype, device: Any) -> list[IndexedEntry]:
        cache = session.build(
            branch,
            **geometry_of(host, attention),
            dtype=dtype,
            device=device,
            window_frames=host.local_attn_size,
            sink_frames=host.sink_size,
        )
        frame = host.frame_seq_length
        turns = None if seen is None else KeyTurns.of(session, branch, seen, frame)
        found = []
        for layer in cache:
            place = layer.geometry.device
            side = DeferredLayer(layer, batch, session.readers, asked=asked, turns=turns)
            entry = IndexedEntry(side)
            entry.update(
                quantized=False,
                block_token_size=block_tokens,
                max_blocks=host.local_attn_size * host.frame_seq_length // block_tokens,
                num_heads=attention.num_heads,
                num_filled_blocks=0,
                pinned_start=torch.full((1,), -1, dtype=torch.long, device=place),
                pinned_len=torch.zeros(1, dtype=torch.long, device=place),
            )
            found.append(entry)
        return found

    def initialize(_original: Any, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        for branch, name in LISTS.items():
            setattr(host, name, entries(branch, batch_size, dtype, device))

    def refuse(original: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise HostError(
            f"{TITLE}: got {original.__name__} while attached: expected one scene, without pinned "
            f"sinks and recaching; see {PAGE}"
        )

    set_aside(session, host, LISTS.values())
    session.patches.wrap(host, "_initialize_kv_cache", initialize)
    for name in EDITS:
        if hasattr(host, name):
            session.patches.wrap(host, name, refuse)
    if is_relative:
        session.without_queries("keys are stored before RoPE, its attention gets queries after it")
    else:
        observe_next_attention(session, module_of(attention), "attention", asked)


ADAPTERS = (
    Adapter(
        name="longlive2",
        title=TITLE,
        expects="LongLive 2.0's CausalDiffusionInferencePipeline",
        page=PAGE,
        matches=matches,
        check=check,
        install=install,
        options=STORE_KEYS,
        aliases=("longlive", "longlive-2-5b"),
    ),
)
