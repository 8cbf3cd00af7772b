"""How queries reach the cache: from the host's own attention function, by the keys it is given."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from steadykv.cache import LayerCache

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session

__all__ = ["Readers", "observe_attention"]


class Readers:
    """Which layer the newest dense keys came from.

    One entry: a host reads a layer's keys and attends to them before it reads the next layer's.
    """

    def __init__(self) -> None:
        self._keys: weakref.ref[Tensor] | None = None
        self._layer: LayerCache | None = None

    def gave(self, keys: Tensor, layer: LayerCache) -> None:
        """`keys` were read from `layer`."""
        self._keys, self._layer = weakref.ref(keys), layer

    def layer_of(self, keys: object) -> LayerCache | None:
        """The layer that gave exactly this tensor, and has not been asked since."""
        if self._keys is None or self._keys() is not keys:
            return None
        self._keys = None
        return self._layer


def observe_attention(
    session: Session, owner: Any, name: str, *, q: str = "q", k: str = "k"
) -> None:
    """Let `owner.name(q, k, v, ...)` show its queries to the layer that its keys came from.

    owner: the module whose attention code calls the function by that name, or any object that has
    it. Calls with keys of another origin (cross-attention, other models) pass through.
    q, k: the names of the first two arguments, where a host passes them by name.
    Without effect where the codecs read no queries.
    """
    if not session.needs_queries:
        return
    readers = session.readers

    def attention(original: Any, *args: Any, **kwargs: Any) -> Any:
        queries = args[0] if args else kwargs.get(q)
        keys = args[1] if len(args) > 1 else kwargs.get(k)
        layer = readers.layer_of(keys)
        if layer is not None and isinstance(queries, Tensor):
            layer.observe_queries(queries)
        return original(*args, **kwargs)

    session.patches.wrap(owner, name, attention)
