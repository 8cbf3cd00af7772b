"""AnyFlow-FAR in diffusers: two tensors a layer, written anew by every cache pass.

A cache pass encodes all latents so far, the newest chunks in full and older ones by larger patches;
denoising passes read what it stored. The caller makes the tensors and hands them to every call, so
they are replaced in its dictionaries at the first one. Keys are stored before their rotary
embedding. Written for the calling contract of diffusers 0.42.1 (Apache-2.0).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from steadykv.errors import ConfigError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.anyflow_pairs import TITLE, Passes
from steadykv.hosts.contract import need, need_arguments
from steadykv.hosts.passes import follow_calls, watch_queries

__all__ = ["ADAPTERS"]

PIECES = ("chunks", "whole")


def transformer_of(host: Any) -> Any:
    """The transformer, also of a pipeline."""
    return host.transformer if "encode_kv_cache" in dir(host) else host


def matches(host: Any) -> bool:
    """A transformer with the patches for old chunks, or a pipeline that has one."""
    return {"far_patch_embedding", "build_attention_mask"} <= set(dir(transformer_of(host)))


def check(host: Any) -> None:
    """The forward's arguments, the configuration, the attention of the blocks."""
    transformer = transformer_of(host)
    names = ("hidden_states", "chunk_partition", "kv_cache", "kv_cache_flag")
    need_arguments(TITLE, transformer.forward, *names)
    need(TITLE, transformer, "config.full_chunk_limit", int)
    for name in ("patch_size", "compressed_patch_size"):
        need(TITLE, transformer, f"config.{name}", (tuple, list))
    for name, kind in (("heads", int), ("inner_dim", int), ("norm_q", nn.Module)):
        need(TITLE, transformer, f"blocks.0.attn1.{name}", kind)


def install(session: Session, host: Any) -> None:
    """Follow the calls of the transformer, and its queries."""
    pieces = session.options.get("pieces", "chunks")
    if pieces not in PIECES:
        raise ConfigError(f"pieces is {pieces!r}: expected {' or '.join(map(repr, PIECES))}")
    transformer = transformer_of(host)
    passes = Passes(session, transformer)
    follow_calls(session, transformer, passes.before, passes.after)
    for number, block in enumerate(transformer.blocks):
        attention = block.attn1
        watch_queries(session, attention.norm_q, attention.heads, partial(passes.show, number))


ADAPTERS = (
    Adapter(
        name="anyflow-far",
        title=TITLE,
        expects="a diffusers AnyFlowFARTransformer3DModel, or an AnyFlowFARPipeline",
        page="docs/hosts/anyflow-far.md",
        matches=matches,
        check=check,
        install=install,
        options={
            "pieces": "'chunks' (the default): old chunks are packed once; 'whole': all together, "
            "in fewer bits, after every chunk"
        },
        aliases=("anyflow",),
    ),
)
