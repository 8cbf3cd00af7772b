"""Packed tokens into a dense view in one pass; see `reference/decode.py` for what is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference import decode as reference
from ..reference.blocks import Decoder, Heads
from .decode_groups import groups_kernel
from .decode_levels import levels_kernel, outliers_kernel
from .decode_pairs import pairs_kernel
from .launch import (
    Launch,
    blocks,
    converts_e4m3,
    interpreted,
    kind_of,
    on_device,
    power_of_two,
    tile_width,
)

__all__ = [
    "clustered_decoder",
    "decode_clustered",
    "decode_grouped",
    "decode_nonuniform",
    "grouped_decoder",
]


class Tile(NamedTuple):
    """Tokens and warps of one program."""

    tokens: int
    warps: int


# By head_dim, in powers of two. A thread has 64 numbers: eight rows of 16 bytes.
TILES = {64: Tile(128, 4), 128: Tile(16, 1), 256: Tile(32, 4)}
# With coefficients. What the matrix units made of 32 tokens changes hands inside of a warp; larger
# tiles wait for each other at 20 barriers or more.
COMPENSATED_TILES = {64: Tile(32, 2), 128: Tile(16, 1), 256: Tile(32, 4)}
# Two numbers in a register. A warp has so many words of a row side by side, and rows accordingly;
# four with coefficients, where the matrix units leave them so.
PAIRS = Tile(16, 1)
PAIRS_SIDE, COMPENSATED_SIDE = 8, 4
# Whether programs that run together have the same tokens of all heads, where `out` has them side
# by side: its rows are then written as a whole. Otherwise they have one head and its centroids.
HEADS_FIRST = False
RANK_BLOCK = 32  # channels of the basis in one product, at most: 16 KB of them at head_dim 256
OUTLIERS = 1024  # of one program
INTERPRETED = interpreted()


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
        tensors = reference.dense_coefficients(tensors)
    if out.numel():
        width = out.shape[3]
        decode = clustered_decoder(tensors, width, grid, bits, group_size, packing, refinement)
        decode(None, out, start, end)


def clustered_decoder(
    tensors: Mapping[str, Tensor],
    width: int,
    grid: str,
    bits: int,
    group_size: int,
    packing: str,
    refinement: int = 0,
) -> Decoder:
    """See `steadykv.ops.decode`."""
    return _groups_decoder(
        tensors, width, grid, bits, group_size, "channels", packing, 0, refinement
    )


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
    if not out.numel():
        return
    width = out.shape[3]
    decode = grouped_decoder(tensors, width, grid, bits, group_size, axis, packing, rotation)
    if decode is not None:
        decode(None, out, start, end)
        return
    reference.decode_grouped(
        tensors, out, grid, bits, group_size, axis, start, end, packing, rotation
    )


def grouped_decoder(
    tensors: Mapping[str, Tensor],
    width: int,
    grid: str,
    bits: int,
    group_size: int,
    axis: str,
    packing: str,
    rotation: Sequence[int],
) -> Decoder | None:
    """See `steadykv.ops.decode`."""
    sizes = {width & -width for width in rotation}
    if len(sizes) > 1:  # blocks of several sizes: no kernel of its own
        return None
    levels = max(sizes, default=1).bit_length() - 1
    return _groups_decoder(tensors, width, grid, bits, group_size, axis, packing, levels)


def decode_nonuniform(
    tensors: Mapping[str, Tensor], out: Tensor, axis: str, bits: int, start: int, end: int
) -> None:
    """See `steadykv.ops.decode`."""
    kept = tensors["dense"].shape[2] if "dense" in tensors else 0
    if start < kept:  # a copy: no kernel of its own
        last = min(end, kept)
        reference.decode_nonuniform(tensors, out[:, :, : last - start], axis, bits, start, last)
        out, start = out[:, :, last - start :], last
    if not out.numel():
        return
    batch, heads, count, width = out.shape
    start -= kept
    stored = {name: t.contiguous() for name, t in tensors.items() if name != "dense"}
    codes, row = _code_words(stored["codes"], width, bits), stored["codes"].shape[3]
    tokens = codes.shape[2]
    words = power_of_two(blocks(width, 8))
    tile = _tile(TILES, 8 * words)
    tiles = blocks(count, tile.tokens)
    inputs = (out, codes, stored["center"], stored["half"], stored["levels"])
    constants = (
        width, words, row, bits, axis == "tokens", _is_aligned(out.shape, out.stride()),
        _heads_first(out.stride()), tile.tokens,
    )  # fmt: skip
    with on_device(out):
        _launch_of(levels_kernel, tile.warps, inputs, constants)(
            None, (batch * heads * tiles, 1, 1),
            *inputs, *out.stride(), batch * heads, heads, start, count, tokens, tiles, *constants,
        )  # fmt: skip
        values, index = stored["outlier_values"], stored["outlier_index"]
        if not values.numel():
            return
        if axis == "tokens":
            vectors, first, used = heads * width, 0, heads * width
        else:
            vectors, first, used = tokens, start, count
        programs = blocks(used * values.shape[-1], OUTLIERS)
        sizes = (width, axis == "tokens", OUTLIERS)
        _launch_of(outliers_kernel, 4, (out, values, index), sizes)(
            None, (batch * programs, 1, 1), out, values, index, *out.stride(),
            start, count, vectors, first, used, values.shape[-1], programs, *sizes,
        )  # fmt: skip


def _groups_decoder(
    tensors: Mapping[str, Tensor],
    width: int,
    grid: str,
    bits: int,
    group_size: int,
    axis: str,
    packing: str,
    levels: int,
    refinement: int = 0,
) -> Decoder:
    """Everything that does not depend on `out`, found once: reading a cache launches it often."""
    stored = {name: _plain(t) for name, t in tensors.items()}
    codes, row = _code_words(stored["codes"], width, bits, packing), stored["codes"].shape[3]
    payload_heads, tokens = codes.shape[1:3]
    scale = stored["scale_codes" if "scale_codes" in stored else "scale"]
    ids, centroids, basis = (stored.get(name) for name in ("ids", "centroids", "basis"))
    if centroids is not None and _has_pairs(centroids, width):
        centroids = centroids.view(torch.int32)
    zeros = stored["zeros"] if grid == "affine_zero" else None
    rank = 0 if basis is None else basis.shape[-1]
    words = power_of_two(blocks(width, 8))
    tile_tokens, warps = _tile(COMPENSATED_TILES if rank else TILES, 8 * words)
    finer, finer_row = None, 0
    if refinement:
        finer = _code_words(stored["refinement"], width, refinement)
        finer_row = stored["refinement"].shape[3]
    payload = (
        codes, finer, scale, stored.get("scale_base"),
        stored["minimum"] if grid.startswith("affine_min") else None, zeros,
        ids, centroids, stored.get("centroid_scale"),
        basis, stored.get("coef_codes"), stored.get("coef_scales"),
    )  # fmt: skip
    sizes = (
        scale.shape[2],
        0 if centroids is None else centroids.shape[3],
        0 if zeros is None else zeros.shape[2],
        width, words, row, bits, group_size, axis == "tokens", 0 if ids is None else ids.shape[2],
        rank, min(RANK_BLOCK, tile_width(rank)), levels, packing == "trits", refinement, finer_row,
    )  # fmt: skip

    launch = _launch_of(groups_kernel, warps, payload, (*sizes[3:], tile_tokens))
    pairs = None
    if axis == "channels" and not levels and refinement in (0, 2):
        is_trits, is_finer = packing == "trits", refinement > 0
        pairs = _pairs_decoder(stored, width, grid, bits, group_size, is_trits, is_finer)

    def decode(part: Heads | None, out: Tensor, start: int, end: int) -> None:
        batch, heads, count, _ = out.shape
        first_row = 0 if part is None else part.row * payload_heads + part.head
        strides, offset = out.stride(), out.data_ptr() % 16
        forms = _is_aligned(out.shape, strides), _heads_first(strides)
        with on_device(out):
            if pairs is not None and _can_pair(out, count) and forms[0] and not offset:
                pairs(first_row, out, start)
                return
            tiles = blocks(count, tile_tokens)
            # Of what Triton tells kernels apart by, `out` alone may differ between two calls.
            launch(
                (out.dtype, offset, *forms), (batch * heads * tiles, 1, 1),
                out, *payload, *strides, batch * heads, heads, start, count, tokens, tiles,
                first_row, *sizes, *forms, INTERPRETED, tile_tokens,
            )  # fmt: skip

    return decode


def _pairs_decoder(
    stored: Mapping[str, Tensor],
    width: int,
    grid: str,
    bits: int,
    group_size: int,
    is_trits: bool,
    is_finer: bool,
) -> Callable[[int, Tensor, int], None] | None:
    """(first row, out, start): decodes to BF16 by pairs; None where the payload is another kind."""
    ids, centroids, basis = (stored.get(name) for name in ("ids", "centroids", "basis"))
    has_zeros, group = grid == "affine_zero", min(group_size, width)
    rank = 0 if basis is None else basis.shape[-1]
    if bits != 2 or centroids is None or ids is None or ids.shape[2] > 1:
        return None
    is_bf16 = centroids.dtype == torch.bfloat16
    if not is_bf16 and "centroid_scale" not in stored:
        return None
    if grid == "symmetric":  # in BF16 from the start
        has_form = is_bf16 and not is_trits and not is_finer
    else:
        has_form = has_zeros or grid == "symmetric_int8"
    if not has_form or (rank and not has_zeros):
        return None
    if rank > 16 or rank % 2 or any(n & (n - 1) or n < 32 for n in (width, group)):
        return None
    views = [
        stored["codes"] if is_trits else _words(stored["codes"], 2),
        _words(centroids, 4),
    ]
    if is_finer:
        views += [_words(stored["refinement"], 2)]
    if rank:
        views += [_words(stored["basis"], 4), _words(stored["coef_codes"], 2)]
    if any(view is None for view in views):
        return None
    codes, pairs, *others = views
    finer = others.pop(0) if is_finer else None
    tokens = ids.shape[3]
    payload = (
        codes, finer, stored["scale" if grid == "symmetric" else "scale_codes"],
        stored.get("scale_base"), stored["zeros"] if has_zeros else None, ids, pairs,
        stored.get("centroid_scale"), *(others or (None, None)), stored.get("coef_scales"),
    )  # fmt: skip
    sizes = (
        centroids.shape[3], stored["zeros"].shape[2] if has_zeros else 0, width, group, rank,
        is_trits, converts_e4m3(ids.device), INTERPRETED,
        min(COMPENSATED_SIDE if rank else PAIRS_SIDE, group // 8), PAIRS.tokens,
    )  # fmt: skip
    launch = _launch_of(pairs_kernel, PAIRS.warps, payload, sizes[2:])

    def decode(first_row: int, out: Tensor, start: int) -> None:
        batch, heads, count, _ = out.shape
        s_batch, s_head, s_token, _ = out.stride()
        launch(
            None, (blocks(count, PAIRS.tokens), heads, batch),
            out, *payload, s_batch // 2, s_head // 2, s_token // 2, start, count, tokens,
            first_row, *sizes,
        )  # fmt: skip

    return decode


def _launch_of(
    kernel: Any, warps: int, payload: Sequence[Tensor | None], constants: tuple[Any, ...]
) -> Launch:
    """One for all payloads of a form, so that those of a new span are not looked up."""
    absent = tuple(tensor is None for tensor in payload)
    given = (tensor for tensor in payload if tensor is not None)
    return _launch_of_form(kernel, warps, kind_of(*given, constants=(absent, *constants)))


@cache
def _launch_of_form(kernel: Any, warps: int, form: tuple[Any, ...]) -> Launch:
    return Launch(kernel, warps)


def _can_pair(out: Tensor, count: int) -> bool:
    """Whether a tile of pairs fits into `out`, and its heads into the grid's second axis."""
    return out.dtype == torch.bfloat16 and count >= PAIRS.tokens and max(out.shape[:2]) < 1 << 16


