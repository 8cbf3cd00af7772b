"""Device functions: tokens minus their centroids, laid out so that a thread packs what it reads.

A tile is [LANES, GROUPS, TOKENS, STEPS, 4]: word `step·LANES + lane` of a group is eight channels,
which are kept as four even and four odd ones. Of axes along which neighbours are equally far apart
Triton gives threads to the first ones first: a few lanes of a thread group read a run of words, and
one thread has the rest of the group, so that few shuffles are left of a sum over it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["LANES", "as_pairs", "residual_pairs", "word_places"]

LANES = 4  # threads that share a group: 64 bytes side by side


def as_pairs(x: Tensor) -> Tensor:
    """BF16 as pairs in int32, for an upcast of one shift or mask, where rows are whole words."""
    if x.dtype != torch.bfloat16 or x.shape[-1] % 8 or x.data_ptr() % 4:
        return x
    return x.view(torch.int32)


@triton.jit
def word_places(GROUP_WORDS: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """The words of a token, int32 [LANES, GROUPS, 1, STEPS]."""
    o_lane, o_group = tl.arange(0, LANES), tl.arange(0, GROUPS)
    o_step = tl.arange(0, GROUP_WORDS // LANES)
    word = o_lane[:, None, None, None] + (o_group * GROUP_WORDS)[None, :, None, None]
    return word + (o_step * LANES)[None, None, None, :]


@triton.jit
def residual_pairs(p_x, p_mu, p_ids, o_token, words, WIDTH: tl.constexpr, IS_PADDED: tl.constexpr):
    """x - mu[id] of the even and of the odd channels, FP32, 0 beyond WIDTH.

    p_x, p_mu: of one head; o_token: rows there, all of which exist. words: `word_places`.
    """
    ids = tl.load(p_ids + o_token).to(tl.int32)
    o_pair = 4 * words[:, :, :, :, None] + tl.arange(0, 4)[None, None, None, None, :]
    row, entry = o_token[None, None, :, None, None], ids[None, None, :, None, None]
    even, odd = _numbers(p_x, row, o_pair, WIDTH, IS_PADDED)
    mu_even, mu_odd = _numbers(p_mu, entry, o_pair, WIDTH, IS_PADDED)
    return even - mu_even, odd - mu_odd


@triton.jit
def _numbers(p_rows, row, o_pair, WIDTH: tl.constexpr, IS_PADDED: tl.constexpr):
    if p_rows.dtype.element_ty == tl.int32:
        at = row * (WIDTH // 2) + o_pair
        if IS_PADDED:
            pair = tl.load(p_rows + at, mask=(2 * o_pair < WIDTH) & (row >= 0), other=0)
        else:
            pair = tl.load(p_rows + at)
        even = (pair << 16).to(tl.float32, bitcast=True)
        odd = (pair & -65536).to(tl.float32, bitcast=True)
    else:
        channel = 2 * o_pair[:, :, :, :, :, None] + tl.arange(0, 2)[None, None, None, None, None, :]
        at = row[:, :, :, :, :, None] * WIDTH + channel
        if IS_PADDED:
            mask = (channel < WIDTH) & (row[:, :, :, :, :, None] >= 0)
            number = tl.load(p_rows + at, mask=mask, other=0)
        else:
            number = tl.load(p_rows + at)
        even, odd = tl.split(number.to(tl.float32))
    return even, odd
