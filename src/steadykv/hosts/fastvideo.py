"""FastVideo's causal stages: Self-Forcing's dict, re-assigned detached, and trimmed after a read.

The stage of causal Wan reads its window by one slice, that of Matrix-Game-2 reads everything and
trims that. Written for the calling contract of hao-ai-lab/FastVideo 0.2.1 (Apache-2.0). Two experts
and CUDA graphs are not covered.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from steadykv.errors import HostError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.before_rope import STORE_KEYS, KeyTurns, stores_before_rope
from steadykv.hosts.contract import module_of, need, need_arguments
from steadykv.hosts.dicts import IndexedEntry, geometry_of
from steadykv.hosts.queries import observe_attention
from steadykv.hosts.seen_rotation import SeenRotation
from steadykv.hosts.slices import SlicedLayer
from steadykv.hosts.trimmed import TrimmedTensor

__all__ = ["ADAPTERS"]

TITLE = "FastVideo"
PAGE = "docs/hosts/fastvideo.md"
ROPE = ("absolute", "relativistic")
EMBEDDINGS = ("_apply_rotary_emb", "causal_rope_apply")  # of causal Wan, of Matrix-Game-2
BRANCHES = ("main", "second")  # a stage with guidance asks for a second list while it has the first


def matches(host: Any) -> bool:
    """A stage with a causal transformer."""
    wanted = {"transformer", "_initialize_kv_cache", "_initialize_crossattn_cache"}
    return wanted | {"sliding_window_num_frames"} <= set(dir(host))


def plays_matrix_game(host: Any) -> bool:
    """Whether it reads everything and trims that: the stage that has caches of actions too."""
    return hasattr(host, "_initialize_action_kv_cache")


def check(host: Any) -> None:
    """The initializer, one transformer, and one window in the stage and in its attention."""
    need_arguments(TITLE, host._initialize_kv_cache, "batch_size", "dtype", "device")
    need(TITLE, host, "num_transformer_blocks", int)
    attention = need(TITLE, host, "transformer.blocks.0.attn1")
    for name in ("num_heads", "head_dim", "local_attn_size", "sink_size"):
        need(TITLE, attention, name, int)
    local = need(TITLE, host, "local_attn_size", int)
    policy = getattr(attention, "rope_cache_policy", ROPE[0])
    found = {
        f"transformer_2 of {type(getattr(host, 'transformer_2', None)).__name__}": (
            getattr(host, "transformer_2", None) is None, "one transformer (None)"
        ),
        "a stage that keeps kv_cache1": (not hasattr(host, "kv_cache1"), "FastVideo 0.2"),
        f"local_attn_size {local} in the stage": (
            local == attention.local_attn_size,
            f"{attention.local_attn_size}, as its attention has",
        ),
        f"rope_cache_policy {policy!r}": (policy in ROPE, " or ".join(map(repr, ROPE))),
    }  # fmt: skip
    for got, (is_right, expected) in found.items():
        if not is_right:
            raise HostError(f"{TITLE}: got {got}: expected {expected}; see {PAGE}")
    if not (plays_matrix_game(host) or is_relativistic(attention)):
        need(TITLE, attention, "attn.forward")


def install(session: Session, host: Any) -> None:
    """Replace the initializer, and let attention show its queries."""
    attention = host.transformer.blocks[0].attn1
    local, trims = attention.local_attn_size, plays_matrix_game(host)
    newest: dict[str, weakref.ref[IndexedEntry]] = {}
    seen: SeenRotation | None = None
    if stores_before_rope(session) and not is_relativistic(attention):
        seen = SeenRotation(session)
        seen.watch_all(TITLE, module_of(attention), EMBEDDINGS)

    def is_free(branch: str) -> bool:
        return branch not in newest or newest[branch]() is None

    def initialize(_original: Any, batch_size: int, dtype: Any, device: Any) -> list[Any]:
        branch = next(filter(is_free, BRANCHES), None)
        if branch is None:
            raise HostError(
                f"{TITLE}: got a third list while two are in use: expected two at most; leave the "
                "block and attach again"
            )
        cache = session.build(
            branch,
            **geometry_of(host, attention),
            dtype=dtype,
            device=device,
            window_frames=None if local == -1 else local,
            sink_frames=0 if local == -1 else attention.sink_size,
        )
        frame = host.frame_seq_length
        turns = None if seen is None else KeyTurns.of(session, branch, seen, frame)
        entries = []
        for layer in cache:
            side = SlicedLayer(
                layer, batch_size, session.readers, substitutes=not trims, turns=turns
            )
            if trims:
                side.k, side.v = TrimmedTensor(side, "key"), TrimmedTensor(side, "value")
            entries.append(IndexedEntry(side))
        newest[branch] = weakref.ref(entries[0])
        return entries

    session.patches.wrap(host, "_initialize_kv_cache", initialize)
    if session.needs_queries:
        observe(session, host, seen is not None or is_relativistic(attention))


def is_relativistic(attention: Any) -> bool:
    """Whether keys are stored before RoPE, which is then applied by their place in the window."""
    return getattr(attention, "rope_cache_policy", ROPE[0]) == ROPE[1]


def observe(session: Session, host: Any, is_before: bool) -> None:
    """Queries in the frame of the stored keys: those of `attn1`, or, after RoPE, of its `attn`."""

    @torch.compiler.disable
    def show(given: tuple[Any, ...], queries: Any) -> None:
        entry = next((x for x in given if isinstance(x, IndexedEntry)), None)
        if entry is not None and isinstance(queries, Tensor):
            entry.side.layer.observe_queries(queries)

    def before_rope(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        show((*args, *kwargs.values()), args[0] if args else kwargs.get("q"))
        return out

    if not is_before and plays_matrix_game(host):
        session.without_queries("Matrix-Game rotates and attends within one function")
        return
    for block in host.transformer.blocks:
        if is_before:
            session.patches.wrap(block.attn1, "forward", before_rope)
        else:
            observe_attention(session, block.attn1.attn, "forward")


ADAPTERS = (
    Adapter(
        name="fastvideo",
        title=TITLE,
        expects="the denoising stage of FastVideo's causal Wan or Matrix-Game-2 pipeline",
        page=PAGE,
        matches=matches,
        check=check,
        install=install,
        options=STORE_KEYS,
        aliases=("fastvideo-causal-wan", "fastvideo-matrix-game-2"),
    ),
)
