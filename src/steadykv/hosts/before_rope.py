"""Stores keys before their rotary embedding, of hosts that cache them after it.

Per-channel structure, which codecs live on, is lost when pairs of channels turn with the position.
The host's own function is watched: what it was given is stored in place of what it returned, or,
where that is gone (in-place kernels, casts, copies), the keys are turned back in FP32. What it does
to unit vectors is done to keys when they are read.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steadykv.cache import LayerCache
from steadykv.cache.ledger import MemoryMeter
from steadykv.cache.policy import TokenRange
from steadykv.errors import ConfigError, HostError
from steadykv.hosts.turns import Call, Turns, error_of, results_of

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session

__all__ = ["STORE_KEYS", "KeyTurns", "SeenRotation", "stores_before_rope"]

STORE_KEYS = {"store_keys": "'after_rope' (the default), as the host does, or 'before_rope'"}
"""The option of an adapter that can store keys before their rotary embedding."""

HELP = "leave store_keys out to store keys after it"


def stores_before_rope(session: Session) -> bool:
    """What the option says; where keys stay dense it changes nothing, and nothing is turned."""
    wanted = session.options.get("store_keys", "after_rope")
    if wanted not in ("after_rope", "before_rope"):
        raise ConfigError(f"store_keys is {wanted!r}: expected 'after_rope' or 'before_rope'")
    return wanted == "before_rope" and not session.config.keys.is_dense


class SeenRotation:
    """The host's rotary embedding, as it is being called.

    Its first arguments are the tensors that it turns: [B, S, H, D], [S, H, D], or, with `heads`,
    [B, S, H·D] whose heads may turn differently. It may return them or turn them in place.
    Pairs of channels, neighbours or of the two halves, have to be multiplied by a complex number of
    their position alone, alike in every row; which pairs, and that, is checked on the first
    keys.
    """

    def __init__(self, session: Session, *, heads: int | None = None) -> None:
        self._session, self._heads = session, heads
        self._call: Call | None = None
        self._recent: deque[tuple[weakref.ref[Tensor], Tensor]] = deque(maxlen=2)  # of q and k
        self._proofs: deque[tuple[Tensor, Tensor]] = deque(maxlen=2)  # before, after; until checked
        self._neighbours: bool | None = None  # None: not checked yet
        self._asks = False
        session.patches.on_undo(self._forget)

    def watch_all(self, title: str, owner: Any, names: Sequence[str]) -> None:
        """See those of these functions that `owner` knows, which turn one tensor."""
        known = [name for name in names if callable(getattr(owner, name, None))]
        if not known:
            raise HostError(
                f"{title}: got {getattr(owner, '__name__', owner)} without a function "
                f"{' or '.join(map(repr, names))}: expected the rotary embedding that its "
                f"attention calls; {HELP}"
            )
        for name in known:
            self.watch(owner, name)

    def watch(self, owner: Any, name: str, tensors: int = 1) -> None:
        """See the calls of `owner.name`, which turns so many tensors, its first arguments."""

        @torch.compiler.disable
        def seen(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            given = args[:tensors]
            is_ours = len(given) == tensors and all(isinstance(x, Tensor) for x in given)
            if self._asks or not is_ours:
                return original(*args, **kwargs)
            before = [x.clone() for x in given] if self._neighbours is None else given
            out = original(*args, **kwargs)
            sizes = tuple(x.shape for x in given)
            like = given[0].new_empty(0)
            self._call = Call(original, sizes, args[tensors:], kwargs, like, self._heads)
            for source, x, turned in zip(before, given, results_of(out, given), strict=True):
                if self._neighbours is None:
                    self._proofs.append((source, turned))
                if turned.data_ptr() != x.data_ptr():
                    self._recent.append((weakref.ref(turned), x))
            return out

        self._session.patches.wrap(owner, name, seen)

    def _forget(self) -> None:
        self._recent.clear()
        self._proofs.clear()
        self._call = self._neighbours = None

    def before(self, turned: Tensor) -> Tensor | None:
        """What the host's function was given when it returned exactly this tensor, if it did."""
        for found, source in reversed(self._recent):
            if found() is turned:
                return source
        return None

    def turns(self, keys: Tensor | None) -> tuple[Turns, bool]:
        """Of all tokens of the newest call, and whether in FP32.

        keys: [B, S, H, D] that the host wants to store; None: it stores what the call was given.
        HostError where the call is none of these keys', or no such turn; waits, the first time.
        """
        call = self._call
        if call is None:
            raise HostError(
                "keys are written before the host's rotary embedding was called: expected a call "
                f"of it for each chunk; {HELP}"
            )
        if keys is not None and keys.shape[1] > call.tokens:
            raise HostError(
                f"{keys.shape[1]} tokens are written after a rotary embedding of {call.tokens}: "
                f"expected all of them in one call, not shares of a sequence; {HELP}"
            )
        if self._neighbours is None:
            return self._checked(call, keys)
        return self._ask(call, self._neighbours)

    def _ask(self, call: Call, neighbours: bool) -> tuple[Turns, bool]:
        self._asks = True
        try:
            return call.turns(neighbours)
        finally:
            self._asks = False

    def _checked(self, call: Call, keys: Tensor | None) -> tuple[Turns, bool]:
        """The turns of the first call, compared with what the host did."""
        proofs = [(call.by_heads(a), call.by_heads(b)) for a, b in self._proofs]
        if keys is not None:
            proofs = [(a, b) for a, b in proofs if _begins(b, keys)]
            if not proofs:
                raise HostError(
                    f"keys {tuple(keys.shape)} that are not what the host's rotary embedding "
                    f"returned: expected its result, or the first tokens of it; {HELP}"
                )
        errors = []
        for neighbours in (True, False):
            turns, is_exact = self._ask(call, neighbours)
            errors.append(error_of(turns, *proofs[-1]))
            if errors[-1] < 0.02:  # the host's own rounding to BF16 is 0.002 to 0.006
                self._neighbours = neighbours
                self._proofs.clear()  # frames of another size do not change what is a pair
                return turns, is_exact
        raise HostError(
            f"the host's rotary embedding is off by {errors[0]:.3f} from turns of neighbouring "
            f"channels by the token's position, and by {errors[1]:.3f} from those of two halves: "
            f"expected one of them; {HELP}"
        )


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


def _begins(turned: Tensor, keys: Tensor) -> bool:
    """Whether keys [B, S, H, D] are the first tokens of `turned`, in whatever dtype."""
    first = turned[:, : keys.shape[1]]
    return first.shape == keys.shape and torch.equal(first.to(keys.dtype), keys)
