"""The rotary embedding of captured tokens, for keys that are stored before it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate_pairs"]


def rotate_pairs(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of x [B, H, S, D] by the angles of each token.

    rope: FP32 [2, S, D/2], cosines and sines. Computed in FP32; returns a new tensor of x's dtype.
    """
    cosine, sine = rope.to(x.device).unbind(0)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    return rotated.flatten(-2).to(x.dtype)
