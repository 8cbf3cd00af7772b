"""The largest error that the docstrings of grids and codecs allow, from the dense groups."""

from __future__ import annotations

import torch
from torch import Tensor

from steadykv import ops
from steadykv.codecs import Payload, codec_for

GRIDS = {
    ("rtn", None): "affine_min",
    ("kivi", None): "affine_min",
    ("quarot", None): "affine_min",
    ("qvg", "fp8"): "symmetric",
    ("qvg", "int8"): "symmetric_int8",
    ("four levels", "int8"): "affine_zero",
    ("four levels", "fp8"): "affine_min_fp8",
}


def token_bound(x: Tensor, payload: Payload) -> Tensor:
    """How large the docstring of the codec lets the error of each token be, while nothing
    saturates: FP64 norms [B, H, S] for FP32 x [B, H, S, D]."""
    config = payload.config
    if config.method == "bf16":
        bound = dense_bound(x)
    elif config.method == "kvquant":
        bound = nonuniform_bound(x, payload)
    else:
        bound = grouped_bound(x, payload) + x.abs() * 2**-20
    allowed = bound.double().norm(dim=-1)
    if "basis" in payload.tensors:  # PSAC
        alpha = payload.tensors["coef_scales"].double()
        if "row_index" in payload.tensors:  # sparse: the largest of any row
            alpha = alpha.max()
        allowed += payload.tensors["basis"].shape[-1] ** 0.5 * (0.57 * alpha + 2**-17)
    return allowed


def dense_bound(x: Tensor) -> Tensor:
    """Of BF16."""
    return x.abs() * 2**-8 + 2.0**-134


def nonuniform_bound(x: Tensor, payload: Payload) -> Tensor:
    """Of kvquant: dense first tokens, inliers and outliers."""
    first = payload.tensors["dense"].shape[2] if "dense" in payload.tensors else 0
    bound, rest = dense_bound(x), x[:, :, first:]
    if rest.numel():
        half, center = (payload.tensors[name].float() for name in ("half", "center"))
        shape = (*x.shape[:2], 1, -1) if payload.config.axis == "tokens" else (len(x), 1, -1, 1)
        largest = 1 + payload.tensors["levels"].float().abs().amax()
        inlier = half * largest + (2**-11 * (half + center.abs()) + 2**-25) * (1 + largest)
        outlier = 2**-11 * rest.abs() + 2**-25
        bound[:, :, first:] = torch.maximum(inlier.view(shape), outlier) * (1 + 2**-20)
    return bound


def grouped_bound(x: Tensor, payload: Payload) -> Tensor:
    """Of groups, in the frame in which they are rounded."""
    config, tensors = payload.config, payload.tensors
    left, peak = x, x.new_zeros(())
    if payload.centroids is not None:
        for stage in range(config.stages):
            table, ids = payload.centroids[:, :, stage], tensors["ids"][:, :, stage].long()
            means = ops.gather_centroids(table.flatten(0, 1), ids.flatten(0, 1))
            left = left - means.view(x.shape)
    if rotation := codec_for(config).rotation(x.shape[-1]):
        left = ops.hadamard(x.flatten(0, 1), rotation).view(x.shape)
        peak = (1 - config.clip_ratio) * left.abs().amax(-1, keepdim=True)
    method = config.method if (config.method, config.metadata) in GRIDS else "four levels"
    grid = GRIDS[method, config.metadata] if config.grid != "symmetric" else "symmetric"
    sizes, base = (config.bits, config.group_size), tensors.get("scale_base")
    if config.axis == "tokens":
        return error_bound(left.mT, grid, *sizes).mT
    return error_bound(left, grid, *sizes, base, config.include_zero) + peak


def error_bound(
    x: Tensor,
    grid: str,
    bits: int,
    size: int,
    base: Tensor | None = None,
    include_zero: bool = True,
) -> Tensor:
    """FP32 [..., S, D] for groups of `size` channels of x; base: `scale_base` [...] if any.

    Half a step, plus what the rounding of scale, minimum and zero point can move the ends; where
    the range need not include zero, also what is cut off.
    """
    # Where FP16 rounds the base to zero, up to 255 of its smallest halves are lost.
    unit = torch.zeros(()) if base is None else base.float()[..., None, None] + 2**-17
    bounds = [_group_bound(part, grid, bits, unit, include_zero) for part in x.split(size, -1)]
    parts = zip(bounds, x.split(size, -1), strict=True)
    return torch.cat([bound.expand_as(part) for bound, part in parts], -1) * (1 + 1e-5)


def _range(part: Tensor, include_zero: bool) -> tuple[Tensor, Tensor]:
    """What the grid "affine_zero" spans, and how far from zero a group lies beyond it."""
    low, high = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
    if include_zero:
        return high.clamp(min=0) - low.clamp(max=0), torch.zeros_like(low)
    return high - low, torch.maximum(low, -high).clamp(min=0)


def _group_bound(part: Tensor, grid: str, bits: int, base: Tensor, include_zero: bool) -> Tensor:
    low, high = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
    peak = part.abs().amax(-1, keepdim=True)
    top, half_top = 2**bits - 1, 2 ** (bits - 1) - 1
    if grid == "symmetric":
        step = (peak / half_top).clamp(min=2**-9)
        off = e4m3_error(step)
        return (step + off) / 2 + half_top * off
    if grid == "symmetric_int8":  # half a unit of base, or a whole one where that is the least
        return (peak / half_top + base) / 2 + half_top * base
    if grid == "affine_min":
        step = (high - low) / top
        return step / 2 + (peak + top * step) * 2**-10 + 2.0 ** (bits - 25)
    if grid == "affine_min_fp8":
        step = ((high - low) / top).clamp(min=2**-9)
        off = e4m3_error(step)
        return (step + off) / 2 + top * off + e4m3_error(low.abs())
    # affine_zero: the scale is off by half a unit of base, and the zero point by half a step
    span, beyond = _range(part, include_zero)
    return span / top + (top + 1) * base + beyond


def e4m3_error(value: Tensor) -> Tensor:
    """Rounding to E4M3: 2^-4 of the value, at least half of the smallest number."""
    return torch.maximum(value * 2**-4, torch.tensor(2**-10))
