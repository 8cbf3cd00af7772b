"""`kivi` (arXiv 2402.02750): keys per channel over tokens, values per token over channels.

The recent window of the paper is a matter of policy (`recent_keep`), not of the codec.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import ops
from ..reference.blocks import Decoder
from .base import Codec, Encoded, HeadInputs, Shape, TensorSpec

__all__ = ["KIVICodec"]


class KIVICodec(Codec):
    """Grid `affine_min`: value = minimum + scale·code, both FP16.

    Payload: `codes` uint8 [B, H, S, ceil(D·bits/8)]; `scale`, `minimum` FP16 [B, H, ceil(S/g), D]
    for axis "tokens", [B, H, S, ceil(D/g)] for axis "channels". Bits per element: bits + 32/g.
    Error, unless the flag `saturated` counts, with the step s = (max - min)/(2^bits - 1) of the
    group: at most s/2 + 2^-10·(max|x| + (2^bits - 1)·s) + 2^(bits-25).
    """

    title = "KIVI"
    encode_copies = 2.8
    decode_copies = 1.6

    def layout(self, shape: Shape, compensated: bool) -> dict[str, TensorSpec]:
        """See `Codec.layout`."""
        batch, heads, tokens, width = shape
        size = self.config.group_size
        by_tokens = self.config.axis == "tokens"
        groups = (-(-tokens // size), width) if by_tokens else (tokens, -(-width // size))
        metadata = TensorSpec((batch, heads, *groups), torch.float16)
        row = ops.packed_length(width, self.config.bits)
        codes = TensorSpec((batch, heads, tokens, row), torch.uint8)
        return {"codes": codes, "scale": metadata, "minimum": metadata}

    def encode(self, x: Tensor, inputs: HeadInputs) -> Encoded:
        """See `Codec.encode`."""
        config = self.config
        tensors, saturated = ops.group_quantize(
            x, "affine_min", config.bits, config.group_size, axis=config.axis
        )
        return Encoded(tensors, {"saturated": saturated})

    def decode(
        self, tensors: Mapping[str, Tensor], shape: Shape, out: Tensor, start: int, end: int
    ) -> None:
        """See `Codec.decode`."""
        config = self.config
        ops.decode_grouped(
            tensors, out, "affine_min", config.bits, config.group_size, config.axis, start, end
        )

    def prepared(self, tensors: Mapping[str, Tensor], shape: Shape) -> Decoder | None:
        """See `Codec.prepared`."""
        config = self.config
        bits, size = config.bits, config.group_size
        return ops.grouped_decoder(tensors, shape[3], "affine_min", bits, size, config.axis)
