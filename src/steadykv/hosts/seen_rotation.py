"""The host's rotary embedding as it is being called: what it was given, and what it does to it.

The host's own function is watched, and asked what becomes of unit vectors (`turns.py`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steadykv.errors import HostError
from steadykv.hosts.turns import Call, Turns, results_of, which_pairs

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session

__all__ = ["HELP", "SeenRotation"]

HELP = "leave store_keys out to store keys after it"


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
        found, errors = which_pairs(lambda pairs: self._ask(call, pairs), *proofs[-1])
        if found is not None:
            self._neighbours = found[0].neighbours
            self._proofs.clear()  # frames of another size do not change what is a pair
            return found
        raise HostError(
            f"the host's rotary embedding is off by {errors[0]:.3f} from turns of neighbouring "
            f"channels by the token's position, and by {errors[1]:.3f} from those of two halves: "
            f"expected one of them; {HELP}"
        )


def _begins(turned: Tensor, keys: Tensor) -> bool:
    """Whether keys [B, S, H, D] are the first tokens of `turned`, in whatever dtype."""
    first = turned[:, : keys.shape[1]]
    return first.shape == keys.shape and torch.equal(first.to(keys.dtype), keys)
