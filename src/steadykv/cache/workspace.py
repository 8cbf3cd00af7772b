"""Stated upper bounds of what encoding and decoding allocate besides their results.

The ledger's peak is built from these, because asking an allocator would count the host's tensors
too. The factors of a method (`Codec.encode_copies`, `decode_copies`) are FP32 copies of the tokens
that one pass handles, `Codec.encode_blocks` are row blocks. They are measured allocations plus a
few percent (`tests/test_cache_memory.py` holds them to it, from both sides); memory inside LAPACK
or cuBLAS is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from steadykv.cache.segments import Segment
from steadykv.codecs import CODECS, codec_for
from steadykv.codecs.encoder import heads_per_pass, in_kernels
from steadykv.config import METHODS, CodecConfig
from steadykv.reference.blocks import CPU_BLOCK_BYTES, GPU_BLOCK_BYTES
from steadykv.reference.decode import BLOCK_BYTES

__all__ = ["decode_workspace_nbytes", "encode_workspace_nbytes", "span_decode_nbytes"]

# FP32 copies of the tokens while NaN and Inf are replaced, before and after; and row blocks, of |x|
# and of masks of a byte an element.
_CLEANING_COPIES = 2.0
_CLEANING_BLOCKS = 2.05

# While distances to centroids are computed block by block: FP32 copies of the tokens, blocks of
# k-means (one number a token and centroid), blocks of a candidate search (one a channel as well),
# and FP32 copies of the centroids.
_CLUSTERING_COPIES = 2.6
_KMEANS_BLOCKS = 2.1
_SEARCH_BLOCKS = 1.2
_CENTROID_COPIES = 5

# With kernels: FP32 tables of centroids, most of them sums over parts of the tokens.
KERNEL_TABLES = 24

# FP32 moments alive while their eigenvectors are computed in FP64.
_MOMENT_COPIES = 8


def encode_workspace_nbytes(
    codec: CodecConfig,
    shape: tuple[int, int, int, int],
    compensated: bool,
    device: torch.device,
    kernels: bool | None = None,
) -> int:
    """Bytes that encoding a [B, H, S, D] span takes besides source and payload.

    kernels: whether kernels do the encoding, on a machine that is not this one; None asks this one.
    """
    batch, heads, tokens, head_dim = shape
    row = 4 * tokens * head_dim
    method = codec_for(codec)
    kernels = in_kernels(method, device) if kernels is None else kernels
    # FP8 centroids of the span before are decoded to start from.
    warm = 4 * batch * heads * codec.stages * min(codec.centroids, tokens) * head_dim
    warm *= bool(codec.warm_start) and codec.centroid_format == "fp8"
    if kernels:
        rows = min(batch * heads, heads_per_pass(method, shape, device, kernels))
        moments = _MOMENT_COPIES * 4 * rows * head_dim**2 if compensated else 0
        parts = codec.payload_nbytes(*shape, compensated) if rows < batch * heads else 0
        tables = KERNEL_TABLES * 4 * rows * min(codec.centroids, tokens) * head_dim
        # A byte for each part of a step, where those of a row end within a word of eight.
        finer = rows * tokens * head_dim * bool(codec.refinement and head_dim % 8)
        return int(method.kernel_copies * rows * row + finer + tables + moments + parts + warm)
    rows = max(1, min(batch * heads, heads_per_pass(method, shape, device, kernels)))
    centroids = min(codec.centroids, tokens)
    largest = CPU_BLOCK_BYTES if device.type == "cpu" else GPU_BLOCK_BYTES
    blocks = _KMEANS_BLOCKS * min(largest, 4 * tokens * centroids)
    if "candidates" in METHODS[codec.method]:
        blocks = max(blocks, _SEARCH_BLOCKS * min(largest, 4 * tokens * centroids * head_dim))
    # From the second stage on, what the stages before left lives beside the tokens.
    residuals = 1 if codec.stages > 1 else 0
    clustering = (
        (_CLUSTERING_COPIES + residuals) * rows * row
        + _CENTROID_COPIES * 4 * rows * centroids * head_dim
        + blocks
    )
    # What the last stage clusters lives beside what it leaves.
    rounding = (method.encode_copies + residuals) * rows * row
    rounding += method.encode_blocks * min(largest, rows * row)
    rounding += method.encode_extra_nbytes((-(-rows // heads), heads, tokens, head_dim), largest)
    cleaning = _CLEANING_COPIES * rows * row + _CLEANING_BLOCKS * min(largest, row)
    moments = _MOMENT_COPIES * 4 * rows * head_dim**2 if compensated else 0
    clusters = "centroids" in METHODS[codec.method]
    # Several passes are joined at the end: the payload's parts and the whole live side by side.
    parts = codec.payload_nbytes(*shape, compensated) if rows < batch * heads else 0
    work = max(cleaning, rounding, clustering if clusters else 0)
    return int(work + moments + parts + warm)


def decode_workspace_nbytes(segments: Iterable[Segment]) -> int:
    """Bytes that decoding takes besides its result: that of the most demanding segment."""
    return max([0, *(_decode(segment) for segment in segments)])


def _decode(segment: Segment) -> int:
    if segment.payload is None:
        return 0
    centroids = segment.payload.tensors.get("centroids")
    numbers = 0 if centroids is None else centroids.numel()
    return span_decode_nbytes(segment.payload.config, segment.payload.shape, numbers)


def span_decode_nbytes(
    codec: CodecConfig, shape: tuple[int, int, int, int], centroid_numbers: int
) -> int:
    """Bytes that decoding a [B, H, S, D] span takes besides its result.

    centroid_numbers: elements of its centroids, all stages together.
    """
    batch, heads, tokens, head_dim = shape
    block = min(BLOCK_BYTES, 4 * batch * heads * tokens * head_dim)
    return int(CODECS[codec.method].decode_copies * block + 4 * centroid_numbers)  # tables in FP32
