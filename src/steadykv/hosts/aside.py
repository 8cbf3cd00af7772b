"""Lists that a host allocated before it was attached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session

__all__ = ["set_aside"]


def set_aside(session: Session, host: Any, names: Iterable[str]) -> None:
    """Let the host allocate these lists anew; those that it has come back afterwards."""
    for name in names:
        if name in vars(host):
            if getattr(host, name) is not None:
                session.warn(
                    f"{name} was allocated before: its memory stays in use; attach before the "
                    f"first run, or set {name} to None"
                )
            session.patches.set(host, name, None)
