"""`qvg` (arXiv 2602.02958): tokens minus their cluster mean, on a three-level grid."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import ops
from ..errors import PayloadError
from .base import Codec, Encoded, HeadInputs, Shape, TensorSpec

__all__ = ["QVGCodec"]


class QVGCodec(Codec):
    """k-means stages, then grid `symmetric` on what is left.

    Payload: `codes` uint8 [B, H, S, ceil(D·bits/8)]; `scale` E4M3 [B, H, S, G]; `ids` uint8 [B, H,
    T, S] (uint16 above 256 centroids); `centroids` BF16 [B, H, T, min(C, S), D].
    Bits per element: bits + 8·G/D + 8·T/D + 16·T·C/S.
    """

    title = "QVG"
    encode_copies = 2.45
    encode_blocks = 1.75
    decode_copies = 2.7
    grid = "symmetric"
    stages = 1

    def layout(self, shape: Shape, compensated: bool) -> dict[str, TensorSpec]:
        """See `Codec.layout`."""
        batch, heads, tokens, width = shape
        row = ops.packed_length(width, self.config.bits)
        layout = {"codes": TensorSpec((batch, heads, tokens, row), torch.uint8)}
        layout.update(
            self.metadata_layout(batch, heads, tokens, -(-width // self.config.group_size))
        )
        layout["ids"] = TensorSpec((batch, heads, self.stages, tokens), self.id_dtype)
        if tokens:
            clusters = min(self.config.centroids, tokens)
            layout["centroids"] = TensorSpec(
                (batch, heads, self.stages, clusters, width), torch.bfloat16
            )
        return layout

    def metadata_layout(
        self, batch: int, heads: int, tokens: int, groups: int
    ) -> dict[str, TensorSpec]:
        """What the grid stores beside the codes."""
        return {"scale": TensorSpec((batch, heads, tokens, groups), torch.float8_e4m3fn)}

    @property
    def id_dtype(self) -> torch.dtype:
        """Of the centroid ids."""
        return torch.uint8 if self.config.centroids <= 256 else torch.uint16

    def encode(self, x: Tensor, inputs: HeadInputs) -> Encoded:
        """See `Codec.encode`."""
        config = self.config
        residual, clustered, all_ids, all_centroids = x, x, [], []
        for stage in range(self.stages):
            start = self.start_centroids(residual, inputs, stage)
            ids, centroids = ops.kmeans(
                residual, start, config.iterations, reseed_empty=config.reseed_empty
            )
            assert ids is not None
            if config.refit:
                clustered = residual  # what the last stage clusters
            residual = ops.subtract_centroids(residual, centroids, ids)
            all_ids.append(ids)
            all_centroids.append(centroids)
        tensors, saturated = self.round(residual)
        del residual
        if config.refit:
            all_centroids[-1] = self.refit(clustered, tensors, all_ids[-1], all_centroids[-1])
        tensors["ids"] = torch.stack(all_ids, 1).to(self.id_dtype)
        tensors["centroids"] = torch.stack(all_centroids, 1)
        return Encoded(tensors, {"saturated": saturated})

    def round(self, residual: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Rounds FP32 [N, S, D] onto the grid; returns its tensors and the saturated values [N]."""
        config = self.config
        return ops.group_quantize(
            residual,
            self.grid,
            config.bits,
            config.group_size,
            include_zero=config.include_zero,
            scale_search=config.scale_search,
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
            tensors, self.grid, config.bits, config.group_size, width, 0, tokens
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
        return residual[:, chosen.to(residual.device, non_blocking=True)]

    def decode(
        self, tensors: Mapping[str, Tensor], shape: Shape, out: Tensor, start: int, end: int
    ) -> None:
        """See `Codec.decode`."""
        config = self.config
        ops.decode_clustered(tensors, out, self.grid, config.bits, config.group_size, start, end)

    def check_indices(self, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        """See `Codec.check_indices`."""
        ids = tensors["ids"].to(torch.int32)
        clusters = min(self.config.centroids, shape[2])
        if ids.numel() and int(ids.max()) >= clusters:
            raise PayloadError(
                f"ids reach {int(ids.max())}: expected less than {clusters} centroids"
            )
