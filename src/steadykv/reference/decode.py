"""Definition: dense values of a slice of tokens, in blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .blocks import FP16_MAX, gather_rows
from .group_quantize import group_dequantize
from .hadamard import hadamard
from .kmeans import centroid_values
from .nonuniform import nonuniform_dequantize

__all__ = ["decode_clustered", "decode_grouped", "decode_nonuniform", "dense_coefficients"]

# FP32 bytes of one block of rows, all heads together. The 1,152 tokens of three heads of the
# embedded model need 1.7 MB, one layer of 4,680 tokens and 12 heads 28.8 MB.
BLOCK_BYTES = 64 << 20


def decode_clustered(
    tensors: Mapping[str, Tensor],
    out: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    start: int,
    end: int,
    packing: str = "bits",
    refinement: int = 0,
) -> None:
    """See `steadykv.ops.decode`."""
    if "row_index" in tensors:
        tensors = dense_coefficients(tensors)
    packed = {k: t.flatten(0, 1) for k, t in tensors.items()}
    # FP32 before they are gathered: casting 4,680 rows of 12 heads afterwards takes seven times as
    # long for E4M3 (24 against 3.4 ms on a CPU core), and half as long again for BF16.
    centroids = centroid_values(packed).float()
    clusters = centroids.shape[2]
    centroids = centroids.flatten(1, 2)  # the stages of a head one after the other
    for first, last in _token_blocks(out, start, end):
        ids = packed["ids"][..., first:last].long()
        base = gather_rows(centroids, ids[:, 0])
        for stage in range(1, ids.shape[1]):
            base += gather_rows(centroids, ids[:, stage] + stage * clusters)
        value = group_dequantize(
            packed,
            grid,
            bits,
            group_size,
            out.shape[-1],
            first,
            last,
            packing=packing,
            refinement=refinement,
        )
        value += base
        if "basis" in packed:
            _add_correction(value, packed, out.shape[1], first, last)
        _store(value, out[:, :, first - start : last - start])


def decode_grouped(
    tensors: Mapping[str, Tensor],
    out: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    axis: str,
    start: int,
    end: int,
    packing: str = "bits",
    rotation: Sequence[int] = (),
) -> None:
    """See `steadykv.ops.decode`."""
    packed = {k: t.flatten(0, 1) for k, t in tensors.items()}
    for first, last in _token_blocks(out, start, end):
        value = group_dequantize(
            packed, grid, bits, group_size, out.shape[-1], first, last, axis, packing
        )
        if rotation:
            value = hadamard(value, rotation)
        _store(value, out[:, :, first - start : last - start])


def decode_nonuniform(
    tensors: Mapping[str, Tensor], out: Tensor, axis: str, bits: int, start: int, end: int
) -> None:
    """See `steadykv.ops.decode`."""
    kept = tensors["dense"].shape[2] if "dense" in tensors else 0
    for first, last in _token_blocks(out, start, min(end, kept)):
        value = tensors["dense"][:, :, first:last].float()
        _store(value, out[:, :, first - start : last - start])
    for first, last in _token_blocks(out, max(start, kept), end, spare=4):  # one more number
        width = out.shape[-1]
        value = nonuniform_dequantize(tensors, axis, bits, width, first - kept, last - kept)
        _store(value, out[:, :, first - start : last - start])


def dense_coefficients(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The payload with its sparse coefficients on their rows, zeros elsewhere.

    int8 [B, H, S, r] and FP16 [B, H, S] are new, the other tensors the same.
    """
    batch, heads, _, rows = tensors["ids"].shape
    offsets = tensors["row_offsets"].long()
    kept = tensors["row_index"].shape[0]
    head = torch.repeat_interleave(offsets.diff(), output_size=kept)
    at = head * rows + tensors["row_index"].long()
    codes = tensors["coef_codes"].new_zeros(batch * heads * rows, tensors["coef_codes"].shape[1])
    scales = tensors["coef_scales"].new_zeros(batch * heads * rows)
    codes[at], scales[at] = tensors["coef_codes"], tensors["coef_scales"]
    rest = {k: t for k, t in tensors.items() if k not in ("row_index", "row_offsets")}
    return {
        **rest,
        "coef_codes": codes.view(batch, heads, rows, -1),
        "coef_scales": scales.view(batch, heads, rows),
    }


def _add_correction(
    value: Tensor, packed: Mapping[str, Tensor], heads: int, first: int, last: int
) -> None:
    """Adds alpha·(codes · U^T) to value [N, last - first, D]: one product shape for any batch."""
    for row in range(0, value.shape[0], heads):
        at = slice(row, row + heads)
        codes, basis = packed["coef_codes"][at, first:last].float(), packed["basis"][at].float()
        correction = torch.bmm(codes, basis.transpose(1, 2))
        value[at] += correction.mul_(packed["coef_scales"][at, first:last, None])


def _token_blocks(out: Tensor, start: int, end: int, spare: int = 0) -> Iterator[tuple[int, int]]:
    batch, heads, _, width = out.shape
    step = max(1, (BLOCK_BYTES - spare) // (4 * batch * heads * width))
    for first in range(start, end, step):
        yield first, min(first + step, end)


def _store(value: Tensor, out: Tensor) -> None:
    if out.dtype == torch.float16:
        value.clamp_(-FP16_MAX, FP16_MAX)
    out.copy_(value.view(out.shape))
