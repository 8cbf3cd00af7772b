"""`quantwm`: keys whose products with queries stay right (arXiv 2609.26425); values use `qvg4`.

QSAC chooses among the nearest centroids the one that leaves the cheapest residual; PSAC stores the
remaining error in the directions where queries are strongest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import ops
from ..errors import PayloadError
from .base import Encoded, HeadInputs, Shape, TensorSpec
from .qvg4 import QVG4Codec

__all__ = ["QuantWMCodec", "sparse_coefficients"]


class QuantWMCodec(QVG4Codec):
    """k-means, QSAC, grid `affine_zero`, PSAC.

    Payload: as qvg4; with query statistics also `basis` BF16 [B, H, D, r], `coef_codes` int8 [B, H,
    S, r] and `coef_scales` FP16 [B, H, S], r = min(rank, D). coef_layout "auto" may store the kept
    rows only: `coef_codes` [n, r], `coef_scales` [n], `row_index` uint16 or int32 [n],
    `row_offsets` int32 [B·H + 1]; or nothing if no row is kept. Bits per element over qvg4: (8·r +
    16)/D + 16·r/S.
    A span without statistics has unit weights, no PSAC and the size of qvg4 (App. C.3).
    """

    title = "QuantWM"
    needs_queries = True
    encode_copies = 4.6
    decode_copies = 3.4

    def layout(self, shape: Shape, compensated: bool) -> dict[str, TensorSpec]:
        """See `Codec.layout`."""
        layout = super().layout(shape, compensated)
        batch, heads, tokens, width = shape
        rank = min(self.config.rank, width)
        if compensated and tokens and rank:
            layout["basis"] = TensorSpec((batch, heads, width, rank), torch.bfloat16)
            layout["coef_codes"] = TensorSpec((batch, heads, tokens, rank), torch.int8)
            layout["coef_scales"] = TensorSpec((batch, heads, tokens), torch.float16)
        return layout

    def encode(self, x: Tensor, inputs: HeadInputs) -> Encoded:
        """See `Codec.encode`. The host has decided whether `inputs.moment` holds any queries."""
        config = self.config
        heads, tokens, width = x.shape
        moment, count = inputs.moment, inputs.count
        names = ("weight_active", "psac_active", "psac_failed")
        flags = {name: x.new_zeros(heads, dtype=torch.uint8) for name in names}
        weight = None
        if moment is not None and count is not None:
            weight, flags["weight_active"] = ops.channel_weight(moment, count)
        _, centroids, stored, lost_scales = self.cluster(x, inputs, 0, with_ids=False)
        ids = ops.select_centroids(
            x,
            centroids,
            weight,
            config.candidates,
            config.group_size,
            include_zero=self.grid == "affine_zero",
        )
        base = ops.gather_centroids(centroids, ids).float()
        tensors, saturated = ops.group_quantize(x - base, self.grid, config.bits, config.group_size)
        saturated = saturated + lost_scales
        rank = min(config.rank, width)
        if moment is not None and count is not None and rank:
            basis, flags["psac_active"], flags["psac_failed"] = ops.query_basis(moment, count, rank)
            error = x - base.add_(
                ops.group_dequantize(
                    tensors, self.grid, config.bits, config.group_size, width, 0, tokens
                )
            )
            tensors["basis"] = basis
            tensors["coef_codes"], tensors["coef_scales"], lost = ops.compensate(
                error, basis, moment, config.retain
            )
            saturated = saturated + lost
        tensors["ids"] = ids[:, None].to(self.id_dtype)
        tensors.update({name: t[:, None] for name, t in stored.items()})
        return Encoded(tensors, {"saturated": saturated, **flags})

    def finish(self, tensors: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
        """For "auto", the smaller coefficient layout (ties: dense); waits for the kept rows."""
        if self.config.coef_layout == "dense" or "basis" not in tensors:
            return tensors
        sparse = sparse_coefficients(tensors["coef_codes"], tensors["coef_scales"])
        rest = {k: t for k, t in tensors.items() if k not in ("coef_codes", "coef_scales")}
        if not sparse["row_index"].numel():
            del rest["basis"]
            return rest
        dense_nbytes = sum(tensors[k].nbytes for k in ("coef_codes", "coef_scales"))
        is_smaller = sum(t.nbytes for t in sparse.values()) < dense_nbytes
        return {**rest, **sparse} if is_smaller else tensors

    def stored_layout(self, shape: Shape, tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
        """See `Codec.stored_layout`; knows the sparse form too."""
        layout = super().stored_layout(shape, tensors)
        if "row_index" not in tensors or "basis" not in layout:
            return layout
        kept = tensors["row_index"].numel()
        batch, heads, rows, _ = shape
        layout["coef_codes"] = TensorSpec((kept, layout["basis"].shape[-1]), torch.int8)
        layout["coef_scales"] = TensorSpec((kept,), torch.float16)
        layout["row_index"] = TensorSpec((kept,), _index_dtype(rows))
        layout["row_offsets"] = TensorSpec((batch * heads + 1,), torch.int32)
        return layout

    def check_indices(self, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        """See `Codec.check_indices`."""
        super().check_indices(shape, tensors)
        if "row_index" not in tensors:
            return
        rows, offsets = tensors["row_index"].to(torch.int64), tensors["row_offsets"].to(torch.int64)
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < shape[2]:
            raise PayloadError(f"row_index leaves the span: expected 0 to {shape[2] - 1}")
        if int(offsets[0]) or int(offsets[-1]) != rows.numel() or bool((offsets.diff() < 0).any()):
            raise PayloadError(
                f"row_offsets are wrong: expected to ascend from 0 to {rows.numel()}"
            )


def sparse_coefficients(codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """The kept rows of `coef_codes` [B, H, S, r] and `coef_scales` [B, H, S], and their places.

    Rows ascend by (b, h), then by token; `row_offsets` has the first row of each (b, h), and the
    end. Waits for the number of kept rows.
    """
    rows = codes.shape[2]
    codes, scales = codes.flatten(0, 1), scales.flatten(0, 1)
    kept = scales != 0  # a kept row has a code of ±127, so its scale is not 0
    head, row = kept.nonzero(as_tuple=True)
    offsets = torch.zeros(kept.shape[0] + 1, dtype=torch.int32, device=codes.device)
    offsets[1:] = kept.sum(1).cumsum(0)
    return {
        "coef_codes": codes[head, row],
        "coef_scales": scales[head, row],
        "row_index": row.to(_index_dtype(rows)),
        "row_offsets": offsets,
    }


def _index_dtype(rows: int) -> torch.dtype:
    return torch.uint16 if rows <= 1 << 16 else torch.int32
