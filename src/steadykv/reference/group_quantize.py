"""Definition: the residual grids. Codes use the stored scale; halves round to even."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from .blocks import FP16_MAX
from .pack import pack, unpack, word_of

__all__ = ["group_dequantize", "group_quantize"]

E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9  # the smallest E4M3 number: a lower floor would round to a scale of zero


def group_quantize(
    x: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    axis: str = "channels",
    packing: str = "bits",
    clip_ratio: float = 1.0,
) -> tuple[dict[str, Tensor], Tensor]:
    """See `steadykv.ops.group_quantize`."""
    if grid in ("symmetric", "symmetric_int8"):
        return _symmetric(x, grid, bits, group_size, packing)
    if grid in ("affine_min", "affine_min_fp8"):
        return _affine_min(x, grid, bits, group_size, -2 if axis == "tokens" else -1, clip_ratio)
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
    packing: str = "bits",
) -> Tensor:
    """See `steadykv.ops.group_quantize`."""
    value = unpack(tensors["codes"][:, start:end], bits, head_dim, torch.float32, packing)
    if axis == "tokens":
        run = torch.arange(start, end, device=value.device) // group_size
        value *= tensors["scale"].index_select(1, run)
        return value.add_(tensors["minimum"].index_select(1, run))
    if "scale_codes" in tensors:
        scale = _affine_scale(tensors["scale_base"], tensors["scale_codes"][:, start:end])
    else:
        scale = tensors["scale"][:, start:end].float()
    minimum = zero = None
    if grid in ("affine_min", "affine_min_fp8"):
        minimum = tensors["minimum"][:, start:end].float()
    elif grid == "affine_zero":
        zero = _zeros_of(tensors["zeros"], bits, scale.shape[-1], start, end)
    else:
        value -= 2 ** (bits - 1) - 1
    for part, at in _groups(value, group_size, -1):
        if zero is not None:
            part -= zero[..., at, None]
        part *= scale[..., at, None]
        if minimum is not None:
            part += minimum[..., at, None]
    return value


def _symmetric(
    x: Tensor, grid: str, bits: int, group_size: int, packing: str
) -> tuple[dict[str, Tensor], Tensor]:
    top = 2 ** (bits - 1) - 1
    wanted = _reduce(x, group_size, -1, lambda part: part.abs().amax(-1)) / top
    metadata, scale, saturated = (
        _int8_scales(wanted) if grid == "symmetric_int8" else _e4m3_scales(wanted)
    )
    divisor = _divisor(scale)
    codes = torch.empty_like(x, dtype=torch.uint8)
    for (part, at), (code, _) in zip(
        _groups(x, group_size, -1), _groups(codes, group_size, -1), strict=True
    ):
        code.copy_((part / divisor[..., at, None]).round_().clamp_(-top, top).add_(top))
    return {"codes": pack(codes, bits, packing), **metadata}, saturated


def _affine_min(
    x: Tensor, grid: str, bits: int, group_size: int, dim: int, clip_ratio: float
) -> tuple[dict[str, Tensor], Tensor]:
    top = 2**bits - 1
    low = _reduce(x, group_size, dim, lambda part: part.amin(dim)) * clip_ratio
    high = _reduce(x, group_size, dim, lambda part: part.amax(dim)) * clip_ratio
    if grid == "affine_min_fp8":
        metadata, scale, lost_scales = _e4m3_scales((high - low) / top)
        lost_minima = (low.abs() > E4M3_MAX).sum((-2, -1))
        minimum = low.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    else:
        minimum, lost_minima = _to_float16(low)
        stored, lost_scales = _to_float16((high - low) / top)
        metadata, scale = {"scale": stored}, stored.float()
    offset, divisor = minimum.float(), _divisor(scale)
    codes = torch.empty_like(x, dtype=torch.uint8)
    for (part, at), (code, _) in zip(
        _groups(x, group_size, dim), _groups(codes, group_size, dim), strict=True
    ):
        m, s = (
            t.narrow(dim, at.start, at.stop - at.start).unsqueeze(dim) for t in (offset, divisor)
        )
        code.copy_((part - m).div_(s).round_().clamp_(0, top))
    tensors = {"codes": pack(codes, bits), **metadata, "minimum": minimum}
    return tensors, lost_minima + lost_scales


def _affine_zero(x: Tensor, bits: int, group_size: int) -> tuple[dict[str, Tensor], Tensor]:
    top = 2**bits - 1
    low = _reduce(x, group_size, -1, lambda part: part.amin(-1)).clamp_(max=0)
    high = _reduce(x, group_size, -1, lambda part: part.amax(-1)).clamp_(min=0)
    metadata, scale, saturated = _int8_scales((high - low) / top)
    divisor = _divisor(scale)
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
        **metadata,
        "zeros": pack(zero.to(torch.uint8).flatten(1), bits),
    }
    return tensors, saturated


def _e4m3_scales(wanted: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What is stored of the scales [N, S, G], their FP32 values, and how many saturated."""
    scale = wanted.clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    return {"scale": scale}, scale.float(), (wanted > E4M3_MAX).sum((-2, -1))


def _int8_scales(wanted: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The same as steps of one FP16 base a head: the largest scale is 255 steps."""
    base, saturated = _to_float16(wanted.amax((-2, -1), keepdim=True) / 255)
    steps = (wanted / _divisor(base.float())).round_().clamp_(1, 255)
    metadata = {"scale_codes": steps.to(torch.uint8), "scale_base": base[:, 0, 0]}
    return metadata, _affine_scale(metadata["scale_base"], metadata["scale_codes"]), saturated


def _affine_scale(base: Tensor, scale_codes: Tensor) -> Tensor:
    """s = base·a, exact in FP32 (11 and 8 significant bits)."""
    return base.float()[:, None, None] * scale_codes


def _zeros_of(packed: Tensor, bits: int, groups: int, start: int, end: int) -> Tensor:
    """Zero points of the tokens start..end, FP32 [N, end-start, G], packed across tokens."""
    _, per_word, nbytes = word_of(bits)
    first = start * groups // per_word
    last = -(-end * groups // per_word)
    offset = start * groups - first * per_word
    count = (end - start) * groups
    codes = unpack(
        packed[:, first * nbytes : last * nbytes], bits, offset + count, dtype=torch.float32
    )
    return codes[:, offset:].unflatten(1, (end - start, groups))


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
