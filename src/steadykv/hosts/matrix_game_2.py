"""Matrix-Game 2: Self-Forcing's list of dicts, and caches of mouse and keyboard beside it.

Every call of `inference` makes all caches anew. Only `kv_cache1` is ours: the caches of actions are
indexed in frames and used by attention modules of their own, and stay as the host makes them, as
does the one of cross-attention. Written for the calling contract of SkyworkAI/Matrix-Game 5a4fa8b
(Matrix-Game-2/pipeline/causal_inference.py, MIT); its attention was read in forks.
"""

from __future__ import annotations

from typing import Any

from steadykv.errors import HostError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.contract import need_arguments
from steadykv.hosts.dicts import OPTIONS, check_pipeline, replace_lists

__all__ = ["ADAPTERS"]

TITLE = "Matrix-Game 2"
LISTS = {"main": "kv_cache1"}
ACTIONS = "_initialize_kv_cache_mouse_and_keyboard"


def matches(host: Any) -> bool:
    """A pipeline with the initializers of both kinds of caches."""
    return {"_initialize_kv_cache", ACTIONS, "generator"} <= set(dir(host))


def check(host: Any) -> None:
    """As Self-Forcing, with a window: the host refuses to run without one."""
    check_pipeline(TITLE, host, LISTS)
    need_arguments(TITLE, getattr(host, ACTIONS), "batch_size", "dtype", "device")
    if host.local_attn_size < 1:
        raise HostError(
            f"{TITLE}: got local_attn_size {host.local_attn_size}: expected a window in frames, 6 "
            "in the released configurations; load the model with one"
        )


def install(session: Session, host: Any) -> None:
    """The main list alone."""
    replace_lists(session, host, LISTS, host.local_attn_size)


ADAPTERS = (
    Adapter(
        name="matrix-game-2",
        title=TITLE,
        expects="a CausalInferencePipeline or CausalInferenceStreamingPipeline of Matrix-Game 2",
        page="docs/hosts/matrix-game-2.md",
        matches=matches,
        check=check,
        install=install,
        options=OPTIONS,
        aliases=("matrix-game", "matrix-game-2.0"),
    ),
)
