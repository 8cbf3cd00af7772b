"""Follows the calls of a model that is handed its cache: before and after, and what modules return.

Compiled code does not notice hooks that came after it was traced, so where it could be, what is
called is replaced instead: compiled code checks that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from steadykv.hosts.contract import uncompiled

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session

__all__ = ["follow_calls", "see_output", "watch_queries"]

IN_PLACE = "_compiled_call_impl"
"""What `module.compile()` writes, and `module(...)` then calls, instead of hooks and `forward`."""


def follow_calls(
    session: Session,
    model: nn.Module,
    before: Callable[[dict[str, Any]], None],
    after: Callable[[], None] = lambda: None,
) -> None:
    """Let `before` see the arguments of every forward by name, and `after` its end or failure.

    `before` comes first of all hooks: those that move arguments between devices hand copies of
    dictionaries on. Wrapping `forward` itself would not do: offloading replaces and restores it.
    Hooks of what `torch.compile(model)` returned run outside of compiled code, always.
    """
    model = uncompiled(model)
    signature = inspect.signature(model.forward)

    def first(_module: nn.Module, args: Any, kwargs: Any) -> None:
        before(signature.bind_partial(*args, **kwargs).arguments)

    def last(*_: Any) -> None:
        after()

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        first(model, args, kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            after()

    session.patches.claim(model)
    if getattr(model, IN_PLACE, None) is not None:
        session.patches.wrap(model, IN_PLACE, call)
        return
    for hook in (
        model.register_forward_pre_hook(first, prepend=True, with_kwargs=True),
        model.register_forward_hook(last, always_call=True),
    ):
        session.patches.on_undo(hook.remove)


def see_output(session: Session, module: nn.Module, see: Callable[[Any], Any]) -> None:
    """Let `see` have what the module returns, and replace that by what it returns, if not None.

    A compiler leaves `see` alone. `forward` is replaced, but for a module that accelerate offloads,
    which replaces and restores it as well: there a hook is put behind it.
    """
    seen = torch.compiler.disable(see)

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        instead = seen(out)
        return out if instead is None else instead

    module = uncompiled(module)
    if hasattr(module, "_hf_hook"):
        hook = module.register_forward_hook(lambda _module, _args, out: seen(out))
        session.patches.on_undo(hook.remove)
    else:
        session.patches.wrap(module, "forward", forward)


def watch_queries(
    session: Session, norm: nn.Module, heads: int, show: Callable[[Tensor], None]
) -> None:
    """Let `show` see what `norm` makes of queries, as [B, S, H, D]: before their rotary embedding.

    norm: the module whose output [B, S, H·D] the attention goes on with.
    Without effect where the codecs read no queries.
    """
    if session.needs_queries:
        see_output(session, norm, lambda out: show(out.unflatten(2, (heads, -1))))
