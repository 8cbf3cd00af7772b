"""What stands for the SANA-WM refiner's object per layer, and the two caches behind it.

The sink's keys are stored before their rotary embedding, those of the history after it: two caches,
as codecs see other statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steadykv.errors import HostError
from steadykv.hosts.adapter import Session
from steadykv.hosts.before_rope import KeyTurns
from steadykv.hosts.rebuilt import RebuiltLayer

if TYPE_CHECKING:
    from steadykv.hosts.sana_wm_passes import Passes

__all__ = ["TITLE", "StoredLayer", "Window"]

TITLE = "SANA-WM refiner"
Pair = tuple[Tensor, Tensor]


class StoredLayer:
    """Takes the place of a layer's object; what it does not keep itself, `plain` keeps."""

    def __init__(self, window: Window, number: int, plain: Any) -> None:
        self.window, self.number, self.plain = window, number, plain
        for get, store in (("get_sink", "store_sink"), ("get_history", "store_history")):
            held = getattr(plain, get)()
            if held is not None and store == "store_history" and window.passes.seen is not None:
                raise HostError(
                    f"{TITLE}: got a video that began before the block, whose history is turned: "
                    "expected a new cache object; leave store_keys out to go on with it"
                )
            if held is not None:  # the host began before the block
                getattr(self, store)(*held)
        plain.store_sink(None, None)
        plain.store_history(None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    @torch.compiler.disable
    def store_sink(self, k: Tensor, v: Tensor) -> None:
        """Hold keys before their rotary embedding and values, each [B, S, H·D]."""
        side, k, v = self.window.side("sink", self.number, k, v)
        side.replace(k, v, observed=True)

    @torch.compiler.disable
    def get_sink(self) -> Pair | None:
        """What `store_sink` was given, or None."""
        return self.window.read("sink", self.number)

    @torch.compiler.disable
    def store_history(self, k: Tensor, v: Tensor) -> None:
        """Hold keys after their rotary embedding and values, each [B, S, H·D].

        What `get_history` gave is recognised with tokens behind it, and without its first ones.
        """
        side, k, v = self.window.side("history", self.number, k, v)
        if not trimmed(side, k, v):
            side.extend(k, v, observed=True)

    @torch.compiler.disable
    def store_captured_post_rope(self, k: Tensor, v: Tensor) -> None:
        """Keep what the pipeline will append: keys that were turned just now."""
        self.window.learn(self.number, k, v)
        self.plain.store_captured_post_rope(k, v)

    @torch.compiler.disable
    def get_history(self) -> Pair | None:
        """What `store_history` was given, or None."""
        return self.window.read("history", self.number)

    def clear(self) -> None:
        """Forget everything."""
        self.plain.clear()
        self.window.clear(self.number)


class Window:
    """The two caches of one cache object of the host, built at their first tensor."""

    def __init__(
        self, session: Session, passes: Passes, layers: int, heads: int, tokens: int
    ) -> None:
        self.session, self.passes = session, passes
        self.layers, self.heads, self.frame_tokens = layers, heads, tokens
        self.sides: dict[str, list[RebuiltLayer]] = {}

    def side(self, branch: str, number: int, *given: Tensor) -> tuple[Any, ...]:
        """One layer of a branch, and what is given, [B, S, H·D], by heads in its dtype."""
        if branch not in self.sides:
            # The sink is one span, which has no earlier queries and no later neighbour.
            own = {"first_span": "own", "recent_keep": 0} if branch == "sink" else {}
            cache = self.session.build(
                branch,
                layers=self.layers,
                heads=self.heads,
                head_dim=given[0].shape[2] // self.heads,
                frame_tokens=self.frame_tokens,
                dtype=given[0].dtype,
                device=given[0].device,
                span_chunks=1,
                **own,  # type: ignore[arg-type]  # names of the configuration's
            )
            turns = None
            if branch == "history" and self.passes.seen is not None:
                seen, tokens = self.passes.seen, self.frame_tokens
                turns = KeyTurns.of(self.session, branch, seen, tokens)
            self.sides[branch] = [RebuiltLayer(layer, turns) for layer in cache]
        side = self.sides[branch][number]
        dtype = side.layer.geometry.dtype
        return side, *(x.unflatten(2, (self.heads, -1)).to(dtype) for x in given)

    def read(self, branch: str, number: int) -> Pair | None:
        """Everything a layer holds, dense [B, S, H·D] in fresh memory; None where it is empty."""
        self.passes.reading = number
        if branch not in self.sides or not self.sides[branch][number].layer.spans():
            return None
        side = self.sides[branch][number]
        # Only what the pipeline asks for, between the passes, comes back to be stored.
        k, v = side.dense() if self.passes.mode else side.read()
        return k.flatten(2), v.flatten(2)

    def learn(self, number: int, k: Tensor, v: Tensor) -> None:
        """k, v [B, S, H·D] of this pass will be the newest tokens of the history."""
        if self.passes.seen is not None:
            side, k, _ = self.side("history", number, k, v)
            side.turns.learn(side.layer, k, side.layer.progress.newest)

    def observe(self, branch: str, number: int, queries: Tensor) -> None:
        """queries: [B, S, H, D]."""
        side, queries = self.side(branch, number, queries.flatten(2))
        side.layer.observe_queries(queries)

    def clear(self, number: int) -> None:
        for sides in self.sides.values():
            sides[number].reset()


def trimmed(side: RebuiltLayer, k: Tensor, v: Tensor) -> bool:
    """Whether these [B, S, H, D] are the newest tokens that are held; then only they stay.

    They are decoded once more: what the host read is not kept, and it may have changed its copy.
    """
    layer, tokens = side.layer, k.shape[1]
    held = sum(end - start for start, end in layer.spans())
    if not 0 < tokens <= held:
        return False
    same = [
        torch.equal(x[:, held - tokens :], y) for x, y in zip(side.dense(), (k, v), strict=True)
    ]
    if all(same):
        layer.evict(layer.progress.end - tokens)
    return all(same)
