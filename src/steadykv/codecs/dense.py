"""`bf16`: the span as it is, in BF16. The half that is not packed in "quantwm:bf16"."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .base import Codec, Encoded, HeadInputs, Shape, TensorSpec

__all__ = ["BF16Codec"]


class BF16Codec(Codec):
    """`dense` BF16 [B, H, S, D]: 16 bits an element."""

    def layout(self, shape: Shape, compensated: bool) -> dict[str, TensorSpec]:
        """See `Codec.layout`."""
        return {"dense": TensorSpec(shape, torch.bfloat16)}

    def encode(self, x: Tensor, inputs: HeadInputs) -> Encoded:
        """See `Codec.encode`."""
        return Encoded({"dense": x.to(torch.bfloat16)})

    def decode(
        self, tensors: Mapping[str, Tensor], shape: Shape, out: Tensor, start: int, end: int
    ) -> None:
        """See `Codec.decode`."""
        dense = tensors["dense"][:, :, start:end]
        if out.dtype == torch.float16:  # 65,504, the largest FP16 number, is 65,536 in BF16
            limit = torch.finfo(torch.float16).max
            dense = dense.float().clamp_(-limit, limit)
        out.copy_(dense)
