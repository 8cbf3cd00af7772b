"""Keys before RoPE of hosts whose rotary embedding cannot be seen: the user passes it.

For heads of two versions side by side, or on the batch axis, of which the first one is RoPE's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from steadykv.cache.ledger import MemoryMeter
from steadykv.errors import HostError
from steadykv.hosts.turns import Call, Turns, which_pairs

__all__ = ["GivenRotation"]

_BLOCK = 1024  # tokens that are turned at a time


class GivenRotation:
    """Turns the RoPE version in keys or queries of tokens that are numbered from 0.

    function: (x, start) -> what the host makes of x, FP32 [1, 1, S, D], as tokens from `start` on.
    side_by_side: whether the versions are the halves of a head [B, H, S, 2D], or of the batch axis
    [2B, H, S, D]. The turns of the cached tokens are kept, and count in `AttachedCaches.ledger`.
    """

    def __init__(
        self, function: Callable[[Tensor, int], Tensor], side_by_side: bool, meter: MemoryMeter
    ) -> None:
        self._function, self._side_by_side, self._meter = function, side_by_side, meter
        self._known: dict[str, tuple[int, Turns]] = {}  # "keys" from 0, "queries" behind them
        self._neighbours: bool | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(turns.nbytes for _, turns in self._known.values())

    def reset(self) -> None:
        """Forget everything."""
        self._meter.hold(-self.nbytes)
        self._known.clear()

    def keys(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Turn, or turn back, cached keys x in place; returns them."""
        return self._apply("keys", x, 0, back)

    def queries(self, x: Tensor, start: int) -> Tensor:
        """Queries of tokens from `start` on as they were before RoPE; a copy."""
        return self._apply("queries", x.clone(), start, True)

    def _apply(self, name: str, x: Tensor, start: int, back: bool) -> Tensor:
        part = x.chunk(2, 3 if self._side_by_side else 0)[0].transpose(1, 2)
        tokens, dim = part.shape[1], part.shape[3]
        known = self._known.get(name)
        if known is None or known[0] != start or known[1].tokens != tokens:
            before = self.nbytes
            self._known[name] = start, self._asked(start, tokens, dim, x)
            self._meter.hold(self.nbytes - before)
        self._known[name][1].turn(part, _BLOCK, back=back)
        return x

    def _asked(self, start: int, tokens: int, dim: int, like: Tensor) -> Turns:
        def turned(x: Tensor) -> Tensor:
            return self._function(x.transpose(1, 2), start).transpose(1, 2)

        size = torch.Size((1, tokens, 1, dim))
        call = Call(turned, (size,), (), {}, like.new_empty(0, dtype=torch.float32), None)
        if self._neighbours is not None:
            return call.turns(self._neighbours)[0]
        sample = torch.linspace(-1, 1, tokens * dim, device=like.device).cos().view(size)
        found, errors = which_pairs(call.turns, sample, turned(sample.clone()))
        if found is not None:
            self._neighbours = found[0].neighbours
            return found[0]
        raise HostError(
            f"rotation is off by {min(errors):.3f} from turns of pairs of channels by the token's "
            "position: expected those; leave store_keys out to store keys after RoPE"
        )
