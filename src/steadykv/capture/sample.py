"""A sample of the query tokens that pass by, without knowing how many will come."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from steadykv.capture.rotation import rotate_pairs

__all__ = ["QuerySample"]


class QuerySample:
    """The `count` query tokens with the lowest random priority: uniform, without replacement.

    Priorities come from private CPU generators seeded with `name` and the number of the pass, so
    the sample depends on what was offered in which order, and on nothing else. All batch rows and
    heads share the sampled tokens. Samples are kept on the CPU.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name = count, name
        self.queries: Tensor | None = None
        """[B, Hq, n, D], in the order in which they were offered; None before the first."""
        self.places = torch.empty(0, 3, dtype=torch.int64)
        """Position of the token, number of its chunk, and of the pass within it: [n, 3]."""
        self._priority = torch.empty(0, dtype=torch.float64)
        self._offers = 0

    def offer(
        self, queries: Tensor, start: int, chunk: int, step: int, rope: Tensor | None = None
    ) -> None:
        """A pass over the tokens from `start` on: queries [B, Hq, S, D].

        rope: FP32 [2, S, D/2] that sampled queries are rotated by. Copies what is sampled to the
        CPU, and waits for the device to do so.
        """
        tokens = queries.shape[2]
        seed = zlib.crc32(f"{self.name}/{self._offers}".encode())
        self._offers += 1
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(tokens, generator=generator, dtype=torch.float64)
        priority = torch.cat((self._priority, drawn))
        held = len(self._priority)
        best = priority.argsort(stable=True)[: self.count].sort().values
        old, new = best[best < held], best[best >= held] - held
        if not len(new):
            return
        chosen = new.to(queries.device)
        taken = queries.index_select(2, chosen)
        if rope is not None:
            taken = rotate_pairs(taken, rope.to(queries.device).index_select(1, chosen))
        taken = taken.cpu()
        if self.queries is not None:
            taken = torch.cat((self.queries.index_select(2, old), taken), dim=2)
        self.queries = taken
        places = torch.stack((new + start, *(torch.full_like(new, n) for n in (chunk, step))), 1)
        self.places = torch.cat((self.places[old], places))
        self._priority = priority[best]
