"""Queries of hosts that attend to copies of what they read: joined, rotated or cloned keys.

Such keys cannot be recognised; but a host asks one layer's cache, and attends, before it asks the
next one's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steadykv.cache import LayerCache

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session
    from steadykv.hosts.before_rope import KeyTurns

__all__ = ["Asked", "observe_next_attention"]


class Asked:
    """The layer whose cache the host asked last, until an attention took it.

    turns: of its keys, where they are stored before their rotary embedding.
    """

    def __init__(self) -> None:
        self.layer: LayerCache | None = None
        self.turns: KeyTurns | None = None

    @torch.compiler.disable
    def show(self, queries: object) -> None:
        """Let that layer observe queries [B, S, H, D], once."""
        layer, self.layer = self.layer, None
        if layer is None or not isinstance(queries, Tensor):
            return
        layer.observe_queries(queries if self.turns is None else self.turns.before(queries))


def observe_next_attention(
    session: Session, owner: Any, name: str, asked: Asked, *, q: str = "q"
) -> None:
    """Let the first `owner.name(q, ...)` after a layer was asked show its queries to that layer.

    q: the name of the first argument, where a host passes it by name. Any further call, such as
    cross-attention, passes through. Without effect where the codecs read no queries.
    """
    if not session.needs_queries:
        return

    def attention(original: Any, *args: Any, **kwargs: Any) -> Any:
        asked.show(args[0] if args else kwargs.get(q))
        return original(*args, **kwargs)

    session.patches.wrap(owner, name, attention)
