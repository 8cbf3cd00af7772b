"""Self-Forcing and Causal-Forcing: a list of dicts of tensors, rewritten at every denoising step.

The pipeline allocates `kv_cache1` (few steps) or `kv_cache_pos` and `kv_cache_neg` (with guidance)
in `_initialize_kv_cache`, once; a new prompt only resets the index tensors. Written for the calling
contract of guandeh17/Self-Forcing 33593df and thu-ml/Causal-Forcing 1fc7bbc (both Apache-2.0).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from steadykv.errors import ConfigError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.dicts import OPTIONS, check_pipeline, replace_lists

__all__ = ["ADAPTERS"]

TITLE = "Self-Forcing"
# Branch -> the pipeline's attribute that holds its list.
LISTS = {"main": "kv_cache1", "positive": "kv_cache_pos", "negative": "kv_cache_neg"}
# Of pipelines with the same initializers that other adapters know.
OTHERS = {
    "_initialize_kv_cache_mouse_and_keyboard", "inference_rolling_forcing", "_pin_current_chunk",
}  # fmt: skip


def matches(host: Any) -> bool:
    """A pipeline with the initializers, and with nothing that another adapter's host has."""
    names = set(dir(host))
    wanted = {"_initialize_kv_cache", "_initialize_crossattn_cache", "generator"}
    return wanted <= names and not OTHERS & names


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
    """The host's window, and the lists.

    Its buffer holds `local_attn_size` frames. Without (-1) it is as long as what is attended to,
    a number of tokens that was fixed for frames of 1560.
    """
    attention = host.generator.model.blocks[0].self_attn
    window, wider = attention.local_attn_size, session.options.get("window_frames")
    if wider is not None:
        window = checked_window(wider, window)
        for block in host.generator.model.blocks:
            size = window * host.frame_seq_length
            session.patches.set(block.self_attn, "max_attention_size", size)
    elif window == -1:
        window = -(-attention.max_attention_size // host.frame_seq_length)
    replace_lists(session, host, LISTS, window)


ADAPTERS = (
    Adapter(
        name="self-forcing",
        title=TITLE,
        expects="a CausalInferencePipeline or CausalDiffusionInferencePipeline",
        page="docs/hosts/self-forcing.md",
        matches=matches,
        check=partial(check_pipeline, TITLE, lists=LISTS),
        install=install,
        options={
            "window_frames": "attended frames of a host without a window, whose own limit is 21",
            **OPTIONS,
        },
        aliases=("causal-forcing", "causal-forcing-chunkwise", "causal-forcing-framewise"),
    ),
)
