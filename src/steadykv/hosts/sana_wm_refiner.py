"""The SANA-WM refiner in diffusers: an object per layer that keeps a sink and a history.

The pipeline fills the sink once, and appends to the history by getting it, concatenating and
storing the longer one; then it stores the end of what it gets. Written for the calling
contract of diffusers 0.42.1 (Apache-2.0).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.before_rope import STORE_KEYS, stores_before_rope
from steadykv.hosts.contract import module_of, need, need_arguments, need_function
from steadykv.hosts.passes import follow_calls, watch_queries
from steadykv.hosts.sana_wm_layers import TITLE
from steadykv.hosts.sana_wm_passes import Passes
from steadykv.hosts.seen_rotation import SeenRotation

__all__ = ["ADAPTERS"]

ATTENTION = "dispatch_attention_fn"
EMBEDDINGS = ("apply_interleaved_rotary_emb", "apply_split_rotary_emb")


def transformer_of(host: Any) -> Any:
    """The transformer, also of the refiner's pipeline."""
    return host.transformer if "_capture_block_kv" in dir(host) else host


def matches(host: Any) -> bool:
    """A transformer that is told absolute positions, or the pipeline that has one."""
    names = {"transformer_blocks", "build_rotary_emb_for_absolute_positions"}
    return names <= set(dir(transformer_of(host)))


def check(host: Any) -> None:
    """The forward's arguments, the configuration, the attention of the blocks."""
    transformer = transformer_of(host)
    names = ("hidden_states", "kv_cache", "kv_cache_mode")
    need_arguments(TITLE, transformer.forward, *names)
    need_arguments(TITLE, transformer.build_rotary_emb_for_absolute_positions, "height", "width")
    for name in ("patch_size", "patch_size_t"):
        need(TITLE, transformer, f"config.{name}", int)
    need(TITLE, transformer, "transformer_blocks.0.attn1.heads", int)
    need(TITLE, transformer, "transformer_blocks.0.attn1.norm_q", nn.Module)
    processor = need(TITLE, transformer, "transformer_blocks.0.attn1.processor")
    need_function(TITLE, module_of(processor), ATTENTION)


def install(session: Session, host: Any) -> None:
    """Hooks around the forward, and on the queries where a codec reads them."""
    transformer = transformer_of(host)
    passes = Passes(session, transformer)
    session.patches.wrap(transformer, "build_rotary_emb_for_absolute_positions", passes.frame)
    follow_calls(session, transformer, passes.before, passes.after)
    layers = [block.attn1 for block in transformer.transformer_blocks]
    module = module_of(layers[0].processor)
    if stores_before_rope(session):
        passes.seen = SeenRotation(session, heads=layers[0].heads)
        passes.seen.watch_all(TITLE, module, EMBEDDINGS)
    for number, layer in enumerate(layers):
        watch_queries(session, layer.norm_q, layer.heads, partial(passes.show, number))
    if session.needs_queries and passes.seen is None:
        session.patches.wrap(module, ATTENTION, passes.attention)


ADAPTERS = (
    Adapter(
        name="sana-wm-refiner",
        title=TITLE,
        expects="a diffusers SanaWMLTX2RefinerTransformer3DModel, or a SanaWMLTX2Refiner pipeline",
        page="docs/hosts/sana-wm-refiner.md",
        matches=matches,
        check=check,
        install=install,
        options=STORE_KEYS,
        aliases=("sana-wm",),
    ),
)
