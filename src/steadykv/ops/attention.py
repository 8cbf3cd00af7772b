"""Contract: attention over cached tokens, which are loaded piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.blocks import Heads, Tokens
from .dispatch import resolve

__all__ = ["BUDGETS", "Heads", "Tokens", "attend", "attend_nbytes"]

BUDGETS = {"default": 128 << 20, "small": 32 << 20}
"""What `attend` may allocate beside its result, in bytes, by mode."""


def attend(
    q: Tensor,
    tokens: Tokens,
    out: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    budget: int = BUDGETS["default"],
    backend: str | None = None,
) -> None:
    """softmax(scale·q·K^T + bias)·V of all tokens, written into `out`.

    q: float [B, n·H, S, D]; out: the same shape and dtype; any strides. tokens: keys and values of
    H heads; every token of every head is loaded once. bias: FP32 [B, H, T], added to the logits of
    a key; -inf removes it; at least one key has to be left.
    Pieces are joined by their log-sum-exp (Milakov and Gimelshein, arXiv 1805.02867).
    The reference works in FP32. On the GPU the vendor's attention does the pieces in BF16 or FP16
    (which round weights and partial results): off by at most 4·2^-8, or 4·2^-11, of max|v|; with a
    bias, which is rounded too, by that times 1 + max|bias|.
    Allocates at most `budget` bytes beside what loading does, or, if more, the outputs of one head
    (of all, unless `tokens.can_split`) and 256 tokens; `attend_nbytes` says how much.
    """
    module = resolve("attention", q.device, backend)
    module.attend(q, tokens, out, scale, bias, budget)


def attend_nbytes(
    shape: tuple[int, int, int, int],
    tokens: Tokens,
    device: torch.device,
    *,
    budget: int = BUDGETS["default"],
    backend: str | None = None,
) -> int:
    """An upper bound of what `attend` allocates for queries of `shape`, beside loading and out."""
    module = resolve("attention", device, backend)
    return int(module.attend_nbytes(shape, tokens, device, budget))
