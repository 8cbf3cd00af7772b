"""`kvquant` (arXiv 2401.18079): non-uniform levels for all heads, and one percent of outliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..config import CodecConfig
from ..errors import PayloadError
from ..reference.blocks import FP16_MAX, to_bfloat16
from .base import Codec, Encoded, HeadInputs, Shape, TensorSpec

if TYPE_CHECKING:
    from .calibration import CalibratedGrid

__all__ = ["KVQuantCodec", "outlier_count"]

# n = 2·ceil(length / these): half of the outliers at each end, in integer arithmetic.
_LENGTHS = {0.01: 200, 0.005: 400, 0.001: 2000}


class KVQuantCodec(Codec):
    """A vector is a channel over all S tokens (axis "tokens", for keys) or a token over all H·D
    numbers (axis "channels", for values); its n outliers are FP16, the rest is on 2^bits levels.

    Payload: `codes` uint8 [B, H, S, ceil(D·bits/8)]; `center`, `half` FP16 [B, H, D] or [B, S];
    `outlier_values` FP16 and `outlier_index` uint16 (int32 above 65,536 places) [B, H, D, n] or
    [B, S, n]; `levels` FP16 [B, 2^bits]. With first_tokens, and for a span whose vectors have no
    more than n numbers, `dense` BF16 [B, H, tokens, D] has the first tokens, and the others begin
    at 0 behind them.
    Bits per element: bits + 32·n/S + 32/S or bits + 32·n/(H·D) + 32/(H·D); n = 2·ceil(S/200) or
    2·ceil(H·D/200) at outlier_fraction 0.01.
    Error, while nothing saturates: half·(1 + the largest |level|) of an inlier, and the rounding of
    center and half; FP16 rounding of an outlier.
    levels "calibrated": levels, and for keys center and half, are those of a `Calibration`; the n
    outliers of a channel are then the numbers farthest from its center. A token's center and half
    cannot be known beforehand. The payload has the same tensors.
    level_weight "queries": a channel counts M_cc·half² in the fit, in batch rows all of whose heads
    have queries; 1 elsewhere.
    """

    title = "KVQuant"
    pools_heads = True
    encode_copies = 4.2
    decode_copies = 2.3  # two percent of outliers: vectors of a hundred numbers or more

    def __init__(self, config: CodecConfig) -> None:
        super().__init__(config)
        if config.needs_queries:
            self.flags = (*self.flags, "weight_active")

    def layout(self, shape: Shape, compensated: bool) -> dict[str, TensorSpec]:
        """See `Codec.layout`."""
        config = self.config
        batch, heads, tokens, width = shape
        dense = self.dense_tokens(shape)
        layout = {}
        if dense:
            layout["dense"] = TensorSpec((batch, heads, dense, width), torch.bfloat16)
        packed = tokens - dense
        if dense and not packed:
            return layout
        by_tokens = config.axis == "tokens"
        vectors = (batch, heads, width) if by_tokens else (batch, packed)
        length = packed if by_tokens else heads * width
        row = ops.packed_length(width, config.bits)
        layout["codes"] = TensorSpec((batch, heads, packed, row), torch.uint8)
        has_vectors = packed > 0 and batch * heads > 0
        if has_vectors:
            layout["center"] = layout["half"] = TensorSpec(vectors, torch.float16)
        outliers = (*vectors, outlier_count(length, config.outlier_fraction) if packed else 0)
        layout["outlier_values"] = TensorSpec(outliers, torch.float16)
        layout["outlier_index"] = TensorSpec(outliers, _index_dtype(length))
        if has_vectors:
            layout["levels"] = TensorSpec((batch, 2**config.bits), torch.float16)
        return layout

    def dense_tokens(self, shape: Shape) -> int:
        """How many of the first tokens stay dense: all where a vector would be nothing but
        outliers."""
        _, heads, tokens, width = shape
        first = min(self.config.first_tokens, tokens)
        length = tokens - first if self.config.axis == "tokens" else heads * width
        is_all = outlier_count(length, self.config.outlier_fraction) >= length
        return tokens if is_all else first

    def encode(self, x: Tensor, inputs: HeadInputs) -> Encoded:
        """See `Codec.encode`. x has whole batch rows of `inputs.heads` heads."""
        config = self.config
        rows = x.unflatten(0, (-1, inputs.heads))
        batch, heads, tokens, width = rows.shape
        dense = self.dense_tokens((batch, heads, tokens, width))
        energy = self._channel_energy(inputs)
        encoded = Encoded({"dense": to_bfloat16(x[:, :dense])} if dense else {})
        encoded.flags["saturated"] = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        if config.needs_queries:
            total = rows.new_zeros(batch) if energy is None else energy.sum((1, 2))
            encoded.flags["weight_active"] = (total > 0).to(torch.uint8).repeat_interleave(heads)
        if dense == tokens:
            return encoded
        rows = rows[:, :, dense:]
        vectors = self.vectors(rows)
        outliers, center, half, lost = self._thresholds(vectors, inputs.grid)
        if inputs.grid is None:
            levels, stored = self._levels(vectors, outliers, center, half, energy)
        else:
            fixed = inputs.grid.tensors
            levels, stored = (fixed[name].repeat(batch, 1) for name in ("levels", "stored_levels"))
        codes = ops.nonuniform_codes(rows, config.axis, outliers, center, half, levels, config.bits)
        encoded.tensors["codes"] = codes.flatten(0, 1)
        encoded.row_tensors["levels"] = stored
        exact = vectors.gather(-1, outliers)
        is_lost = exact.abs() > FP16_MAX
        parts = {
            "center": center,
            "half": half,
            "outlier_values": exact.clamp_(-FP16_MAX, FP16_MAX).to(torch.float16),
            "outlier_index": outliers.to(_index_dtype(vectors.shape[-1])),
        }
        if config.axis == "tokens":  # a vector has one head
            for name, part in parts.items():
                encoded.tensors[name] = part.unflatten(1, (heads, width)).flatten(0, 1)
            saturated = (lost + is_lost.sum(-1)).unflatten(1, (heads, width)).sum(-1)
        else:  # and here all: a saturated center or half is counted once, with the first head
            encoded.row_tensors.update(parts)
            head, saturated = (outliers // width).flatten(1), lost.new_zeros(batch, heads)
            saturated.scatter_add_(1, head, is_lost.flatten(1).to(torch.int64))
            saturated[:, 0] += lost.sum(-1)
        encoded.flags["saturated"] = saturated.flatten()
        return encoded

    def decode(
        self, tensors: Mapping[str, Tensor], shape: Shape, out: Tensor, start: int, end: int
    ) -> None:
        """See `Codec.decode`."""
        ops.decode_nonuniform(tensors, out, self.config.axis, self.config.bits, start, end)

    def check_indices(self, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        """See `Codec.check_indices`."""
        if "outlier_index" not in tensors:
            return
        index = tensors["outlier_index"].to(torch.int64)
        by_tokens = self.config.axis == "tokens"
        places = tensors["codes"].shape[2] if by_tokens else shape[1] * shape[3]
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < places:
            raise PayloadError(f"outlier_index leaves its vector: expected 0 to {places - 1}")

    def encode_extra_nbytes(self, shape: Shape, block_nbytes: int) -> int:
        """See `Codec.encode_extra_nbytes`: the members of each level, counted in every vector; and
        vectors ordered by 64-bit keys, at most an eighth of a block at a time."""
        batch, heads, tokens, width = shape
        vectors = batch * (heads * width if self.config.axis == "tokens" else tokens)
        ordered = min(block_nbytes // 8, 4 * batch * heads * tokens * width)
        # Measured: five 64-bit numbers a level, five FP32 copies of what is ordered.
        return 40 * vectors * 2**self.config.bits + 5 * ordered

    # --- the fit, which a calibration does beforehand -----------------------------------------

    def vectors(self, rows: Tensor) -> Tensor:
        """[B, H, S, D] as [B, H·D, S] or [B, S, H·D]: a new tensor."""
        if self.config.axis == "tokens":
            return rows.transpose(2, 3).flatten(1, 2).contiguous()
        return rows.transpose(1, 2).flatten(2).contiguous()

    def fit(self, rows: Tensor, energy: Tensor | None) -> dict[str, Tensor]:
        """Levels, and for keys thresholds, of FP32 [1, H, S, D]: what a calibration stores.

        energy: FP64 [1, H, D], M_cc of each channel, or None. Returns `levels` FP32 and
        `stored_levels` FP16 [2^bits], and for axis "tokens" `center` and `half` FP16 [H, D].
        """
        vectors = self.vectors(rows)
        outliers, center, half, _ = self._thresholds(vectors, None)
        levels, stored = self._levels(vectors, outliers, center, half, energy)
        tensors = {"levels": levels[0], "stored_levels": stored[0]}
        if self.config.axis == "tokens":
            channels = (rows.shape[1], rows.shape[3])
            tensors.update(center=center.view(channels), half=half.view(channels))
        return tensors

    def _thresholds(
        self, vectors: Tensor, grid: CalibratedGrid | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Outliers, center, half, and how many numbers saturated in each vector."""
        count = outlier_count(vectors.shape[-1], self.config.outlier_fraction)
        if grid is None or self.config.axis != "tokens":
            outliers = ops.find_outliers(vectors, count)
            return outliers, *ops.inlier_range(vectors, outliers)
        batch = len(vectors)
        center, half = (
            grid.tensors[name].view(1, -1).repeat(batch, 1) for name in ("center", "half")
        )
        lost = torch.zeros(vectors.shape[:2], dtype=torch.int64, device=vectors.device)
        return ops.find_outliers(vectors, count, center), center, half, lost

    def _levels(
        self, vectors: Tensor, outliers: Tensor, center: Tensor, half: Tensor, energy: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Levels for codes FP32, and for decoding FP16 [B, 2^bits]."""
        weight = None
        if energy is not None:
            energy = energy.flatten(1)
            weight = energy * half.double().square()
            # Without queries M is unknown, and every vector counts the same.
            weight = torch.where(energy.sum(1, keepdim=True) > 0, weight, 1.0)
        config = self.config
        return ops.fit_levels(vectors, outliers, center, half, config.bits, config.q_norm, weight)

    def _channel_energy(self, inputs: HeadInputs) -> Tensor | None:
        """M_cc FP64 [B, H, D], zero in batch rows that lack queries; None where none is used."""
        if inputs.moment is None or inputs.count is None or not self.config.needs_queries:
            return None
        energy = inputs.moment.diagonal(dim1=-2, dim2=-1).double()
        known = (inputs.count > 0) & energy.isfinite().all(-1)
        known = known.unflatten(0, (-1, inputs.heads)).all(-1)
        return torch.where(known[:, None, None], energy.unflatten(0, (-1, inputs.heads)), 0.0)


def outlier_count(length: int, fraction: float) -> int:
    """Outliers of a vector of `length` numbers."""
    return 2 * -(-length // _LENGTHS[fraction]) if fraction else 0


def _index_dtype(places: int) -> torch.dtype:
    return torch.uint16 if places <= 1 << 16 else torch.int32
