"""How queries reach the cache: from the host's own attention function, by the keys it is given."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steadykv.cache import LayerCache
from steadykv.hosts.packed_window import PackedWindow, attends_packed

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session
    from steadykv.hosts.before_rope import KeyTurns

__all__ = ["Readers", "observe_attention"]


class Readers:
    """Which layer the newest dense keys came from.

    One entry: a host reads a layer's keys and attends to them before it reads the next layer's.
    """

    def __init__(self) -> None:
        self._keys: weakref.ref[Tensor] | None = None
        self._layer: LayerCache | None = None
        self._turns: KeyTurns | None = None

    def gave(self, keys: Tensor, layer: LayerCache, turns: KeyTurns | None = None) -> None:
        """`keys` were read from `layer`, which stores them before they are turned so."""
        self._keys, self._layer, self._turns = weakref.ref(keys), layer, turns

    @torch.compiler.disable
    def show(self, queries: Tensor, keys: object) -> None:
        """Let the layer that gave exactly these keys, if one did, observe queries, once."""
        if self._keys is None or self._keys() is not keys or self._layer is None:
            return
        self._keys = None
        if self._turns is not None:
            queries = self._turns.before(queries)
        self._layer.observe_queries(queries)


def observe_attention(
    session: Session, owner: Any, name: str, names: tuple[str, str, str] = ("q", "k", "v")
) -> None:
    """Let `owner.name(q, k, v, ...)` show its queries to the layer that its keys came from.

    owner: the module whose attention code calls the function by that name, or any object that has
    it. Calls with keys of another origin (cross-attention, other models) pass through.
    names: of the first three arguments, where a host passes them by name.
    Where keys and values are all that a layer attends to, and still packed (`PackedWindow`),
    attention is computed from the packed cache; they are decoded where the host passes more than
    three arguments, as for a mask. Without effect where neither is wanted.
    """
    if not (session.needs_queries or attends_packed(session)):
        return

    def attention(original: Any, *args: Any, **kwargs: Any) -> Any:
        found = {**dict(zip(names, args, strict=False)), **kwargs}
        queries, keys, values = (found.get(name) for name in names)
        if not isinstance(keys, PackedWindow):
            if isinstance(queries, Tensor):
                session.readers.show(queries, keys)
            return original(*args, **kwargs)
        return packed(original, args, kwargs, queries, keys, values, len(found) == 3)

    @torch.compiler.disable
    def packed(
        original: Any, args: Any, kwargs: Any, queries: Any, keys: PackedWindow, values: Any,
        is_all: bool,
    ) -> Any:  # fmt: skip
        assert isinstance(queries, Tensor)
        keys.layer.observe_queries(queries)
        if is_all and len(args) + len(kwargs) == 3 and keys.can_attend(values):
            return keys.layer.attend(queries)
        session.warn(
            "attention is called with more than queries, keys and values, or with a part of them: "
            "they are decoded for it, as with attention='dense'"
        )
        dense = (x.dense() if isinstance(x, PackedWindow) else x for x in args)
        named = {n: x.dense() if isinstance(x, PackedWindow) else x for n, x in kwargs.items()}
        return original(*dense, **named)

    session.patches.wrap(owner, name, attention)
