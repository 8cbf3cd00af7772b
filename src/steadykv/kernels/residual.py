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

__all__ = ["LANES", "as_pairs", "number_pairs", "residual_pairs", "word_places"]

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
    """x - mu[id] of the even and of the odd channels, FP32 tiles, 0 beyond WIDTH.

    p_x, p_mu: of one head; o_token: rows there, all of which exist. words: `word_places`.
    """
    ids = tl.load(p_ids + o_token).to(tl.int32)
    even, odd = number_pairs(p_x, o_token, words, WIDTH, IS_PADDED)
    mu_even, mu_odd = number_pairs(p_mu, ids, words, WIDTH, IS_PADDED)
    return even - mu_even, odd - mu_odd


@triton.jit
def number_pairs(p_rows, rows, words, WIDTH: tl.constexpr, IS_PADDED: tl.constexpr):
    """The four even and the four odd numbers of words of rows, FP32; 0 beyond WIDTH."""
    o_pair = 4 * words[:, :, :, :, None] + tl.arange(0, 4)[None, None, None, None, :]
    row = rows[None, None, :, None, None]
    if p_rows.dtype.element_ty == tl.int32:
        at = row * (WIDTH // 2) + o_pair
        if IS_PADDED:
            mask = (8 * words[:, :, :, :, None] < WIDTH) & (row >= 0)
            pair = tl.load(p_rows + at, mask=mask, other=0)
        else:
            pair = tl.load(p_rows + at)
        even = (pair << 16).to(tl.float32, bitcast=True)
        odd = (pair & -65536).to(tl.float32, bitcast=True)
    else:
        # In halves, as only then a thread has all eight.
        o_four = 4 * tl.arange(0, 2)[:, None] + tl.arange(0, 4)[None, :]
        channel = 8 * words[:, :, :, :, None, None] + o_four[None, None, None, None]
        at = row[:, :, :, :, :, None] * WIDTH + channel
        if IS_PADDED:
            mask = (channel < WIDTH) & (row[:, :, :, :, :, None] >= 0)
            number = tl.load(p_rows + at, mask=mask, other=0)
        else:
            number = tl.load(p_rows + at)
        shape: tl.constexpr = [at.shape[0], at.shape[1], at.shape[2], at.shape[3], 4, 2]
        number = tl.reshape(number, shape)
        even, odd = tl.split(number.to(tl.float32))
    return even, odd
