"""Definition: vectors on non-uniform levels, outliers apart (KVQuant, arXiv 2401.18079).

A vector is a channel over its tokens (keys) or a token over all heads (values). Rows are sorted
once, so that a level is a stretch of each, and a sum over it the difference of two running sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from .blocks import FP16_MAX, row_blocks, tree_sum
from .pack import pack, unpack

__all__ = [
    "find_outliers",
    "fit_levels",
    "inlier_range",
    "nonuniform_codes",
    "nonuniform_dequantize",
]

ITERATIONS = 50
# |u| exceeds 1 only by the rounding of center and half to FP16. Where that rounding is larger than
# the vector's whole range, one vector must not drag the levels of all along.
LARGEST = 4.0
# Bytes of temporaries a number while a row is ordered: four int64, as measured.
_ROW_BYTES = 32


def find_outliers(vectors: Tensor, count: int, center: Tensor | None) -> Tensor:
    """See `steadykv.ops.nonuniform`."""
    index = torch.empty(*vectors.shape[:2], count, dtype=torch.int64, device=vectors.device)
    for rows, chosen, *middle in _blocks(vectors, index, *([] if center is None else [center])):
        if middle:
            chosen[:] = _first_largest(_order((rows - middle[0].float()[:, None]).abs()), count)
            continue
        key = _order(rows)
        chosen[:, : count // 2] = _first_largest(key, count // 2)
        smallest = key.bitwise_not_().scatter_(1, chosen[:, : count // 2], -(1 << 31))
        chosen[:, count // 2 :] = _first_largest(smallest, count - count // 2)
    return index


def inlier_range(vectors: Tensor, outliers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `steadykv.ops.nonuniform`."""
    low, high = vectors.new_empty(vectors.shape[:2]), vectors.new_empty(vectors.shape[:2])
    for rows, at, least, most in _blocks(vectors, outliers, low, high):
        torch.amin(rows.scatter(1, at, torch.inf), 1, out=least)
        torch.amax(rows.scatter(1, at, -torch.inf), 1, out=most)
    center, half = (high + low) / 2, (high - low) / 2
    lost = (center.abs() > FP16_MAX).to(torch.int64) + (half > FP16_MAX)
    return _to_float16(center), _to_float16(half), lost


