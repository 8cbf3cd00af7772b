"""`qvg4`: QVG with the four-level grid of QuantWM, which is QuantWM without QSAC and PSAC."""

from __future__ import annotations

import torch

from .. import ops
from .base import TensorSpec
from .qvg import QVGCodec

__all__ = ["QVG4Codec"]


class QVG4Codec(QVGCodec):
    """Grid `affine_zero` (arXiv 2609.26425, App. D.1).

    Payload: as qvg, with `scale_codes` uint8 [B, H, S, G], `scale_base` FP16 [B, H] and `zeros`
    uint8 [B, H, ceil(S·G·bits/8)] for `scale`.
    Bits per element: bits + (8 + bits)·G/D + 8·T/D + 16·T·C/S + 16/(S·D).
    """

    title = "QVG4"
    grid = "affine_zero"

    def metadata_layout(
        self, batch: int, heads: int, tokens: int, groups: int
    ) -> dict[str, TensorSpec]:
        """See `QVGCodec.metadata_layout`."""
        zeros = ops.packed_length(tokens * groups, self.config.bits)
        layout = {
            "scale_codes": TensorSpec((batch, heads, tokens, groups), torch.uint8),
            "zeros": TensorSpec((batch, heads, zeros), torch.uint8),
        }
        if tokens:
            layout["scale_base"] = TensorSpec((batch, heads), torch.float16)
        return layout
