"""Changes to a host's objects that are undone, in reverse order, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

from steadykv.hosts.contract import uncompiled

__all__ = ["Patches"]

_ABSENT: Any = object()


class Patches:
    """What was replaced, and what stood there before.

    Only an object's own dictionary is written, never its class: an attribute that the class has is
    shadowed while attached and bare again afterwards. Modules are objects too, so a function that
    a host's file imported by name is replaced in that file alone. Of a compiled module the one
    inside is changed: its wrapper hands attributes on, and would not give them back.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.owners: dict[int, Any] = {}

    def claim(self, owner: Any) -> None:
        """`owner` is changed, here or by a hook: nobody else may attach to it meanwhile.

        A module (file) is shared by all hosts of its classes, so it is nobody's.
        """
        owner = uncompiled(owner)
        if not isinstance(owner, ModuleType):
            self.owners[id(owner)] = owner

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Let `owner.name` be `value` until `undo`."""
        owner = uncompiled(owner)
        self.keep(owner, name)
        setattr(owner, name, value)

    def keep(self, owner: Any, name: str) -> None:
        """Put back on `undo` what `owner.name` is now, whoever writes it until then."""
        owner = uncompiled(owner)
        self.claim(owner)
        before = vars(owner).get(name, _ABSENT)
        self._undo.append(lambda: _put_back(owner, name, before))

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Let calls of `owner.name(...)` become `wrapper(original, ...)`.

        Blocks may end in another order than they began: a wrapper below others is taken out.
        """
        owner = uncompiled(owner)
        self.claim(owner)
        call = _Wrapped(wrapper, getattr(owner, name), vars(owner).get(name, _ABSENT))
        setattr(owner, name, call)

        def restore() -> None:
            outer = vars(owner).get(name)
            if outer is call:
                _put_back(owner, name, call.before)
                return
            while isinstance(outer, _Wrapped) and outer.__wrapped__ is not call:
                outer = outer.__wrapped__
            if isinstance(outer, _Wrapped):
                outer.__wrapped__, outer.before = call.__wrapped__, call.before

        self._undo.append(restore)

    def set_item(self, owner: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Let `owner[key]` be `value` until `undo`."""
        before = owner.get(key, _ABSENT)

        def restore() -> None:
            if before is _ABSENT:
                owner.pop(key, None)
            else:
                owner[key] = before

        self._undo.append(restore)
        owner[key] = value

    def on_undo(self, action: Callable[[], None]) -> None:
        """Call `action` on `undo`: what a hook's handle removes, for example."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore everything, the newest first; a failure does not keep the rest from it."""
        self.owners.clear()
        failure: BaseException | None = None
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # raised below, after the rest
                failure = error
        if failure is not None:
            raise failure


class _Wrapped:
    """A function around another one. before: what the owner's dictionary held, or nothing."""

    def __init__(self, wrapper: Callable[..., Any], original: Any, before: Any) -> None:
        self.wrapper, self.before = wrapper, before
        self.__wrapped__ = original  # inspect.signature looks for it too

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(self.__wrapped__, *args, **kwargs)


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is not _ABSENT:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)
