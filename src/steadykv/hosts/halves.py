"""Queries of hosts that join cached keys with new ones, and whose keys may have two halves.

Such a host reads a layer's keys, puts the chunk's own behind them and calls attention: the keys
that attention is given are none that were handed out. Their layer is the one that was read last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from steadykv.cache import LayerCache
from steadykv.hosts.adapter import Session
from steadykv.hosts.given_rotation import GivenRotation

__all__ = ["HalvesObserver"]

# SageAttention's function, which a host's file imports by name. PyTorch's own is seen by the mode.
FUNCTIONS = ("sageattn",)


class HalvesObserver(TorchFunctionMode):
    """While entered, attention's queries reach the layer whose keys were given out last.

    A call belongs to it if there are at least as many keys as cached and new tokens together. Where
    attention is as wide as half of the cached keys, the halves have softmaxes of their own: they
    come as two calls, or as two groups of batch rows, RoPE first. Each half's queries are observed
    with zeros in the other half, so that their moment has no terms across the two. With such terms
    a codec moves errors of one half into the other, where attention cannot undo them.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self._layer: LayerCache | None = None
        self._rotation: GivenRotation | None = None
        self._first: Tensor | None = None  # keys of its first token, to tell the halves apart
        self._calls = self._held = self._seen = self._read = 0
        self._inside = False
        self._useless = False
        self._waiting: list[Tensor] = []  # queries of a half whose other one has not come

    def watch(self, model: nn.Module) -> None:
        """Wrap the functions that the files of the model's classes call."""
        files = {type(module).__module__ for module in model.modules()}
        for file in sorted(files - {"builtins"}):
            module = sys.modules.get(file)
            for name in FUNCTIONS:
                if callable(vars(module).get(name)) if module is not None else False:
                    self.session.patches.wrap(module, name, self._call)

    def gave(self, keys: Tensor, layer: LayerCache, rotation: GivenRotation | None = None) -> None:
        """Keys [B, H, S, D] were read of a layer, which stores them before that rotation."""
        if self._waiting:
            self._give_up("only one half of the cached keys was attended to")
        self._layer, self._calls, self._held = layer, 0, keys.shape[2]
        self._rotation = rotation
        self._first = keys[:, :, :1].clone()
        self._read += 1

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        if self._read and not self._seen and not self._useless and details[0] is None:
            self._give_up("no call of attention with the cached keys was seen")
        self._layer = self._first = None
        self._read = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._call(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    # As a whole: compiled code would not see that one function is made of the other.
    @torch.compiler.disable
    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside or self._layer is None or self._useless:
            return original(*args, **kwargs)
        named = dict(zip(("query", "key"), args, strict=False)) | kwargs
        q, k = (named.get(name, named.get(name[0])) for name in ("query", "key"))
        if isinstance(q, Tensor) and isinstance(k, Tensor):
            self._observe(q, k)
        self._inside = True  # one function may be made of the other
        try:
            return original(*args, **kwargs)
        finally:
            self._inside = False

    def _observe(self, q: Tensor, k: Tensor) -> None:
        layer, first = self._layer, self._first
        assert layer is not None
        assert first is not None
        batch, heads, _, width = first.shape
        if q.dim() != 4 or k.dim() != 4:
            return
        if k.shape[1] != heads and k.shape[2] == heads:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if k.shape[2] < self._held + q.shape[2]:
            return  # cross-attention
        self._calls += 1
        if q.shape[3] == width and q.shape[0] == batch:
            if self._calls == 1:
                self._take(layer, q)
        elif 2 * q.shape[3] == width and q.shape[0] in (batch, 2 * batch):
            halves = first.chunk(2, 3)
            order = range(2) if q.shape[0] > batch else (self._calls - 1,)
            parts = list(zip(order, q.chunk(len(order)), k.chunk(len(order)), strict=True))
            if self._calls + len(parts) > 3:
                return
            # The order is known from a description: it is looked at once, when the first come.
            if self._seen < 2 and not all(
                torch.equal(kp[:, :, :1], halves[n]) for n, _, kp in parts
            ):
                self._give_up(
                    "the keys that attention is given do not begin with the cached halves"
                )
                return
            for number, queries, _ in parts:
                before = number * (width // 2)
                padding = (before, width // 2 - before)
                self._waiting.append(functional.pad(queries, padding))
            # Both halves or none: one that nobody asks for would count as free of cost.
            if len(self._waiting) == 2:
                for queries in self._waiting:
                    self._take(layer, queries)
                self._waiting.clear()
        else:
            self._give_up(f"attention is called with queries {tuple(q.shape)}")

    def _take(self, layer: LayerCache, queries: Tensor) -> None:
        if self._rotation is not None:  # behind the cached tokens, which are numbered from 0
            queries = self._rotation.queries(queries, self._held)
        layer.observe_queries(queries)
        self._seen += 1

    def _give_up(self, why: str) -> None:
        self._useless = True
        self._waiting.clear()
        self.session.without_queries(why)
