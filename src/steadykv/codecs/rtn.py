"""`rtn`: every group of channels rounded to the nearest level. The floor of the comparison."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import ops
from ..reference.blocks import Decoder
from .base import Codec, Encoded, HeadInputs, Shape, TensorSpec, check_trits

__all__ = ["RTNCodec"]


class RTNCodec(Codec):
    """Groups of neighbouring channels of a token, nothing else.

    Payload: `codes` uint8 [B, H, S, ceil(D·bits/8)], or [B, H, S, ceil(D/5)] for packing "trits".
    Grid "affine_min": `scale`, `minimum` FP16 [B, H, S, G], G = ceil(D / group_size). Bits per
    element: bits + 32·G/D. Error, with the step s = (max - min)/(2^bits - 1) of the group: at most
    s/2 + 2^-10·(max|x| + (2^bits - 1)·s) + 2^(bits-25).
    Grid "symmetric", as Quant VideoGen (arXiv 2602.02958, Table 1) has its baseline: `scale` E4M3
    [B, H, S, G]. Bits per element: bits + 8·G/D, with 8·ceil(D/5)/D in place of bits for trits.
    Error, with L = 2^(bits-1) - 1, s = max(max|x|/L, 2^-9) and d = max(s/16, 2^-10): at most
    (s + d)/2 + L·d.
    Both unless the flag `saturated` counts.
    """

    title = "RTN"
    encode_copies = 2.8
    decode_copies = 1.6

    def layout(self, shape: Shape, compensated: bool) -> dict[str, TensorSpec]:
        """See `Codec.layout`."""
        config = self.config
        batch, heads, tokens, width = shape
        groups = (batch, heads, tokens, -(-width // config.group_size))
        row = ops.packed_length(width, config.bits, config.packing)
        layout = {"codes": TensorSpec((batch, heads, tokens, row), torch.uint8)}
        if config.grid == "symmetric":
            layout["scale"] = TensorSpec(groups, torch.float8_e4m3fn)
        else:
            layout["scale"] = layout["minimum"] = TensorSpec(groups, torch.float16)
        return layout

    def encode(self, x: Tensor, inputs: HeadInputs) -> Encoded:
        """See `Codec.encode`."""
        config = self.config
        tensors, saturated = ops.group_quantize(
            x, str(config.grid), config.bits, config.group_size, packing=config.packing
        )
        return Encoded(tensors, {"saturated": saturated})

    def decode(
        self, tensors: Mapping[str, Tensor], shape: Shape, out: Tensor, start: int, end: int
    ) -> None:
        """See `Codec.decode`."""
        config = self.config
        ops.decode_grouped(
            tensors,
            out,
            str(config.grid),
            config.bits,
            config.group_size,
            "channels",
            start,
            end,
            packing=config.packing,
        )

    def prepared(self, tensors: Mapping[str, Tensor], shape: Shape) -> Decoder | None:
        """See `Codec.prepared`."""
        config, grid = self.config, str(self.config.grid)
        bits, size, packing = config.bits, config.group_size, config.packing
        return ops.grouped_decoder(tensors, shape[3], grid, bits, size, "channels", packing)

    def check_indices(self, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        """See `Codec.check_indices`."""
        check_trits(tensors["codes"], self.config.packing)
