"""LongCat-Video: a clean pass per segment encodes condition frames, every noisy pass reads them.

The pipeline keeps `{layer: (k, v)}`, K and V [1, H, S, D] with K before RoPE, and repeats it for
both guidance branches itself. Written for the calling contract of meituan-longcat/LongCat-Video
6b3f4b8 (MIT).
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import nn

from steadykv.errors import HostError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.contract import describe, need, need_arguments
from steadykv.hosts.longcat_segment import TITLE, SegmentStore
from steadykv.hosts.passes import see_output

__all__ = ["ADAPTERS"]


def matches(host: Any) -> bool:
    """A pipeline that stores the keys and values of its condition frames."""
    return {"_update_kv_cache_dict", "_cache_clean_latents", "dit"} <= set(dir(host))


def check(host: Any) -> None:
    """The two functions' arguments, and the attention modules with their norm of queries."""
    need_arguments(TITLE, need(TITLE, host, "_update_kv_cache_dict"), "kv_cache_dict")
    encode = need(TITLE, host, "_cache_clean_latents")
    need_arguments(TITLE, encode, "cond_latents")
    if "audio_embs" in inspect.signature(encode).parameters:
        raise HostError(
            f"{TITLE}: got a {describe(host)}, whose clean pass takes audio_embs: expected a "
            "LongCatVideoPipeline; the Avatar pipelines are not covered, see docs/hosts"
        )
    for number in range(len(need(TITLE, host, "dit.blocks", nn.ModuleList))):
        need(TITLE, host, f"dit.blocks.{number}.attn.q_norm", nn.Module)


def install(session: Session, host: Any) -> None:
    """Pack at the end of each block of the clean pass; hand out an unpacking dictionary."""
    store = SegmentStore(session, len(host.dit.blocks))
    session.patches.keep(host, "kv_cache_dict")
    session.patches.wrap(host, "_cache_clean_latents", store.encode)
    session.patches.wrap(host, "_update_kv_cache_dict", store.update)
    for number, block in enumerate(host.dit.blocks):
        see_output(session, block, partial(store.take, number))
        if session.needs_queries:
            see_output(session, block.attn.q_norm, partial(store.observe, number))


ADAPTERS = (
    Adapter(
        name="longcat-video",
        title=TITLE,
        expects="a LongCatVideoPipeline",
        page="docs/hosts/longcat-video.md",
        matches=matches,
        check=check,
        install=install,
        aliases=("longcat", "longcat-video-13.6b"),
    ),
)
