"""Causal-Forcing's long videos: rolling forcing, whose first block is kept before its rotation.

A query holds several blocks of frames, of which the first is written; block 0 is stored unrotated
and rotated by the host at every read, later blocks after it. Written for the calling contract of
`long_video/` in thu-ml/Causal-Forcing 1fc7bbc, whose licence (Tencent RollingForcing) allows
academic use only; nothing of it is here.
"""

from __future__ import annotations

from typing import Any

import torch

from steadykv.errors import HostError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.aside import set_aside
from steadykv.hosts.before_rope import STORE_KEYS, KeyTurns, stores_before_rope
from steadykv.hosts.contract import module_of, need, need_arguments, need_function
from steadykv.hosts.copies import Asked, observe_next_attention
from steadykv.hosts.dicts import IndexedEntry, geometry_of
from steadykv.hosts.seen_rotation import SeenRotation
from steadykv.hosts.slices import SlicedLayer

__all__ = ["ADAPTERS"]

TITLE = "Causal-Forcing rolling"
LIST = "kv_cache_clean"
EMBEDDINGS = ("causal_rope_apply", "rope_apply")


class RollingEntry(IndexedEntry):
    """One layer's dict, which the host asks for `v` right before it attends."""

    def __init__(self, side: SlicedLayer, asked: Asked) -> None:
        super().__init__(side)
        self.asked = asked

    @torch.compiler.disable
    def __getitem__(self, name: str) -> Any:
        if name == "v":
            self.asked.layer, self.asked.turns = self.side.layer, self.side.turns
        return super().__getitem__(name)


def matches(host: Any) -> bool:
    """A pipeline that rolls over several blocks."""
    return {"inference_rolling_forcing", "_initialize_kv_cache", "generator"} <= set(dir(host))


def check(host: Any) -> None:
    """The initializer, and that one block and one frame have the same tokens everywhere."""
    need_arguments(TITLE, host._initialize_kv_cache, "batch_size", "dtype", "device")
    need(TITLE, host, LIST)
    need(TITLE, host, "num_transformer_blocks", int)
    attention = need(TITLE, host, "generator.model.blocks.0.self_attn")
    for name in ("num_heads", "head_dim", "max_attention_size"):
        need(TITLE, attention, name, int)
    frame = need(TITLE, host, "frame_seq_length", int)
    expected = {
        "frame_length": frame,
        "block_length": need(TITLE, host, "num_frame_per_block", int) * frame,
    }
    for name, tokens in expected.items():
        if need(TITLE, attention, name, int) != tokens:
            raise HostError(
                f"{TITLE}: got {name} {getattr(attention, name)} in attention: expected {tokens}, "
                "as the pipeline's frame_seq_length and num_frame_per_block say; make them agree"
            )
    need_function(TITLE, module_of(attention), "attention")


def install(session: Session, host: Any) -> None:
    """Replace the initializer, and let attention show its queries."""
    attention = host.generator.model.blocks[0].self_attn
    asked = Asked()
    block = host.num_frame_per_block
    changes: dict[str, Any] = {}
    seen: SeenRotation | None = None
    if stores_before_rope(session):  # then block 0 and the queries are in one frame
        seen = SeenRotation(session)
        seen.watch_all(TITLE, module_of(attention), EMBEDDINGS)
    elif session.needs_queries and session.config.keys.first_span == "own":
        changes["first_span"] = "paper"
        session.warn(
            "first_span is 'own': block 0 is stored before its rotation, the queries come after "
            "theirs; it is packed without them, as with first_span='paper'"
        )

    def initialize(_original: Any, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        cache = session.build(
            "main",
            **geometry_of(host, attention),
            dtype=dtype,
            device=device,
            # The clean pass reads the newest frames without block 0, which is fetched apart.
            window_frames=block + attention.max_attention_size // host.frame_seq_length,
            sink_frames=block,
            **changes,
        )
        turns = None
        if seen is not None:
            frame = host.frame_seq_length
            turns = KeyTurns.of(session, "main", seen, frame, raw=block * frame)
        sides = (
            SlicedLayer(layer, batch_size, session.readers, substitutes=False, turns=turns)
            for layer in cache
        )
        entries = [RollingEntry(side, asked) for side in sides]
        setattr(host, LIST, entries)

    set_aside(session, host, (LIST,))
    session.patches.wrap(host, "_initialize_kv_cache", initialize)
    observe_next_attention(session, module_of(attention), "attention", asked)


ADAPTERS = (
    Adapter(
        name="causal-forcing-rolling",
        title=TITLE,
        expects="the CausalInferencePipeline of Causal-Forcing's long_video folder",
        page="docs/hosts/causal-forcing-rolling.md",
        matches=matches,
        check=check,
        install=install,
        options=STORE_KEYS,
        aliases=("rolling-forcing", "causal-forcing-long-video"),
    ),
)
