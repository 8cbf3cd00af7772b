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
from .base import FLAGS, Encoded, HeadInputs, Shape, TensorSpec
from .qvg import total
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
    Error of a number before PSAC, and without it: as qvg4. PSAC moves numbers that queries hardly
    see, so no such bound of a single one is left; the norm of a token's error grows by at most
    sqrt(r)·(0.57·`coef_scales` + 2^-17), from the rounding of coefficients and basis. With retain
    "row", e^T M e of a token does not grow (up to FP32 rounding).
    """

    title = "QuantWM"
    needs_queries = True
    flags = (*QVG4Codec.flags, "weight_active", "psac_active", "psac_failed")
    decode_copies = 3.4

    @property
    def has_kernels(self) -> bool:
        """See `Codec.has_kernels`."""
        config = self.config
        is_small = config.candidates <= 8 and config.rank <= 32
        return super().has_kernels and is_small and config.metric != "full"

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
        flags: dict[str, Tensor] = {}
        weight, metric = self.sensitivity(inputs, flags)
        centroids, stored, lost_scales, _ = self.centroids(x, inputs, 0)
        ids = ops.select_centroids(
            x,
            centroids,
            weight,
            config.candidates,
            config.group_size,
            metric=metric,
            include_zero=config.include_zero and self.grid == "affine_zero",
        )
        subspace = self.subspace(inputs, flags)
        tensors, saturated = self.round(x, centroids, ids)
        lost: Tensor | int = 0
        if config.refit:
            centroids = stored["centroids"] = self.refit(x, tensors, ids, centroids)
        if subspace is not None:
            coefficients, lost = self.compensate(x, centroids, ids, tensors, inputs, subspace)
            tensors.update(coefficients)
        tensors["ids"] = ids[:, None].to(self.id_dtype)
        tensors.update({name: t[:, None] for name, t in stored.items()})
        for name in self.flags:
            if FLAGS[name] == torch.uint8 and name not in flags:
                flags[name] = x.new_zeros(x.shape[0], dtype=torch.uint8)
        return Encoded(tensors, {"saturated": total(saturated, lost_scales, lost), **flags})

    def sensitivity(
        self, inputs: HeadInputs, flags: dict[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Channel weights [N, D] and the root of the full metric [N, D, D], where they are used."""
        moment, count = inputs.moment, inputs.count
        if moment is None or count is None or self.config.metric == "none":
            return None, None
        weight, flags["weight_active"] = ops.channel_weight(moment, count)
        if self.config.metric == "diagonal":
            return weight, None
        metric, active = ops.query_metric(moment, count)
        flags["weight_active"] &= active
        return torch.where(flags["weight_active"][:, None] > 0, weight, 1.0), metric

    def subspace(
        self, inputs: HeadInputs, flags: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """The eigenvectors [N, D, r] and eigenvalues [N, r] that PSAC stores; None without PSAC."""
        if inputs.moment is None or inputs.count is None or not self.config.rank:
            return None
        rank = min(self.config.rank, inputs.moment.shape[-1])
        vectors, values, flags["psac_active"], flags["psac_failed"] = ops.query_subspace(
            inputs.moment, inputs.count, rank
        )
        return vectors, values

    def compensate(
        self,
        x: Tensor,
        centroids: Tensor,
        ids: Tensor,
        tensors: Mapping[str, Tensor],
        inputs: HeadInputs,
        subspace: tuple[Tensor, Tensor],
    ) -> tuple[dict[str, Tensor], Tensor]:
        """PSAC of the error that the rounded `tensors` leave: its own, and what saturated [N]."""
        assert inputs.moment is not None
        config, basis = self.config, subspace[0].to(torch.bfloat16)
        codes, scales, lost = ops.compensate_clustered(
            x,
            centroids,
            ids,
            tensors,
            self.grid,
            config.bits,
            config.group_size,
            basis,
            inputs.moment,
            config.retain,
        )
        return {"basis": basis, "coef_codes": codes, "coef_scales": scales}, lost

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