def fit_levels(
    vectors: Tensor,
    outliers: Tensor,
    center: Tensor,
    half: Tensor,
    bits: int,
    q_norm: bool,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `steadykv.ops.nonuniform`."""
    u = vectors.new_empty(*vectors.shape[:2], vectors.shape[2] - outliers.shape[2])
    sums = torch.empty_like(u)
    for rows, at, c, h, inliers, running in _blocks(vectors, outliers, center, half, u, sums):
        ordered = _order(rows).scatter_(1, at, (1 << 31) - 1).sort(1).values
        inliers[:] = _normal(_value(ordered[:, : u.shape[2]]), c[:, None], h[:, None])
        running[:] = _running_sum(inliers)
    if weight is not None:
        largest = weight.amax(1, keepdim=True)
        weight = (weight / torch.where(largest > 0, largest, 1))[..., None]
    levels = _quantiles(u, 2**bits)
    for _ in range(ITERATIONS):
        members, total = _members(u, sums, levels, weight)
        mean = total / torch.where(members > 0, members, 1)
        levels = torch.where(members > 0, mean, levels).float()
    return levels, _to_float16(_q_normed(u, sums, levels) if q_norm else levels)


def nonuniform_codes(
    x: Tensor,
    axis: str,
    outliers: Tensor,
    center: Tensor,
    half: Tensor,
    levels: Tensor,
    bits: int,
) -> Tensor:
    """See `steadykv.ops.nonuniform`."""
    batch, heads, tokens, width = x.shape
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    bounds = _bounds(levels)[:, None, None, None]
    for at in row_blocks(tokens, 12 * batch * heads * width, x.device):
        u = _normal(x[:, :, at], *(_spread(t, axis, x.shape, at) for t in (center, half)))
        for bound in bounds.unbind(-1):  # ties go to the lower level
            codes[:, :, at] += u > bound
    codes.view(-1).index_fill_(0, _places(outliers, axis, x.shape), 0)
    return pack(codes, bits)


def nonuniform_dequantize(
    tensors: Mapping[str, Tensor], axis: str, bits: int, head_dim: int, start: int, end: int
) -> Tensor:
    """See `steadykv.ops.nonuniform`."""
    codes = unpack(tensors["codes"][:, :, start:end], bits, head_dim, torch.int32)
    shape, rows = codes.shape, slice(start, end)
    levels = tensors["levels"].float()
    codes += levels.shape[1] * torch.arange(shape[0], dtype=torch.int32, device=codes.device).view(
        -1, 1, 1, 1
    )
    # One place more than there are numbers: outliers of other tokens go there.
    flat = torch.empty(codes.numel() + 1, dtype=torch.float32, device=codes.device)
    torch.index_select(levels.view(-1), 0, codes.reshape(-1), out=flat[:-1])
    value = flat[:-1].view(shape)
    value *= _spread(tensors["half"], axis, shape, rows).float()
    value += _spread(tensors["center"], axis, shape, rows).float()
    index, exact = tensors["outlier_index"], tensors["outlier_values"]
    if axis == "tokens":
        index, exact = index.to(torch.int64).flatten(1, 2) - start, exact.flatten(1, 2)
    else:
        index, exact = index[:, rows].to(torch.int64), exact[:, rows]
    places = _places(index, axis, shape)
    flat.scatter_(0, places, exact.float().reshape(-1))
    return value


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of tensors [N, R, ...], the first of which is [N, R, L], in bounded blocks."""
    flat = [t.flatten(0, 1) for t in tensors]
    rows, length = flat[0].shape
    for at in row_blocks(rows, _ROW_BYTES * max(1, length), flat[0].device):
        yield tuple(t[at] for t in flat)


def _order(x: Tensor) -> Tensor:
    """int32 that sort like the FP32 numbers; -0 equals 0."""
    bits = (x + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ ((1 << 31) - 1), bits)


def _value(order: Tensor) -> Tensor:
    """Inverse of `_order`."""
    return torch.where(order < 0, order ^ ((1 << 31) - 1), order).view(torch.float32)


def _first_largest(order: Tensor, count: int) -> Tensor:
    """Places of the `count` largest of each row, largest first, the lowest place on ties."""
    last = order.shape[1] - 1
    place = torch.arange(last, -1, -1, device=order.device)
    key = (order.to(torch.int64) << 32).bitwise_or_(place)  # every key is distinct
    return last - (key.topk(count).values & ((1 << 32) - 1))


def _normal(x: Tensor, center: Tensor, half: Tensor) -> Tensor:
    """u = (x - center) / half, 0 where half is 0."""
    half = half.float()
    return ((x - center.float()) / torch.where(half == 0, torch.inf, half)).clamp_(
        -LARGEST, LARGEST
    )


def _running_sum(x: Tensor) -> Tensor:
    """Inclusive sums along each row, by doubling: one order on every device."""
    step = 1
    while step < x.shape[1]:
        x = torch.cat((x[:, :step], x[:, step:] + x[:, :-step]), 1)
        step *= 2
    return x


def _bounds(levels: Tensor) -> Tensor:
    """Where a level ends: half way to the next."""
    return (levels[:, 1:] + levels[:, :-1]) / 2


def _up_to(u: Tensor, bounds: Tensor) -> Tensor:
    """How many of each row of u [N, R, M] are at most each of bounds [N, K]: int64 [N, R, K]."""
    wanted = bounds[:, None].expand(-1, u.shape[1], -1).contiguous()
    return torch.searchsorted(u, wanted, right=True)


def _members(
    u: Tensor, sums: Tensor, levels: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Number and sum of the members of each level in all rows, weighted: FP64 [N, K]."""
    bounds = pad(_bounds(levels), (0, 1), value=2 * LARGEST)
    ends = _up_to(u, bounds)
    below = sums.gather(-1, (ends - 1).clamp_(min=0)).double().masked_fill_(ends == 0, 0)
    numbers, totals = (
        _over_rows(t if weight is None else t * weight) for t in (ends.double(), below)
    )
    return pad(numbers, (1, 0)).diff(), pad(totals, (1, 0)).diff()


def _over_rows(x: Tensor) -> Tensor:
    """Sum over R of FP64 [N, R, K], in multiples of 2^-28: integers add up in any order."""
    return (x * 2.0**28).round_().to(torch.int64).sum(1).double() / 2.0**28


def _quantiles(u: Tensor, levels: int) -> Tensor:
    """Quantiles (2i + 1) / 2K of all rows together, linearly interpolated: FP32 [N, K]."""
    last = u.shape[1] * u.shape[2] - 1
    places = [divmod((2 * i + 1) * last, 2 * levels) for i in range(levels)]
    ranks = [rank for rank, _ in places] + [min(rank + 1, last) for rank, _ in places]
    wanted, share = (
        torch.tensor(numbers, device="cpu").to(u.device, non_blocking=True)
        for numbers in (ranks, [rest / (2 * levels) for _, rest in places])
    )
    low, high = (
        _order(u.new_full((u.shape[0], len(ranks)), end)).to(torch.int64)
        for end in (-LARGEST, LARGEST)
    )
    for _ in range(32):  # bisection: the least number that more than `wanted` numbers are at most
        middle = (low + high) >> 1
        is_enough = _up_to(u, _value(middle.to(torch.int32))).sum(1) > wanted
        low, high = torch.where(is_enough, low, middle + 1), torch.where(is_enough, middle, high)
    below, above = _value(low.to(torch.int32)).double().chunk(2, 1)
    return (below + (above - below) * share).float()


def _q_normed(u: Tensor, sums: Tensor, levels: Tensor) -> Tensor:
    """Levels moved so that mean and deviation of the levels taken are those of u."""
    count = u.shape[1] * u.shape[2]
    members, wide = _members(u, sums, levels)[0], levels.double()
    mean = _over_rows(sums[..., -1:].double()) / count
    square = u.new_empty(u.shape[:2], dtype=torch.float64)
    for rows, middle, out in _blocks(u, mean.repeat(1, u.shape[1]), square):
        out[:] = tree_sum((rows - middle[:, None]).square_())
    taken = tree_sum(members * wide)[:, None] / count
    spread = tree_sum(members * (wide - taken).square())[:, None] / count
    scale = (_over_rows(square[..., None]) / count / torch.where(spread > 0, spread, 1)).sqrt()
    return torch.where(spread > 0, (wide - taken) * scale + mean, wide).float()


def _spread(metadata: Tensor, axis: str, shape: torch.Size, at: slice) -> Tensor:
    """Numbers of channels [N, H·D] or [N, H, D], or of tokens [N, S], beside [N, H, S, D]."""
    if axis == "tokens":
        return metadata.view(shape[0], shape[1], 1, shape[3])
    return metadata[:, None, at, None]


def _places(index: Tensor, axis: str, shape: torch.Size) -> Tensor:
    """Flat places in [N, H, S, D] of outliers [N, R, n]; one past the end for other tokens."""
    batch, heads, tokens, width = shape
    row = torch.arange(index.shape[1], device=index.device)[:, None]
    token, head, channel = row, index // width, index % width
    if axis == "tokens":
        token, head, channel = index, row // width, row % width
    item = heads * torch.arange(batch, device=index.device)[:, None, None] + head
    place = (item * tokens + token) * width + channel
    return torch.where((token >= 0) & (token < tokens), place, shape.numel()).view(-1)


def _to_float16(x: Tensor) -> Tensor:
    return x.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)