def _words(tensor: Tensor, size: int) -> Tensor | None:
    """The same bytes in words of `size`; None where they are not whole or begin elsewhere."""
    if tensor.shape[-1] * tensor.element_size() % size or tensor.data_ptr() % size:
        return None
    return tensor.view(torch.int16 if size == 2 else torch.int32)


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous, as a stored tensor is already; E4M3 as its bytes."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _code_words(codes: Tensor, width: int, bits: int, packing: str = "bits") -> Tensor:
    """Codes in words of eight where they are whole numbers, otherwise the bytes."""
    if packing != "bits" or bits in (1, 3) or width % 8 or codes.data_ptr() % bits:
        return codes
    return codes.view(torch.int16 if bits == 2 else torch.int32)


def _has_pairs(centroids: Tensor, width: int) -> bool:
    is_bf16 = centroids.dtype == torch.bfloat16
    return is_bf16 and not width % 8 and not centroids.data_ptr() % 4


def _is_aligned(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each row of a token starts at a multiple of 16 numbers and has them side by side."""
    if strides[3] != 1 or strides[2] >= 1 << 20:
        return False
    return not any(s % 16 for s, size in zip(strides, shape[:3], strict=False) if size > 1)


def _heads_first(strides: Sequence[int]) -> bool:
    return HEADS_FIRST and strides[1] < strides[2]


def _tile(table: Mapping[int, Tile], width: int) -> Tile:
    return table[min(max(width, min(table)), max(table))]
