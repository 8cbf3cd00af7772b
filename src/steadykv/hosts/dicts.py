"""Family A hosts whose cache is a list of dicts, one a layer, made by an initializer of theirs.

A dict holds the tensors `k` and `v` [B, S, H, D] and two index tensors, `global_end_index` and
`local_end_index`. What the pipelines of this kind share is here: the dict, the list, the checks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from steadykv.errors import HostError
from steadykv.hosts.adapter import Session
from steadykv.hosts.aside import set_aside
from steadykv.hosts.before_rope import STORE_KEYS, KeyTurns, stores_before_rope
from steadykv.hosts.contract import (
    describe,
    module_of,
    need,
    need_arguments,
    need_function,
    uncompiled,
)
from steadykv.hosts.packed_window import ATTENTION, attends_packed
from steadykv.hosts.queries import observe_attention
from steadykv.hosts.seen_rotation import SeenRotation
from steadykv.hosts.slices import SlicedLayer

__all__ = [
    "OPTIONS",
    "DictCaches",
    "IndexedEntry",
    "check_pipeline",
    "geometry_of",
    "module_of_forward",
    "replace_lists",
]

ROPE = "causal_rope_apply"
OPTIONS = {**STORE_KEYS, **ATTENTION}
"""Options of every host of this kind."""


class IndexedEntry(dict[str, Any]):
    """One layer's dict. A new index of 0 is how the host says that a new prompt begins.

    The host fills its index tensors in place; an index may be an int as well, replaced each pass.
    """

    def __init__(self, side: SlicedLayer) -> None:
        self.side = side
        device = side.layer.geometry.device
        zeros = {
            name: torch.zeros(1, dtype=torch.long, device=device)
            for name in ("global_end_index", "local_end_index")
        }
        super().__init__(k=side.k, v=side.v, **zeros)

    @torch.compiler.disable
    def __setitem__(self, name: str, value: Any) -> None:
        if name == "global_end_index" and int(value) == 0:
            self.side.reset()
        super().__setitem__(name, value)


def geometry_of(host: Any, attention: Any) -> dict[str, Any]:
    """Arguments of `Session.build` that every pipeline of this kind tells in the same words."""
    return {
        "layers": host.num_transformer_blocks,
        "heads": attention.num_heads,
        "head_dim": attention.head_dim,
        "frame_tokens": host.frame_seq_length,
    }


def module_of_forward(attention: Any) -> ModuleType:
    """The file whose functions an attention module calls: its class's, or of a forward of its own.

    Ulysses, for one, replaces the forward of every attention module.
    """
    own = vars(uncompiled(attention)).get("forward")
    return module_of(attention) if own is None else sys.modules[own.__module__]


class DictCaches:
    """The lists of one attachment.

    attention: the first layer's module. function: what its forward calls as function(q, k, v).
    rope: its rotary embedding (`SeenRotation`).
    """

    def __init__(
        self,
        session: Session,
        attention: Any,
        *,
        function: str = "attention",
        rope: str = ROPE,
    ) -> None:
        self.session, self.packed = session, attends_packed(session)
        self.rotation: SeenRotation | None = None
        module = module_of_forward(attention)
        if stores_before_rope(session):
            self.rotation = SeenRotation(session)
            self.rotation.watch(module, rope)
        observe_attention(session, module, function)

    def build(self, branch: str, batch: int, **geometry: Any) -> list[IndexedEntry]:
        """One dict a layer, for a guidance branch. geometry: arguments of `Session.build`."""
        cache = self.session.build(branch, **geometry)
        turns = None
        if self.rotation is not None:
            turns = KeyTurns.of(self.session, branch, self.rotation, geometry["frame_tokens"])
        sides = (
            SlicedLayer(layer, batch, self.session.readers, turns=turns, packed=self.packed)
            for layer in cache
        )
        return [IndexedEntry(side) for side in sides]


def check_pipeline(title: str, host: Any, lists: Mapping[str, str]) -> None:
    """The initializer's arguments, its lists, and the attention modules with their window."""
    initialize = host._initialize_kv_cache
    need_arguments(title, initialize, "batch_size", "dtype", "device", only=True)
    if not any(name in vars(host) for name in lists.values()):
        raise HostError(
            f"{title}: got a {describe(host)} without {' or '.join(lists.values())}: expected the "
            "attribute that holds its list of caches; this host differs from the one that the "
            "adapter knows, see docs/hosts"
        )
    need(title, host, "num_transformer_blocks", int)
    need(title, host, "frame_seq_length", int)
    attention = need(title, host, "generator.model.blocks.0.self_attn")
    for name in ("num_heads", "head_dim", "local_attn_size", "sink_size", "max_attention_size"):
        need(title, attention, name, int)
    local = need(title, host, "local_attn_size", int)
    if local != attention.local_attn_size:
        raise HostError(
            f"{title}: got local_attn_size {local} in the pipeline and {attention.local_attn_size} "
            "in its attention: expected the same window; set both before attaching"
        )
    for name in ("attention", ROPE):
        need_function(title, module_of_forward(attention), name)


def replace_lists(
    session: Session, host: Any, lists: Mapping[str, str], window_frames: int
) -> None:
    """Let the pipeline's initializer make our lists. lists: branch -> the attribute that holds it.

    An attribute that the pipeline does not have is left out.
    """
    attention = host.generator.model.blocks[0].self_attn
    own = {branch: name for branch, name in lists.items() if name in vars(host)}
    caches = DictCaches(session, attention)
    set_aside(session, host, own.values())

    def initialize(_original: Any, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        for branch, name in own.items():
            entries = caches.build(
                branch,
                batch_size,
                **geometry_of(host, attention),
                dtype=dtype,
                device=device,
                window_frames=window_frames,
                sink_frames=attention.sink_size,
            )
            setattr(host, name, entries)

    session.patches.wrap(host, "_initialize_kv_cache", initialize)
