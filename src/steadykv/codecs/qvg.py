"""`qvg` (arXiv 2602.02958): tokens minus their cluster mean, on a three-level grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..errors import PayloadError
from ..reference.blocks import Decoder
from .base import Codec, Encoded, HeadInputs, Shape, TensorSpec, check_trits

__all__ = ["Clusters", "QVGCodec", "total"]


class Clusters(NamedTuple):
    """One stage: ids int64 [N, S], the centroids [N, C, D] as decoding has them, the tensors that
    store them, and the number of saturated scales [N].
    """

    ids: Tensor
    values: Tensor
    stored: dict[str, Tensor]
    saturated: Tensor | int


# Stage t may leave 2^t times the largest number, and means are sums of S numbers first: from here
# on up to 16·10^7 of them fit into FP32.
STAGED_MAX = 1e30


class QVGCodec(Codec):
    """k-means stages, then grid `symmetric` on what is left.

    Payload: `codes` uint8 [B, H, S, ceil(D·bits/8)], or [B, H, S, ceil(D/5)] for packing "trits";
    `scale` E4M3 [B, H, S, G], or for metadata "int8" `scale_codes` uint8 [B, H, S, G] and
    `scale_base` FP16 [B, H]; `ids` uint8 [B, H, T, S] (uint16 above 256 centroids); `centroids`
    BF16 [B, H, T, min(C, S), D], or for centroid_format "fp8" E4M3 and `centroid_scale` FP16 [B, H,
    T, min(C, S)].
    With refinement also `refinement` uint8 [B, H, S, ceil(D·refinement/8)], until it is dropped.
    Bits per element: bits + refinement + 8·G/D + 8·T/D + 16·T·C/S. In place of bits, trits have
    8·ceil(D/5)/D; in place of 16·T·C/S, FP8 centroids have T·C·(8·D + 16)/(S·D); int8 adds
    16/(S·D).
    Error, unless the flag `saturated` counts, for a group r of what the centroids leave and L =
    2^(bits-1) - 1: at most (s + d)/2 + L·d with s = max(max|r|/L, 2^-9) and d = max(s/16, 2^-10);
    for "int8" s = max|r|/L and d = `scale_base` + 2^-17. `refit` keeps or lowers the squared error
    of a head, not that of each number. With several stages numbers beyond 1e30 saturate to it.
    """

    title = "QVG"
    encode_copies = 2.45
    encode_blocks = 1.75
    decode_copies = 2.6
    kernel_copies = 0.8
    grids: ClassVar[dict[str, str]] = {"fp8": "symmetric", "int8": "symmetric_int8"}

    @property
    def has_kernels(self) -> bool:
        """See `Codec.has_kernels`."""
        config = self.config
        has_options = config.refit or config.reseed_empty or config.scale_search
        return config.stages == 1 and not has_options

    @property
    def grid(self) -> str:
        """The residual's grid, in the form that the configuration stores it in."""
        return self.grids[str(self.config.metadata)]

    def layout(self, shape: Shape, compensated: bool) -> dict[str, TensorSpec]:
        """See `Codec.layout`."""
        config = self.config
        batch, heads, tokens, width = shape
        row = ops.packed_length(width, config.bits, config.packing)
        layout = {"codes": TensorSpec((batch, heads, tokens, row), torch.uint8)}
        if config.refinement:
            row = ops.packed_length(width, config.refinement)
            layout["refinement"] = TensorSpec((batch, heads, tokens, row), torch.uint8)
        layout.update(self.metadata_layout(batch, heads, tokens, -(-width // config.group_size)))
        layout["ids"] = TensorSpec((batch, heads, config.stages, tokens), self.id_dtype)
        if tokens:
            table = (batch, heads, config.stages, min(config.centroids, tokens))
            is_fp8 = config.centroid_format == "fp8"
            kind = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
            layout["centroids"] = TensorSpec((*table, width), kind)
            if is_fp8:
                layout["centroid_scale"] = TensorSpec(table, torch.float16)
        return layout

    def metadata_layout(
        self, batch: int, heads: int, tokens: int, groups: int
    ) -> dict[str, TensorSpec]:
        """What the grid stores beside the codes."""
        size = (batch, heads, tokens, groups)
        if self.config.metadata == "fp8":
            return {"scale": TensorSpec(size, torch.float8_e4m3fn)}
        layout = {"scale_codes": TensorSpec(size, torch.uint8)}
        if tokens:
            layout["scale_base"] = TensorSpec((batch, heads), torch.float16)
        return layout

    @property
    def id_dtype(self) -> torch.dtype:
        """Of the centroid ids."""
        return torch.uint8 if self.config.centroids <= 256 else torch.uint16

    def encode(self, x: Tensor, inputs: HeadInputs) -> Encoded:
        """See `Codec.encode`."""
        config = self.config
        too_large: Tensor | int = 0
        if config.stages > 1:
            # Head by head, as a mask and its sum are copies of what they are made of.
            too_large = torch.stack([torch.count_nonzero(head.abs() > STAGED_MAX) for head in x])
            x.clamp_(-STAGED_MAX, STAGED_MAX)
        rows = x
        found = [self.cluster(rows, inputs, 0)]
        for stage in range(1, config.stages):
            rows = ops.subtract_centroids(rows, found[-1].values, found[-1].ids)
            found.append(self.cluster(rows, inputs, stage))
        last = found[-1]
        tensors, lost = self.round(rows, last.values, last.ids)
        if config.refit:
            last.stored["centroids"] = self.refit(rows, tensors, last.ids, last.stored["centroids"])
        tensors["ids"] = _stacked([clusters.ids.to(self.id_dtype) for clusters in found])
        for name in last.stored:
            tensors[name] = _stacked([clusters.stored[name] for clusters in found])
        saturated = total(lost, too_large, *(clusters.saturated for clusters in found))
        return Encoded(tensors, {"saturated": saturated})

    def cluster(self, x: Tensor, inputs: HeadInputs, stage: int) -> Clusters:
        """One stage of k-means over [N, S, D]."""
        values, stored, saturated, ids = self.centroids(x, inputs, stage, with_ids=True)
        assert ids is not None
        return Clusters(ids, values, stored, saturated)

    def centroids(
        self, x: Tensor, inputs: HeadInputs, stage: int, with_ids: bool = False
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | int, Tensor | None]:
        """The centroids of [N, S, D] as decoding has them, [N, C, D].

        Then the tensors that store them, the number of saturated scales [N], and `with_ids` the
        nearest of each token, int64 [N, S].
        """
        config = self.config
        start = self.start_centroids(x, inputs, stage)
        is_bf16 = config.centroid_format == "bf16"
        ids, values = ops.kmeans(
            x,
            start,
            config.iterations,
            with_ids=with_ids and is_bf16,
            rounded=is_bf16,
            reseed_empty=config.reseed_empty,
        )
        if is_bf16:
            return values, {"centroids": values}, 0, ids
        stored, values, saturated = ops.quantize_centroids(values)
        return values, stored, saturated, ops.assign_centroids(x, values) if with_ids else None

    def round(self, x: Tensor, centroids: Tensor, ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Rounds what the centroids leave of [N, S, D]: its tensors, what saturated [N]."""
        config = self.config
        return ops.quantize_clustered(
            x,
            centroids,
            ids,
            self.grid,
            config.bits,
            config.group_size,
            packing=config.packing,
            include_zero=config.include_zero,
            scale_search=config.scale_search,
            refinement=config.refinement,
        )

    def refit(
        self, x: Tensor, tensors: Mapping[str, Tensor], ids: Tensor, centroids: Tensor
    ) -> Tensor:
        """The centroids of x [N, S, D] that suit the rounded residual in `tensors`."""
        return ops.refit_centroids(x, self.rounded(tensors, x), ids, centroids)

    def rounded(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The residual that a decoder will see: FP32 [N, S, D] like x."""
        config, (_, tokens, width) = self.config, x.shape
        return ops.group_dequantize(
            tensors,
            self.grid,
            config.bits,
            config.group_size,
            width,
            0,
            tokens,
            packing=config.packing,
        )

    def start_centroids(self, residual: Tensor, inputs: HeadInputs, stage: int) -> Tensor:
        """Where k-means starts: given centroids, means under given ids, or tokens.

        Cold, the tokens are distinct, and the same in every head.
        """
        if inputs.initial_centroids is not None:
            given = inputs.initial_centroids[:, stage]
            if inputs.initial_ids is None:
                return given
            return ops.cluster_means(residual, inputs.initial_ids[:, stage].long(), given.float())
        tokens = residual.shape[1]
        generator = inputs.span_key.generator(self.config.seed, stage)
        chosen = torch.randperm(tokens, generator=generator, device="cpu")[: self.config.centroids]
        return residual.index_select(1, chosen.to(residual.device, non_blocking=True))

    def decode(
        self, tensors: Mapping[str, Tensor], shape: Shape, out: Tensor, start: int, end: int
    ) -> None:
        """See `Codec.decode`."""
        config = self.config
        ops.decode_clustered(
            tensors,
            out,
            self.grid,
            config.bits,
            config.group_size,
            start,
            end,
            packing=config.packing,
            refinement=config.refinement,
        )

    def prepared(self, tensors: Mapping[str, Tensor], shape: Shape) -> Decoder | None:
        """See `Codec.prepared`."""
        config = self.config
        return ops.clustered_decoder(
            tensors,
            shape[3],
            self.grid,
            config.bits,
            config.group_size,
            config.packing,
            config.refinement,
        )

    def check_indices(self, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        """See `Codec.check_indices`."""
        ids = tensors["ids"].to(torch.int32)
        clusters = min(self.config.centroids, shape[2])
        if ids.numel() and int(ids.max()) >= clusters:
            raise PayloadError(
                f"ids reach {int(ids.max())}: expected less than {clusters} centroids"
            )
        check_trits(tensors["codes"], self.config.packing)


def total(first: Tensor, *others: Tensor | int) -> Tensor:
    """The sum of counts [N], without an operation for those that are known to be 0."""
    for other in others:
        if isinstance(other, Tensor):
            first = first + other
    return first


def _stacked(stages: list[Tensor]) -> Tensor:
    """[N, T, ...] of [N, ...] for each stage; no copy of a single one."""
    return stages[0][:, None] if len(stages) == 1 else torch.stack(stages, 1)
