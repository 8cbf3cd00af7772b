"""Follows the calls of a model that is handed its cache: hooks before and after, and on queries."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session

__all__ = ["follow_calls", "watch_queries"]


def follow_calls(
    session: Session,
    model: nn.Module,
    before: Callable[[dict[str, Any]], None],
    after: Callable[[], None],
) -> None:
    """Let `before` see the arguments of every forward by name, and `after` its end or failure.

    `before` comes first of all hooks: those that move arguments between devices hand copies of
    dictionaries on. Wrapping `forward` itself would not do: offloading replaces and restores it.
    """
    signature = inspect.signature(model.forward)

    def first(_module: nn.Module, args: Any, kwargs: Any) -> None:
        before(signature.bind_partial(*args, **kwargs).arguments)

    def last(*_: Any) -> None:
        after()

    session.patches.claim(model)
    for hook in (
        model.register_forward_pre_hook(first, prepend=True, with_kwargs=True),
        model.register_forward_hook(last, always_call=True),
    ):
        session.patches.on_undo(hook.remove)


def watch_queries(
    session: Session, norm: nn.Module, heads: int, show: Callable[[Tensor], None]
) -> None:
    """Let `show` see what `norm` makes of queries, as [B, S, H, D]: before their rotary embedding.

    norm: the module whose output [B, S, H·D] the attention goes on with.
    Without effect where the codecs read no queries.
    """
    if not session.needs_queries:
        return

    def seen(_module: nn.Module, _args: Any, out: Tensor) -> None:
        show(out.unflatten(2, (heads, -1)))

    session.patches.on_undo(norm.register_forward_hook(seen).remove)
