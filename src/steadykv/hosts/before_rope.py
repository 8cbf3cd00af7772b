"""Stores keys before their rotary embedding, of hosts that cache them after it.

Per-channel structure, which codecs live on, is lost when pairs of channels turn with the position.
The host's own function is watched: what it was given is stored in place of what it returned, or,
where that is gone (in-place kernels, casts, copies), the keys are turned back in FP32. What it does
to unit vectors is done to keys when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from steadykv.cache import LayerCache
from steadykv.cache.ledger import MemoryMeter
from steadykv.cache.policy import TokenRange
from steadykv.errors import ConfigError, HostError
from steadykv.hosts.seen_rotation import HELP, SeenRotation
from steadykv.hosts.turns import Turns

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session

__all__ = ["STORE_KEYS", "KeyTurns", "stores_before_rope"]

STORE_KEYS = {"store_keys": "'after_rope' (the default), as the host does, or 'before_rope'"}
"""The option of an adapter that can store keys before their rotary embedding."""


def stores_before_rope(session: Session) -> bool:
    """What the option says; where keys stay dense it changes nothing, and nothing is turned."""
    wanted = session.options.get("store_keys", "after_rope")
    if wanted not in ("after_rope", "before_rope"):
        raise ConfigError(f"store_keys is {wanted!r}: expected 'after_rope' or 'before_rope'")
    return wanted == "before_rope" and not session.config.keys.is_dense


class KeyTurns:
    """The turns of the tokens that one cache holds, shared by its layers.

    block: tokens that are turned at a time, such as a frame. raw_tokens: the first ones, whose keys
    the host stores before the embedding by itself. What is kept counts as the part "turns" of the
    first layer in `AttachedCaches.ledger`: 4 · D bytes a token, of the 4 · D · H · layers in BF16.
    """

    def __init__(
        self, seen: SeenRotation, meter: MemoryMeter, block: int, raw_tokens: int = 0
    ) -> None:
        self._seen, self._meter, self._block, self._raw = seen, meter, block, raw_tokens
        self._pieces: list[tuple[int, Turns]] = []
        self._newest: Turns | None = None  # of all tokens of a pass, which may be more than stored
        self._is_exact = True

    @classmethod
    def of(
        cls, session: Session, branch: str, seen: SeenRotation, frame_tokens: int, raw: int = 0
    ) -> KeyTurns:
        """Of the branch's cache, which was just built."""
        turns = cls(seen, session.caches.meter, frame_tokens, raw)
        session.caches.turns[branch] = turns
        return turns

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(turns.nbytes for _, turns in self._pieces)

    @property
    def pieces(self) -> list[TokenRange]:
        """The tokens whose turns are kept, chunk by chunk."""
        return [(start, start + turns.tokens) for start, turns in self._pieces]

    def reset(self) -> None:
        """Forget everything."""
        self._keep([])
        self._newest = None

    def learn(self, layer: LayerCache, keys: Tensor, start: int) -> None:
        """The host has just turned keys [B, S, H, D] of the tokens from `start` on."""
        end = start + keys.shape[1]
        is_raw = end <= self._raw
        known = is_raw or any(a <= start and end <= b for a, b in self.pieces)
        if layer.layer and known:
            return  # the first layer of a pass tells for all
        turns, self._is_exact = self._seen.turns(None if is_raw else keys)
        self._newest = turns
        held = layer.held()
        kept = [
            (first, piece)
            for first, piece in self._pieces
            if first + piece.tokens <= start
            and any(a < first + piece.tokens and first < b for a, b in held)
        ]
        if not is_raw:
            kept.append((start, turns.part(0, keys.shape[1]).own()))
        self._keep(kept)

    def stored(self, layer: LayerCache, keys: Tensor, start: int) -> Tensor:
        """What to store in place of keys [B, S, H, D], which the host has just turned."""
        self.learn(layer, keys, start)
        return self.back(keys, start)

    def back(self, keys: Tensor, start: int) -> Tensor:
        """Keys [B, S, H, D] from the token `start` on as they were before; fresh, or the host's."""
        end = start + keys.shape[1]
        if end <= self._raw:
            return keys
        source = self._seen.before(keys) if self._is_exact else None
        if source is not None:
            return source.reshape(keys.shape)
        return self._walk(keys.clone(), [(start, end)], back=True)

    def turn(self, keys: Tensor, ranges: Sequence[TokenRange]) -> Tensor:
        """Turn keys [B, T, H, D] of these tokens in place, as the host does; returns them."""
        return self._walk(keys, ranges, back=False)

    def before(self, queries: Tensor) -> Tensor:
        """Queries [B, S, H, D] of the newest pass as they were before the embedding."""
        source = self._seen.before(queries) if self._is_exact else None
        if source is not None:
            return source.reshape(queries.shape)
        if self._newest is None or queries.shape[1] > self._newest.tokens:
            raise HostError(
                f"queries of {queries.shape[1]} tokens: expected those that the host's rotary "
                f"embedding has just turned; {HELP}"
            )
        turns = self._newest.part(0, queries.shape[1])
        return turns.turn(queries.clone(), self._block, back=True)

    def _walk(self, keys: Tensor, ranges: Sequence[TokenRange], *, back: bool) -> Tensor:
        offset = left = 0
        for start, end in ranges:
            left += max(0, end - max(start, self._raw))
            for first, turns in self._pieces:
                a, b = max(start, first), min(end, first + turns.tokens)
                if a < b:
                    part = keys.narrow(1, offset + a - start, b - a)
                    turns.part(a - first, b - first).turn(part, self._block, back=back)
                    left -= b - a
            offset += max(0, end - start)
        assert left == 0, f"{left} tokens of {list(ranges)} without turns: {self.pieces}"
        return keys

    def _keep(self, pieces: list[tuple[int, Turns]]) -> None:
        before = self.nbytes
        self._pieces = pieces
        self._meter.hold(self.nbytes - before)
