"""Attention from the packed cache: what a host reads stays packed until its attention is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steadykv.cache import LayerCache
from steadykv.cache.policy import TokenRange
from steadykv.errors import ConfigError

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session

__all__ = ["ATTENTION", "PackedWindow", "attends_packed"]

ATTENTION = {
    "attention": "'dense' (the default): a layer's window is decoded for the host's attention; or "
    "'packed': attention is computed from the packed cache, without that window"
}
"""The option of an adapter whose host calls a function attention(q, k, v)."""


def attends_packed(session: Session) -> bool:
    """What the option says."""
    wanted = session.options.get("attention", "dense")
    if wanted not in ("dense", "packed"):
        raise ConfigError(f"attention is {wanted!r}: expected 'dense' or 'packed'")
    if wanted == "packed" and session.options.get("store_keys") == "before_rope":
        raise ConfigError(
            "attention is 'packed' and store_keys 'before_rope': expected one of them, because "
            "packed keys are attended to as they are stored"
        )
    return wanted == "packed"


class PackedWindow:
    """Keys or values that a host has read and not used yet: a shape, and where they are.

    name: "key" or "value". ranges: token ranges of `layer`.
    """

    def __init__(self, layer: LayerCache, name: str, ranges: Sequence[TokenRange]) -> None:
        self.layer, self.name, self.ranges = layer, name, [r for r in ranges if r[1] > r[0]]

    @property
    def shape(self) -> torch.Size:
        tokens = sum(end - start for start, end in self.ranges)
        return torch.Size(self.layer.geometry.shape(self.layer.batch or 1, tokens))

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.geometry.dtype

    @property
    def device(self) -> torch.device:
        return self.layer.geometry.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dense(self) -> Tensor:
        """The tokens, in fresh memory."""
        return self.layer.read_tensor(self.name, self.ranges)

    def can_attend(self, values: object) -> bool:
        """Whether these keys and those values are all that their layer attends to."""
        return (
            isinstance(values, PackedWindow)
            and (self.name, values.name) == ("key", "value")
            and values.layer is self.layer
            and self.ranges == values.ranges == self.layer.spans()
        )
