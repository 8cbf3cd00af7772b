"""`qvg4`: QVG with the four-level grid of QuantWM, which is QuantWM without QSAC and PSAC."""

from __future__ import annotations

from typing import ClassVar

import torch

from .. import ops
from .base import TensorSpec
from .qvg import QVGCodec

__all__ = ["QVG4Codec"]


class QVG4Codec(QVGCodec):
    """Grid `affine_zero` (arXiv 2609.26425, App. D.1).

    Payload: as qvg, with `scale_codes` uint8 [B, H, S, G], `scale_base` FP16 [B, H] and `zeros`
    uint8 [B, H, ceil(S·G·bits/8)] for `scale`; for metadata "fp8", the asymmetric option of Quant
    VideoGen's release, with `scale` and `minimum` E4M3 [B, H, S, G].
    Bits per element: bits + (8 + bits)·G/D + 8·T/D + 16·T·C/S + 16/(S·D); with "fp8" bits + 16·G/D
    + 8·T/D + 16·T·C/S.
    Error, unless the flag `saturated` counts, for a group r of what the centroids leave: at most
    (max(r, 0) - min(r, 0))/(2^bits - 1) + 2^bits·(`scale_base` + 2^-17). With "fp8",
    s = max((max r - min r)/(2^bits - 1), 2^-9) and d(v) = max(v/16, 2^-10): at most
    (s + d(s))/2 + (2^bits - 1)·d(s) + d(|min r|). With include_zero off, the first range is max r -
    min r, and the distance of the group from zero comes on top. `scale_search` and `refit` keep or
    lower the squared error of a group and of a head, not that of each number.
    """

    title = "QVG4"
    grids: ClassVar[dict[str, str]] = {"int8": "affine_zero", "fp8": "affine_min_fp8"}

    def metadata_layout(
        self, batch: int, heads: int, tokens: int, groups: int
    ) -> dict[str, TensorSpec]:
        """See `QVGCodec.metadata_layout`."""
        layout = super().metadata_layout(batch, heads, tokens, groups)
        if self.config.metadata == "fp8":
            return {**layout, "minimum": layout["scale"]}
        zeros = ops.packed_length(tokens * groups, self.config.bits)
        layout["zeros"] = TensorSpec((batch, heads, zeros), torch.uint8)
        return layout
