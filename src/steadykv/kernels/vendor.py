"""The vendor's attention kernels that also return the log-sum-exp, and which of them runs."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["attention", "vendor_for"]

# The bias of a key that is to get no weight. Of a piece without any other key, kernels return NaN,
# infinity or 0 as the log-sum-exp, each its own.
REMOVED = -30000.0


def attention(
    name: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale·q·K^T + bias)·V and its log-sum-exp, FP32 [B, n·H, S], by kernel `name`.

    q: [B, n·H, S, D]; k, v: [B, H, T, D]; rows contiguous. bias: FP32 [B, H, T]. Allocates both
    results; with a bias also folded queries.
    """
    return _KERNELS[name](q, k, v, bias, scale)


def vendor_for(device: torch.device, width: int, dtype: torch.dtype, has_bias: bool) -> str | None:
    """Which of them runs, from static facts alone."""
    if device.type == "cpu":  # where kernels are interpreted
        return "cpu"
    if dtype not in (torch.bfloat16, torch.float16) or width % 8 or width > 256:
        return None
    if has_bias:
        return "efficient"
    # cuDNN 9 is the faster one from Hopper on: 4.3 ms against 7.3 for 32 heads of 4,680 queries and
    # 34,320 keys. It takes head dims up to 128 everywhere.
    return "cudnn" if width <= 128 and _has_cudnn(device.index) else "flash"


@torch.compiler.assume_constant_result  # of a function itself: what a cache wraps is traced
def _has_cudnn(index: int | None) -> bool:
    return _has_cudnn_9(index)


@cache
def _has_cudnn_9(index: int | None) -> bool:
    return (
        torch.cuda.get_device_capability(index) >= (9, 0)
        and torch.backends.cudnn.is_available()
        and (torch.backends.cudnn.version() or 0) >= 90000
    )


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, False, False, scale=scale
    )
    return found[0], found[1].reshape(q.shape[:3])


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, False, False, scale=scale
    )
    return found[0], found[1]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    folded, mask = _folded(q, k, bias)
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
        folded, k, v, mask, True, 0.0, False, scale=scale
    )[:2]
    # Its log-sum-exp is padded to whole blocks of queries.
    return out.reshape(q.shape), lse[:, :, : folded.shape[2]].reshape(q.shape[:3])


def _cpu(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    folded, mask = _folded(q, k, bias)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


_KERNELS = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "cpu": _cpu}


def _folded(q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The query heads of a KV head as more queries of one head, and the bias as their mask."""
    rows, heads, tokens, width = k.shape
    folded = q.reshape(rows, heads, -1, width)
    if bias is None:
        return folded, None
    # Strides that are multiples of 16, which the kernels load by.
    padded = q.new_empty(rows, heads, 1, -(-tokens // 16) * 16)[..., :tokens]
    padded.copy_(bias[:, :, None].clamp(min=REMOVED))
    return folded, padded.expand(-1, -1, folded.shape[2], -1)
