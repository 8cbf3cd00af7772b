"""Kernels: the residual of clustered tokens onto a grid, without the residual in memory.

`symmetric` (E4M3 scales), `symmetric_int8` and `affine_zero`, with groups that are powers of two;
the other forms are computed by the reference from the residual. Grids with a base for their scales
take two passes, the second of which has the refinement as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference.group_quantize import group_dequantize
from ..reference.group_quantize import group_quantize as _group_quantize
from ..reference.group_quantize import refine_clustered as _refine_clustered
from ..reference.pack import pack
from .grids import based_kernel, ranges_kernel, symmetric_kernel
from .kmeans import subtract_centroids
from .launch import Launch, blocks, interpreted, kind_of, on_device, power_of_two
from .packing import pack_rows
from .residual import LANES, as_pairs

__all__ = ["group_dequantize", "group_quantize", "quantize_clustered", "refine_clustered"]

GRIDS = ("symmetric_int8", "affine_zero")  # those with a base
TILE = 2048  # numbers of one warp
WARPS = 1  # of one program

_symmetric = Launch(symmetric_kernel, WARPS)
_ranges, _based = Launch(ranges_kernel, WARPS), Launch(based_kernel, WARPS)


def group_quantize(
    x: Tensor, *options: object, **named: object
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.group_quantize`; without clusters there is no kernel."""
    return _group_quantize(x.float(), *options, **named)  # type: ignore[arg-type]


def quantize_clustered(
    x: Tensor,
    centroids: Tensor,
    ids: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    packing: str = "bits",
    include_zero: bool = True,
    scale_search: bool = False,
    refinement: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.group_quantize`.

    Grids with a base allocate FP32 [N, S, G] besides, G rounded up to a power of two, `affine_zero`
    twice that; trits and rows that end within a word of eight codes a byte a number.
    """
    heads, tokens, width = x.shape
    padded = power_of_two(width)
    size = min(group_size, padded)
    has_kernel = size & (size - 1) == 0 and size >= 8 and include_zero and not scale_search
    if not has_kernel or grid not in (GRIDS if refinement else ("symmetric", *GRIDS)):
        residual = subtract_centroids(x, centroids, ids)
        tensors, lost = _group_quantize(
            residual,
            grid,
            bits,
            group_size,
            packing=packing,
            include_zero=include_zero,
            scale_search=scale_search,
        )
        if refinement:
            del residual
            given = (centroids, ids, tensors, grid, bits, group_size, refinement, packing)
            tensors["refinement"] = refine_clustered(x, *given)
        return tensors, lost
    groups = blocks(width, size)
    codes = _room(x, bits, packing)
    scales = torch.empty(heads, tokens, groups, dtype=torch.uint8, device=x.device)
    # Of values that saturate; for a grid with a base the bits of the widest range. Not two rows of
    # one tensor: what is kept would keep the other.
    counts = torch.zeros(heads, dtype=torch.int64, device=x.device)
    block = WARPS * max(4, TILE // padded)
    programs = (blocks(tokens, block), heads, 1)
    inputs = (as_pairs(x), as_pairs(centroids.contiguous()), ids.contiguous())
    shape = (centroids.shape[1], width, size, groups, padded // size, min(LANES, size // 8), block)
    coding = (2**bits, codes.bits, interpreted())
    kind = kind_of(*inputs, constants=(*shape, *coding, grid, refinement))
    if grid == "symmetric":
        with on_device(x):
            _symmetric(
                kind, programs, *inputs, codes.words, scales, counts, tokens, *shape, *coding
            )  # fmt: skip
        packed = _packed(codes, bits, packing)
        return {"codes": packed, "scale": scales.view(torch.float8_e4m3fn)}, counts
    has_zeros = grid == "affine_zero"
    # Zero points of a tile fill bytes.
    has_zero_bytes = groups & (groups - 1) == 0 and bits in (2, 4)
    nbytes = blocks(tokens * groups * bits, 8) if has_zero_bytes else tokens * groups
    zeros = None
    if has_zeros:
        zeros = torch.empty(heads, nbytes, dtype=torch.uint8, device=x.device)
    base = torch.empty(heads, dtype=torch.float16, device=x.device)
    saturated = torch.empty_like(counts)
    ends_shape = (1 + has_zeros, heads, tokens, padded // size)
    ends = torch.empty(ends_shape, dtype=torch.float32, device=x.device)
    finer = _room(x, refinement) if refinement else None
    finer_words, finer_bits = (None, 0) if finer is None else finer[1:]
    with on_device(x):
        _ranges(kind, programs, *inputs, ends, counts, tokens, *shape, has_zeros)
        _based(
            kind, programs, *inputs, ends, counts, saturated, codes.words, finer_words, scales,
            base, zeros, tokens, nbytes,
            *shape, *coding, bits if has_zero_bytes else 8, refinement, finer_bits, has_zeros,
        )  # fmt: skip
    tensors = {"codes": _packed(codes, bits, packing), "scale_codes": scales, "scale_base": base}
    if zeros is not None:
        tensors["zeros"] = zeros if has_zero_bytes else pack(zeros, bits)
    if finer is not None:
        tensors["refinement"] = _packed(finer, refinement)
    return tensors, saturated


def refine_clustered(x: Tensor, *given: Any) -> Tensor:
    """See `steadykv.ops.group_quantize`; a kernel has only `quantize_clustered`, with the codes."""
    return _refine_clustered(x.float(), *given)


class _Codes(NamedTuple):
    """Room for codes: uint8 [N, S, row], the same as a kernel's words, and how many bits these have
    for a code: 8 where they are packed afterwards.
    """

    stored: Tensor
    words: Tensor
    bits: int


def _room(x: Tensor, bits: int, packing: str = "bits") -> _Codes:
    """For codes of the numbers x [N, S, D]: in words of eight where rows are whole ones."""
    width = x.shape[2]
    is_whole = width % 8 == 0
    in_words = packing == "bits" and is_whole
    row = width * bits // 8 if in_words else width
    stored = torch.empty(*x.shape[:2], row, dtype=torch.uint8, device=x.device)
    has_pairs = is_whole and (bits in (2, 4) or not in_words)
    words = stored.view(torch.int16) if has_pairs else stored
    return _Codes(stored, words, bits if in_words else 8)


def _packed(codes: _Codes, bits: int, packing: str = "bits") -> Tensor:
    return codes.stored if codes.bits < 8 else pack_rows(codes.stored, bits, packing)
