"""What a rotary embedding does to tokens, as numbers: pairs of channels times complex factors.

It is found out by asking the host's own function what becomes of unit vectors, so nothing of its
frequencies, positions or grids has to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadykv.errors import HostError

__all__ = ["Call", "Turns", "which_pairs"]

# What kernels raise that take no FP32.
_REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)


@dataclass(frozen=True)
class Turns:
    """Factors of S tokens, FP32 [S, 1, D / 2], or [S, H, D / 2] where heads turn differently.

    neighbours: whether channels 2i and 2i + 1 are a pair (GPT-J), or i and i + D / 2 (NeoX).
    """

    cos: Tensor
    sin: Tensor
    neighbours: bool

    @property
    def tokens(self) -> int:
        return self.cos.shape[0]

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    def part(self, start: int, end: int) -> Turns:
        """Those of the tokens [start, end), without a copy."""
        return Turns(self.cos[start:end], self.sin[start:end], self.neighbours)

    def own(self) -> Turns:
        """The same in memory of their own, so that a part does not keep the whole."""
        return Turns(self.cos.clone(), self.sin.clone(), self.neighbours)

    @torch.no_grad()
    def turn(self, x: Tensor, block: int, *, back: bool = False) -> Tensor:
        """Turn x [B, S, H, D] in place, or back, so many tokens at a time; returns it.

        Allocates FP32 copies of `block` tokens. `back` undoes `turn` but for the rounding to the
        dtype of x, whatever the factors' absolute values are.
        """
        for first in range(0, x.shape[1], block):
            part = x[:, first : first + block]
            cos, sin = (t[first : first + part.shape[1]] for t in (self.cos, self.sin))
            if back:
                size = cos.square() + sin.square()
                cos, sin = cos / size, -sin / size
            pairs = pairs_of(part, self.neighbours)
            a, b = (half.float() for half in pairs)
            turned = a * cos - b * sin, a * sin + b * cos
            for half, new in zip(pairs, turned, strict=True):
                half.copy_(new)
        return x


def pairs_of(x: Tensor, neighbours: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second channel of each pair."""
    if neighbours:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


@dataclass(frozen=True)
class Call:
    """How the host called its function: everything but the numbers of the turned tensors.

    sizes: of the turned tensors, the first arguments: [B, S, H, D], [S, H, D] or, with `heads`,
    [B, S, H·D]. like: a tensor of their dtype and device.
    """

    function: Callable[..., Any]
    sizes: tuple[torch.Size, ...]
    rest: tuple[Any, ...]
    named: dict[str, Any]
    like: Tensor
    heads: int | None

    @property
    def tokens(self) -> int:
        size = self.sizes[0]
        return size[1] if len(size) == 4 or self.heads is not None else size[0]

    def by_heads(self, x: Tensor) -> Tensor:
        """What the function takes or gives, as [B, S, H, D]."""
        if self.heads is not None:
            return x.unflatten(2, (self.heads, -1))
        return x if x.dim() == 4 else x[None]

    @torch.no_grad()
    def turns(self, neighbours: bool) -> tuple[Turns, bool]:
        """What it does to (1, 0) in every pair, and whether that is known in FP32.

        Allocates one head of the tensors in FP32, all of them where heads are joined. A function
        that takes no FP32 is asked in the tensors' own dtype.
        """
        try:
            return self._asked(neighbours, torch.float32), True
        except _REFUSALS:
            if self.like.dtype == torch.float32:
                raise
            return self._asked(neighbours, self.like.dtype), False

    def _asked(self, neighbours: bool, dtype: torch.dtype) -> Turns:
        units = []
        for size in self.sizes:
            shape = list(size)
            if self.heads is None:
                shape[-2] = 1
            unit = torch.zeros(shape, dtype=dtype, device=self.like.device)
            pairs_of(self.by_heads(unit), neighbours)[0].fill_(1.0)
            units.append(unit)
        found = results_of(self.function(*units, *self.rest, **self.named), units)[0]
        # One row stands for all: `error_of` compares every row of what the host turned.
        cos, sin = pairs_of(self.by_heads(found)[0].float(), neighbours)
        return Turns(cos.contiguous(), sin.contiguous(), neighbours)


def results_of(out: Any, given: Sequence[Tensor]) -> list[Tensor]:
    """The turned tensors, of functions that return them or that work in place."""
    if out is None:
        return list(given)
    found = [out] if isinstance(out, Tensor) else list(out)[: len(given)]
    if len(found) != len(given) or not all(isinstance(x, Tensor) for x in found):
        raise HostError(
            f"the host's rotary embedding returned {type(out).__name__}: expected "
            f"{len(given)} tensors; leave store_keys out"
        )
    return found


def which_pairs(
    ask: Callable[[bool], tuple[Turns, bool]], source: Tensor, turned: Tensor
) -> tuple[tuple[Turns, bool] | None, list[float]]:
    """What `ask(neighbours)` gives for the pairs by which source [B, S, H, D] became `turned`.

    None where neither neighbours nor halves are; and how far off each that was tried is. Waits.
    """
    errors: list[float] = []
    for neighbours in (True, False):
        found = ask(neighbours)
        errors.append(error_of(found[0], source, turned))
        if errors[-1] < 0.02:  # the host's own rounding to BF16 is 0.002 to 0.006
            return found, errors
    return None, errors


def error_of(turns: Turns, source: Tensor, turned: Tensor) -> float:
    """How far turning source [B, S, H, D] is from what the host made of it; waits."""
    ours = turns.turn(source.to(torch.float32, copy=True), source.shape[1])
    return float((ours - turned.float()).norm() / turned.float().norm().clamp_min(1e-20))
