"""Self-Forcing and Causal-Forcing: a list of dicts of tensors, rewritten at every denoising step.

The pipeline allocates `kv_cache1` (few steps) or `kv_cache_pos` and `kv_cache_neg` (with guidance)
in `_initialize_kv_cache`, once; a new prompt only resets the index tensors. Written for the calling
contract of guandeh17/Self-Forcing 33593df and thu-ml/Causal-Forcing 1fc7bbc (both Apache-2.0).
"""

from __future__ import annotations

from typing import Any

import torch

from steadykv.errors import ConfigError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.before_rope import STORE_KEYS, HostRotation, stores_before_rope
from steadykv.hosts.contract import module_of, need, need_arguments, need_function
from steadykv.hosts.packed_window import ATTENTION, attends_packed
from steadykv.hosts.queries import observe_attention
from steadykv.hosts.slices import SlicedLayer

__all__ = ["ADAPTERS"]

TITLE = "Self-Forcing"
ROPE = "causal_rope_apply"
# Branch -> the pipeline's attribute that holds its list.
LISTS = {"main": "kv_cache1", "positive": "kv_cache_pos", "negative": "kv_cache_neg"}
# Of pipelines with the same initializers that other adapters know.
OTHERS = {
    "_initialize_kv_cache_mouse_and_keyboard", "inference_rolling_forcing", "_pin_current_chunk",
}  # fmt: skip


class IndexedEntry(dict[str, Any]):
    """One layer's dict. A new index tensor is how the host says that a new prompt begins."""

    def __init__(self, side: SlicedLayer, device: torch.device) -> None:
        self.side = side
        zeros = {
            name: torch.zeros(1, dtype=torch.long, device=device)
            for name in ("global_end_index", "local_end_index")
        }
        super().__init__(k=side.k, v=side.v, **zeros)

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "global_end_index":
            self.side.reset()
        super().__setitem__(name, value)


def matches(host: Any) -> bool:
    """A pipeline with the initializers, and with nothing that another adapter's host has."""
    names = set(dir(host))
    wanted = {"_initialize_kv_cache", "_initialize_crossattn_cache", "generator"}
    return wanted <= names and not OTHERS & names


def check(host: Any) -> None:
    """The initializer's arguments, and the attention modules with their window."""
    need_arguments(TITLE, host._initialize_kv_cache, "batch_size", "dtype", "device")
    need(TITLE, host, "num_transformer_blocks", int)
    need(TITLE, host, "frame_seq_length", int)
    attention = need(TITLE, host, "generator.model.blocks.0.self_attn")
    for name in ("num_heads", "head_dim", "local_attn_size", "sink_size", "max_attention_size"):
        need(TITLE, attention, name, int)
    need_function(TITLE, module_of(attention), "attention")
    need_function(TITLE, module_of(attention), ROPE)


def checked_window(frames: Any, local: int) -> int:
    """The option `window_frames`, which only a host without a window of its own may be given."""
    if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
        raise ConfigError(f"window_frames is {frames!r}: expected a positive number of frames")
    if local != -1:
        raise ConfigError(
            f"window_frames is {frames} where local_attn_size is {local}: expected a host without "
            "a window (-1); leave the option out, the host's own window is used"
        )
    return frames


def install(session: Session, host: Any) -> None:
    """Replace the initializer, and let attention show its queries."""
    attention = host.generator.model.blocks[0].self_attn
    frame_tokens = host.frame_seq_length
    window = attention.max_attention_size // frame_tokens
    wider = session.options.get("window_frames")
    if wider is not None:
        window = checked_window(wider, attention.local_attn_size)
        for block in host.generator.model.blocks:
            size = window * frame_tokens
            session.patches.set(block.self_attn, "max_attention_size", size)
    for name in LISTS.values():
        if name in vars(host):
            if getattr(host, name) is not None:
                session.warn(
                    f"{name} was allocated before: its memory stays in use; attach before the "
                    f"first run, or set {name} to None"
                )
            session.patches.set(host, name, None)

    rotation, packed = None, attends_packed(session)
    if stores_before_rope(session):
        rotation = HostRotation(session.patches, module_of(attention), ROPE, frame_tokens)

    def entries(branch: str, batch: int, dtype: torch.dtype, device: Any) -> list[IndexedEntry]:
        cache = session.build(
            branch,
            layers=host.num_transformer_blocks,
            heads=attention.num_heads,
            head_dim=attention.head_dim,
            frame_tokens=frame_tokens,
            dtype=dtype,
            device=device,
            window_frames=window,
            sink_frames=attention.sink_size,
        )
        sides = (
            SlicedLayer(layer, batch, session.readers, rotation=rotation, packed=packed)
            for layer in cache
        )
        return [IndexedEntry(side, side.layer.geometry.device) for side in sides]

    def initialize(_original: Any, batch_size: int, dtype: torch.dtype, device: Any) -> None:
        for branch, name in LISTS.items():
            if hasattr(host, name):
                setattr(host, name, entries(branch, batch_size, dtype, device))

    session.patches.wrap(host, "_initialize_kv_cache", initialize)
    observe_attention(session, module_of(attention), "attention")


ADAPTERS = (
    Adapter(
        name="self-forcing",
        title=TITLE,
        expects="a CausalInferencePipeline or CausalDiffusionInferencePipeline",
        page="docs/hosts/self-forcing.md",
        matches=matches,
        check=check,
        install=install,
        options={
            "window_frames": "attended frames of a host without a window, whose own limit is 21",
            **STORE_KEYS,
            **ATTENTION,
        },
        aliases=("causal-forcing", "causal-forcing-chunkwise", "causal-forcing-framewise"),
    ),
)
