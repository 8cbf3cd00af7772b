"""`bf16`: the span as it is, in BF16. The half that is not packed in "quantwm:bf16"."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..reference.blocks import FP16_MAX, to_bfloat16
from .base import Codec, Encoded, HeadInputs, Shape, TensorSpec

__all__ = ["BF16Codec"]


class BF16Codec(Codec):
    """`dense` BF16 [B, H, S, D]: 16 bits an element; FP32 beyond its largest number saturates.

    Error: none of BF16 numbers, else at most 2^-8·|x| + 2^-134, saturation included.
    """

    title = "BF16"
    is_dense = True
    encode_copies = 3.0
    decode_copies = 0.0

    def layout(self, shape: Shape, compensated: bool) -> dict[str, TensorSpec]:
        """See `Codec.layout`."""
        return {"dense": TensorSpec(shape, torch.bfloat16)}

    def encode(self, x: Tensor, inputs: HeadInputs) -> Encoded:
        """See `Codec.encode`."""
        return Encoded({"dense": to_bfloat16(x)})

    def decode(
        self, tensors: Mapping[str, Tensor], shape: Shape, out: Tensor, start: int, end: int
    ) -> None:
        """See `Codec.decode`."""
        dense = tensors["dense"][:, :, start:end]
        if out.dtype == torch.float16:  # 65,504, the largest FP16 number, is 65,536 in BF16
            dense = dense.float().clamp_(-FP16_MAX, FP16_MAX)
        out.copy_(dense)
