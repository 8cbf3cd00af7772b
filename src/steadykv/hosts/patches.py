"""Changes to a host's objects that are undone, in reverse order, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

__all__ = ["Patches"]

_ABSENT: Any = object()


class Patches:
    """What was replaced, and what stood there before.

    Only an object's own dictionary is written, never its class: an attribute that the class has is
    shadowed while attached and bare again afterwards. Modules are objects too, so a function that
    a host's file imported by name is replaced in that file alone.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Let `owner.name` be `value` until `undo`."""
        self.keep(owner, name)
        setattr(owner, name, value)

    def keep(self, owner: Any, name: str) -> None:
        """Put back on `undo` what `owner.name` is now, whoever writes it until then."""
        before = vars(owner).get(name, _ABSENT)

        def restore() -> None:
            if before is not _ABSENT:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)

        self._undo.append(restore)

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Let calls of `owner.name(...)` become `wrapper(original, ...)`."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        call.__wrapped__ = original  # type: ignore[attr-defined]  # for inspect.signature
        self.set(owner, name, call)

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
        failure: BaseException | None = None
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # raised below, after the rest
                failure = error
        if failure is not None:
            raise failure
