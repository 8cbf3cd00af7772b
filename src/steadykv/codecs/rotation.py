"""Queries in the frame that quarot stores its tokens in, so that nothing need be turned back."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..config import CodecConfig
from ..errors import ConfigError, ShapeError
from ..reference.blocks import FP16_MAX, to_bfloat16
from .base import Codec

__all__ = ["rotate", "stored_rotation"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rotate(x: Tensor, config: CodecConfig) -> Tensor:
    """x·Hd: queries for tokens that `Payload.decode(rotated=True)` leaves rotated.

    x: BF16, FP16 or FP32 [..., D], any strides, in the frame of the host. Returns a new contiguous
    tensor of its shape and dtype, computed in FP32 and cast once, saturated. Hd is symmetric and
    its own inverse, so that q·k = (q·Hd)·(k·Hd); and an attention output over rotated values is
    turned back by the same call. It turns channels within a head: heads that share keys need
    nothing else.
    Hd does not commute with a rotary embedding: keys that are stored before theirs have to be
    decoded into the host's frame. Allocates two and a half FP32 copies of x.
    Raises ConfigError for a method that stores the host's frame (all but quarot), ShapeError for
    another dtype or a D that `dim_splits` do not add up to. QuaRot (arXiv 2404.00456) Sec. 4.
    """
    from . import codec_for

    if not isinstance(config, CodecConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}: expected a CodecConfig; a CacheConfig has two, "
            "as in preset('quarot').keys"
        )
    is_tensor = isinstance(x, Tensor) and x.dim() > 0 and x.shape[-1] > 0
    if not is_tensor or x.dtype not in _DTYPES:
        got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(
            f"x is {got}: expected [..., D] in bfloat16, float16 or float32, D at least 1"
        )
    widths = stored_rotation(codec_for(config), x.shape[-1])
    turned = ops.hadamard(x.float().contiguous(), widths)
    if x.dtype == torch.float16:
        turned.clamp_(-FP16_MAX, FP16_MAX)
    return to_bfloat16(turned) if x.dtype == torch.bfloat16 else turned.to(x.dtype)


def stored_rotation(codec: Codec, head_dim: int) -> tuple[int, ...]:
    """Widths of the blocks that have turned the stored tokens. ConfigError where nothing has."""
    widths = codec.rotation(head_dim)
    if not widths:
        raise ConfigError(
            f"{codec.config.method} stores tokens in the frame of the host: expected a method that "
            "rotates them, quarot; leave rotated=True and rotate() away"
        )
    return widths
