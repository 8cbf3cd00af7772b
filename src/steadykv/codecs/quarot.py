"""`quarot` (arXiv 2404.00456): channels rotated by Hadamard blocks, then groups as in `rtn`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import ops
from ..errors import ShapeError
from ..reference.blocks import Decoder
from .base import Codec, Encoded, HeadInputs, Shape, TensorSpec

__all__ = ["QuaRotCodec"]

GRID = "affine_min"


class QuaRotCodec(Codec):
    """Y = X·Hd on grid `affine_min`, whose ends are clipped to `clip_ratio` of the group's.

    The key/value part of QuaRot alone. Hd is orthonormal and its own inverse (`ops.hadamard`):
    one block where head_dim is a power of two, else blocks of the largest power of two dividing
    each width of `dim_splits`.

    Decoding multiplies the decoded rows y by Hd again and returns the frame of the host. As in the
    paper, keys may stay rotated if the queries are rotated too: `Payload.decode(rotated=True)` and
    `rotate(q, config)`. Hd is symmetric, so (q·Hd)·y = q·(y·Hd), and for values weights·(Y·Hd) =
    (weights·Y)·Hd: one rotation of the output. Both are up to the rounding of FP32.

    Payload: `codes` uint8 [B, H, S, ceil(D·bits/8)]; `scale`, `minimum` FP16 [B, H, S, G], G =
    ceil(D / group_size), of the rotated groups. Bits per element: bits + 32·G/D.
    Error, unless the flag `saturated` counts: as Hd is orthonormal, a token's has the norm that it
    has in the rotated frame. There, with the step s = clip_ratio·(max - min)/(2^bits - 1) of the
    group, a channel is at most s/2 + (1 - clip_ratio)·max|y| + 2^-10·(max|y| + 2^bits·s) off, and
    2^(bits-25) for numbers that small.
    """

    title = "QuaRot"
    encode_copies = 3.6
    decode_copies = 2.6

    def layout(self, shape: Shape, compensated: bool) -> dict[str, TensorSpec]:
        """See `Codec.layout`. Raises ShapeError where `dim_splits` do not add up to D."""
        batch, heads, tokens, width = shape
        self.rotation(width)
        groups = -(-width // self.config.group_size)
        metadata = TensorSpec((batch, heads, tokens, groups), torch.float16)
        row = ops.packed_length(width, self.config.bits)
        codes = TensorSpec((batch, heads, tokens, row), torch.uint8)
        return {"codes": codes, "scale": metadata, "minimum": metadata}

    def encode(self, x: Tensor, inputs: HeadInputs) -> Encoded:
        """See `Codec.encode`."""
        config = self.config
        rotated = ops.hadamard(x, self.rotation(x.shape[-1]))
        tensors, saturated = ops.group_quantize(
            rotated, GRID, config.bits, config.group_size, clip_ratio=config.clip_ratio
        )
        return Encoded(tensors, {"saturated": saturated})

    def decode(
        self, tensors: Mapping[str, Tensor], shape: Shape, out: Tensor, start: int, end: int
    ) -> None:
        """See `Codec.decode`."""
        self._decode(tensors, out, start, end, self.rotation(shape[-1]))

    def prepared(self, tensors: Mapping[str, Tensor], shape: Shape) -> Decoder | None:
        """See `Codec.prepared`."""
        bits, size, turned = self.config.bits, self.config.group_size, self.rotation(shape[3])
        return ops.grouped_decoder(tensors, shape[3], GRID, bits, size, "channels", rotation=turned)

    def decode_rotated(
        self, tensors: Mapping[str, Tensor], shape: Shape, out: Tensor, start: int, end: int
    ) -> None:
        """See `Codec.decode_rotated`."""
        self._decode(tensors, out, start, end, ())

    def rotation(self, head_dim: int) -> tuple[int, ...]:
        """See `Codec.rotation`. Raises ShapeError where `dim_splits` do not add up to head_dim."""
        widths = self.config.dim_splits or (head_dim,)
        if sum(widths) != head_dim:
            raise ShapeError(
                f"head_dim is {head_dim}: expected {sum(widths)}, the sum of dim_splits {widths}"
            )
        return widths

    def _decode(
        self,
        tensors: Mapping[str, Tensor],
        out: Tensor,
        start: int,
        end: int,
        rotation: tuple[int, ...],
    ) -> None:
        bits, size = self.config.bits, self.config.group_size
        ops.decode_grouped(
            tensors, out, GRID, bits, size, "channels", start, end, rotation=rotation
        )
