"""Definition: the three residual grids. Codes use the stored scale; halves round to even."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from .blocks import FP16_MAX
from .pack import pack, unpack

__all__ = ["group_dequantize", "group_quantize"]

E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9  # the smallest E4M3 number: a lower floor would round to a scale of zero


def group_quantize(
    x: Tensor, grid: str, bits: int, group_size: int, axis: str = "channels"
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.group_quantize`."""
    if grid == "symmetric":
        return _symmetric(x, bits, group_size)
    if grid == "affine_min":
        return _affine_min(x, bits, group_size, -2 if axis == "tokens" else -1)
    return _affine_zero(x, bits, group_size)


def group_dequantize(
    tensors: Mapping[str, Tensor],
    grid: str,
    bits: int,
    group_size: int,
    head_dim: int,
    start: int,
    end: int,
    axis: str = "channels",
) -> Tensor:
    """See `steadykv.ops.group_quantize`."""
    value = unpack(tensors["codes"][:, start:end], bits, head_dim, torch.float32)
    if grid == "affine_min" and axis == "tokens":
        run = torch.arange(start, end, device=value.device) // group_size
        value *= tensors["scale"].index_select(1, run)
        return value.add_(tensors["minimum"].index_select(1, run))
    if grid == "affine_zero":
        groups = tensors["scale_codes"].shape[-1]
        zero = _zeros_of(tensors["zeros"], bits, groups, start, end)
        scale = _affine_scale(tensors["scale_base"], tensors["scale_codes"][:, start:end])
        for part, at in _groups(value, group_size, -1):
            part -= zero[..., at, None]
            part *= scale[..., at, None]
        return value
    scale = tensors["scale"][:, start:end].float()
    if grid == "symmetric":
        value -= 2 ** (bits - 1) - 1
    for part, at in _groups(value, group_size, -1):
        part *= scale[..., at, None]
        if grid == "affine_min":
            part += tensors["minimum"][:, start:end, at, None]
    return value


def _symmetric(x: Tensor, bits: int, group_size: int) -> tuple[dict[str, Tensor], Tensor]:
    top = 2 ** (bits - 1) - 1
    wanted = _reduce(x, group_size, -1, lambda part: part.abs().amax(-1)) / top
    scale = wanted.clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = torch.empty_like(x, dtype=torch.uint8)
    for (part, at), (code, _) in zip(
        _groups(x, group_size, -1), _groups(codes, group_size, -1), strict=True
    ):
        steps = (part / scale.float()[..., at, None]).round_().clamp_(-top, top)
        code.copy_(steps.add_(top))
    return {"codes": pack(codes, bits), "scale": scale}, (wanted > E4M3_MAX).sum((-2, -1))


def _affine_min(
    x: Tensor, bits: int, group_size: int, dim: int
) -> tuple[dict[str, Tensor], Tensor]:
    top = 2**bits - 1
    low = _reduce(x, group_size, dim, lambda part: part.amin(dim))
    high = _reduce(x, group_size, dim, lambda part: part.amax(dim))
    minimum, lost_minima = _to_float16(low)
    scale, lost_scales = _to_float16((high - low) / top)
    divisor = _divisor(scale.float())
    codes = torch.empty_like(x, dtype=torch.uint8)
    for (part, at), (code, _) in zip(
        _groups(x, group_size, dim), _groups(codes, group_size, dim), strict=True
    ):
        m, s = (
            t.narrow(dim, at.start, at.stop - at.start).unsqueeze(dim) for t in (minimum, divisor)
        )
        code.copy_(((part - m.float()) / s).round_().clamp_(0, top))
    return {
        "codes": pack(codes, bits),
        "scale": scale,
        "minimum": minimum,
    }, lost_minima + lost_scales


def _affine_zero(x: Tensor, bits: int, group_size: int) -> tuple[dict[str, Tensor], Tensor]:
    top = 2**bits - 1
    low = _reduce(x, group_size, -1, lambda part: part.amin(-1)).clamp_(max=0)
    high = _reduce(x, group_size, -1, lambda part: part.amax(-1)).clamp_(min=0)
    wanted = (high - low) / top
    base, saturated = _to_float16(wanted.amax((-2, -1), keepdim=True) / 255)
    steps = (wanted / _divisor(base.float())).round_().clamp_(1, 255)
    scale_codes = steps.to(torch.uint8)
    divisor = _divisor(_affine_scale(base[:, 0, 0], scale_codes))
    zero = (-low / divisor).round_().clamp_(0, top)
    codes = torch.empty_like(x, dtype=torch.uint8)
    for (part, at), (code, _) in zip(
        _groups(x, group_size, -1), _groups(codes, group_size, -1), strict=True
    ):
        code.copy_(
            (part / divisor[..., at, None]).round_().add_(zero[..., at, None]).clamp_(0, top)
        )
    tensors = {
        "codes": pack(codes, bits),
        "scale_codes": scale_codes,
        "scale_base": base[:, 0, 0],
        "zeros": pack(zero.to(torch.uint8).flatten(1), bits),
    }
    return tensors, saturated


def _affine_scale(base: Tensor, scale_codes: Tensor) -> Tensor:
    """s = base·a, exact in FP32 (11 and 8 significant bits)."""
    return base.float()[:, None, None] * scale_codes


def _zeros_of(packed: Tensor, bits: int, groups: int, start: int, end: int) -> Tensor:
    """Zero points of the tokens start..end, FP32 [N, end-start, G], packed across tokens."""
    per_byte = 8 // bits
    first = start * groups // per_byte
    last = -(-end * groups // per_byte)
    codes = unpack(packed[:, first:last], bits, (last - first) * per_byte, torch.float32)
    offset = start * groups - first * per_byte
    return codes[:, offset : offset + (end - start) * groups].unflatten(1, (end - start, groups))


def _groups(x: Tensor, size: int, dim: int) -> Iterator[tuple[Tensor, slice]]:
    """Views of x with `dim` split into (group, member): the full groups, then the short one."""
    length = x.shape[dim]
    full = length // size
    if full:
        yield x.narrow(dim, 0, full * size).unflatten(dim, (full, size)), slice(0, full)
    if length % size:
        yield x.narrow(dim, full * size, length % size).unsqueeze(dim - 1), slice(full, full + 1)


def _reduce(x: Tensor, size: int, dim: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    parts = [function(part) for part, _ in _groups(x, size, dim)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _divisor(scale: Tensor) -> Tensor:
    """Infinity for a scale of zero: what is divided by it gets code 0, and nothing becomes NaN."""
    return torch.where(scale == 0, torch.inf, scale)


def _to_float16(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP16 with explicit saturation, and the number of saturated values, int64 [N]."""
    lost = (x.abs() > FP16_MAX).flatten(1).sum(1)
    return x.clamp(-FP16_MAX, FP16_MAX).to(torch.float16), lost
