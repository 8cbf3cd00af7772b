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
    encode_copies = 3.8
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
        residual, all_ids, all_centroids = x, [], []
        for stage in range(self.stages):
            start = self.start_centroids(residual, inputs, stage)
            ids, centroids = ops.kmeans(residual, start, self.config.iterations)
            assert ids is not None
            residual = residual - ops.gather_centroids(centroids, ids)
            all_ids.append(ids)
            all_centroids.append(centroids)
        tensors, saturated = ops.group_quantize(
            residual, self.grid, self.config.bits, self.config.group_size
        )
        tensors["ids"] = torch.stack(all_ids, 1).to(self.id_dtype)
        tensors["centroids"] = torch.stack(all_centroids, 1)
        return Encoded(tensors, {"saturated": saturated})

    def start_centroids(self, residual: Tensor, inputs: HeadInputs, stage: int) -> Tensor:
        """Where k-means starts: given centroids, or the same distinct tokens in every head."""
        if inputs.initial_centroids is not None:
            return inputs.initial_centroids[:, stage]
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
