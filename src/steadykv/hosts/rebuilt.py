"""Family C: hosts that compute a whole cache anew, or hand back a longer copy of what they read.

What is packed already is kept where the host brings the same numbers at the same place again: a
payload is not the dense tensor, so a digest of what was stored, and of what was read, is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from steadykv.cache import LayerCache
from steadykv.errors import ShapeError
from steadykv.hosts.before_rope import KeyTurns

__all__ = ["RebuiltLayer", "digest"]

_SEED = 0x5EED
_BLOCK = 1 << 22  # elements that are widened to int64 at a time: 32 MiB


class RebuiltLayer:
    """A `LayerCache` that is replaced as a whole.

    The commit signal is the replacement itself: every piece is packed at once.
    turns: of the host's rotary embedding, where keys are to be stored before it.
    """

    def __init__(self, layer: LayerCache, turns: KeyTurns | None = None) -> None:
        self.layer, self.turns = layer, turns
        self._stored: list[tuple[int, Tensor]] = []  # end of each piece, digest of its K and V
        self._given: Tensor | None = None

    def replace(
        self,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int] | None = None,
        *,
        observed: bool = False,
    ) -> int:
        """Hold exactly these tokens, in the cache's layout; returns how many were stored.

        lengths: of the pieces that are packed by themselves; one piece of all tokens by default.
        Leading pieces whose keys and values are those that are held keep their bytes: the host
        waits once for that comparison. observed: see `LayerCache.write`. Statistics are kept.
        Raises ShapeError for lengths that do not add up.
        """
        tokens = k.shape[self.layer.geometry.token_dim]
        pieces = [tokens] if lengths is None else [n for n in lengths if n]
        if sum(pieces) != tokens:
            raise ShapeError(f"lengths {list(pieces)} of {tokens} tokens: expected their sum")
        ends = list(accumulate(pieces))
        digests = [self._digest(k, v, end - n, end) for n, end in zip(pieces, ends, strict=True)]
        kept = self._same_pieces(ends, digests)
        start = ends[kept - 1] if kept else 0
        if self.layer.progress.newest > start:  # or what waits for the first span would be settled
            self.layer.truncate(start)
        self._append(k, v, start, ends[kept:], observed)
        self._stored = list(zip(ends, digests, strict=True))
        return tokens - start

    def read(self) -> tuple[Tensor, Tensor]:
        """What `dense` gives; `extend` recognises it."""
        k, v = self.dense()
        self._given = self._digest(k, v, 0, k.shape[self.layer.geometry.token_dim])
        return k, v

    def dense(self) -> tuple[Tensor, Tensor]:
        """Everything that is held, in fresh memory, as the host stored it."""
        k, v = self.layer.read()
        if self.turns is not None:
            self.turns.turn(k, self.layer.spans())
        return k, v

    def extend(self, k: Tensor, v: Tensor, *, observed: bool = False) -> int:
        """Hold these tokens, of which the first are what `read` gave: only the rest is stored.

        Where they are not, everything is replaced. Returns how many tokens were stored.
        """
        held = sum(end - start for start, end in self.layer.spans())
        tokens = k.shape[self.layer.geometry.token_dim]
        given, self._given = self._given, None
        if given is None or tokens <= held or not torch.equal(self._digest(k, v, 0, held), given):
            return self.replace(k, v, observed=observed)
        shift = self.layer.progress.end - held
        self._append(k, v, held, [tokens], observed, shift)
        return tokens - held

    def reset(self) -> None:
        """Forget tokens and statistics."""
        self._stored, self._given = [], None
        self.layer.reset()

    def _append(
        self, k: Tensor, v: Tensor, start: int, ends: Sequence[int], observed: bool, shift: int = 0
    ) -> None:
        """Write the tokens from `start` on, cut at `ends`; they are stored `shift` further on."""
        dim = self.layer.geometry.token_dim
        for end in ends:
            part_k, part_v = (x.narrow(dim, start, end - start) for x in (k, v))
            if self.turns is not None:
                part_k = self.turns.back(part_k, start + shift)
            self.layer.write(part_k, part_v, start + shift, observed=observed)
            self.layer.commit()
            start = end

    def _same_pieces(self, ends: Sequence[int], digests: Sequence[Tensor]) -> int:
        """How many leading pieces are those that are stored."""
        count = 0
        for (stored_end, _), end in zip(self._stored, ends, strict=False):
            if stored_end != end or not self.layer.progress.can_truncate(end):
                break
            count += 1
        if not count or self.layer.progress.window_start:
            return 0
        stored = torch.stack([found for _, found in self._stored[:count]])
        same = (stored == torch.stack(list(digests[:count]))).all(1).tolist()
        return same.index(False) if False in same else count

    def _digest(self, k: Tensor, v: Tensor, start: int, end: int) -> Tensor:
        dim = self.layer.geometry.token_dim
        return torch.stack([digest(x.narrow(dim, start, end - start)) for x in (k, v)])


def digest(x: Tensor) -> Tensor:
    """A number int64 [] that tensors with other bits or another order do not share, on the device.

    A sum of bit patterns modulo 2^64, each weighed by odd random numbers of its row and column.
    Allocates 64 MiB at most. Not made to withstand somebody who wants two tensors to be taken for
    one another.
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    if not x.numel():
        return torch.zeros((), dtype=torch.int64, device=x.device)
    rows = x.reshape(-1, x.shape[-1]).view(words)
    columns = _weights(rows.shape[1], x.device, 0)
    row_weights = _weights(rows.shape[0], x.device, 1)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    size = max(1, _BLOCK // rows.shape[1])
    for first in range(0, rows.shape[0], size):
        part = rows[first : first + size].to(torch.int64) * columns
        total += (part.sum(1) * row_weights[first : first + size]).sum()
    return total


def _weights(count: int, device: torch.device, stream: int) -> Tensor:
    """Odd int64 numbers, the same on every device and in every run."""
    index = torch.arange(1, count + 1, dtype=torch.int64, device=device) + (stream << 40) + _SEED
    # SplitMix64 (Steele, Lea, Flood 2014), on signed numbers that wrap.
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        index = (index ^ ((index >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (index ^ ((index >> 31) & ((1 << 33) - 1))) | 1
