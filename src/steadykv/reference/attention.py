"""Definition: attention over tokens that are loaded block by block, in FP32."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import Tokens, head_groups

__all__ = ["attend", "attend_nbytes"]

# FP32 bytes of one block of logits, and of one block of keys; weights and a product live beside
# them. A block of keys holds one KV head, where heads can be loaded one by one.
BLOCK_BYTES = 4 << 20


def attend(
    q: Tensor, tokens: Tokens, out: Tensor, scale: float, bias: Tensor | None, budget: int
) -> None:
    """See `steadykv.ops.attention`."""
    batch, heads, rows, width = q.shape
    group, length = heads // tokens.heads, tokens.length
    for part in head_groups(batch, tokens.heads, _together(batch, tokens)):
        size = (part.rows, part.heads)
        # The query heads of one KV head see the same keys: they are more queries of one head.
        queries = part.of(q, group).float().reshape(*size, group * rows, width) * scale
        total = queries.new_zeros(*size, group * rows, 1)
        top = torch.full_like(total, -torch.inf)
        value = torch.zeros_like(queries)
        step = _token_step(part.rows * part.heads, width, length)
        room = torch.empty(2, *size, step, width, dtype=tokens.dtype, device=q.device)
        for start in range(0, length, step):
            end = min(start + step, length)
            k_room, v_room = room[..., : end - start, :]
            k, v = (t.float() for t in tokens.load(part, start, end, k_room, v_room))
            score_bias = None if bias is None else part.of(bias)[:, :, None, start:end]
            _add(queries, k, v, score_bias, top, total, value)
        value /= torch.where(total == 0, 1, total)
        part.of(out, group).copy_(value.view(part.rows, part.heads * group, rows, width))


def attend_nbytes(
    shape: tuple[int, int, int, int], tokens: Tokens, device: torch.device, budget: int
) -> int:
    """See `steadykv.ops.attention`."""
    batch, heads, rows, width = shape
    together = _together(batch, tokens)
    queries = 4 * together * heads // tokens.heads * rows
    step = _token_step(together, width, tokens.length)
    in_fp32 = 4 * (tokens.dtype != torch.float32)  # a copy
    rooms = 2 * together * step * width * (tokens.dtype.itemsize + in_fp32)
    logits = min(2 * BLOCK_BYTES, 2 * queries * step)
    # Scaled queries, values and, at the start, unscaled queries; then a product of one block.
    return queries * (3 * width + 2) + rooms + logits + min(queries * width, BLOCK_BYTES)


def _add(
    queries: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    top: Tensor,
    total: Tensor,
    value: Tensor,
) -> None:
    """One block of tokens more: `top` is the largest logit so far, `total` and `value` the sums of
    exp(logit - top) and of that times v.
    """
    together, tokens = k.shape[0] * k.shape[1], k.shape[2]
    step = max(1, BLOCK_BYTES // (4 * together * tokens))
    for first in range(0, queries.shape[2], step):
        at = (slice(None), slice(None), slice(first, first + step))
        logits = queries[at] @ k.transpose(2, 3)
        if bias is not None:
            logits += bias
        above = torch.maximum(top[at], logits.amax(-1, keepdim=True))
        shift = torch.where(above == -torch.inf, 0, above)  # nothing but removed keys so far
        weights = logits.sub_(shift).exp_()
        kept = (top[at] - shift).exp_()
        total[at] = total[at] * kept + weights.sum(-1, keepdim=True)
        value[at] = value[at] * kept
        value[at] += weights @ v
        top[at] = above


def _together(batch: int, tokens: Tokens) -> int:
    """KV heads of a pass."""
    return 1 if tokens.can_split else batch * tokens.heads


def _token_step(together: int, width: int, tokens: int) -> int:
    """Tokens of a block, all heads of a pass together."""
    return min(tokens, max(16, BLOCK_BYTES // (4 * together * width)))
