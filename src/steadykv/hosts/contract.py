"""What an adapter checks of a host before it touches anything: attributes, arguments, functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from steadykv.errors import HostError

__all__ = ["describe", "module_of", "need", "need_arguments", "need_function", "uncompiled"]

_ABSENT: Any = object()


def describe(thing: object) -> str:
    """Module and class of an object, as messages name it."""
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def uncompiled(thing: Any) -> Any:
    """The module that `torch.compile(module)` was given, or the thing itself.

    What it returned hides the forward's arguments and the class, and hands most attributes on: an
    attribute that is written to it lands on the module inside.
    """
    while isinstance(thing, nn.Module) and isinstance(getattr(thing, "_orig_mod", None), nn.Module):
        thing = thing._orig_mod
    return thing


def need(host: str, thing: Any, path: str, kind: type | tuple[type, ...] = object) -> Any:
    """The attribute at a dotted `path` of `thing`, of type `kind`; else HostError.

    A number in the path is an index. host: the adapter's title, for the message.
    """
    found, walked = thing, type(thing).__name__
    for name in path.split("."):
        found = uncompiled(found)
        try:
            found = found[int(name)] if name.isdigit() else getattr(found, name, _ABSENT)
        except (IndexError, KeyError, TypeError):
            found = _ABSENT
        if found is _ABSENT:
            raise HostError(
                f"{host}: got {walked} without {name!r}: expected {path}; this host differs from "
                "the one that the adapter knows, see docs/hosts"
            )
        walked += f".{name}"
    if not isinstance(found, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise HostError(
            f"{host}: got {walked} of {describe(found)}: expected "
            f"{' or '.join(k.__name__ for k in kinds)}; this host differs from the one that the "
            "adapter knows, see docs/hosts"
        )
    return found


def need_arguments(
    host: str, function: Callable[..., Any], *names: str, only: bool = False
) -> None:
    """HostError unless `function` can be called with these arguments by name.

    only: it has no others, as the one that takes its place knows none.
    """
    if not callable(function):
        raise HostError(
            f"{host}: got {function!r}: expected a function with the arguments "
            f"{', '.join(names)}; this host differs from the one that the adapter knows, see "
            "docs/hosts"
        )
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    label = f"{getattr(function, '__qualname__', repr(function))}({', '.join(parameters)})"
    missing = [name for name in names if name not in parameters]
    others = [name for name in parameters if name not in names] if only else []
    if missing or others:
        wrong = (
            f"an argument {' and '.join(map(repr, missing))}"
            if missing
            else (f"no argument {' and '.join(map(repr, others))}")
        )
        raise HostError(
            f"{host}: got {label}: expected {wrong}; this host differs from the one that the "
            "adapter knows, see docs/hosts"
        )


def module_of(thing: object) -> ModuleType:
    """The module (file) that defines the class of `thing`, compiled or not."""
    return sys.modules[type(uncompiled(thing)).__module__]


def need_function(host: str, module: ModuleType, name: str) -> Callable[..., Any]:
    """The function that `module` knows as `name`; else HostError."""
    found = vars(module).get(name)
    if not callable(found):
        raise HostError(
            f"{host}: got {module.__name__} without a function {name!r}: expected the one that its "
            "attention calls; this host differs from the one that the adapter knows, see docs/hosts"
        )
    return found
