"""The largest error that the docstrings of grids and codecs allow, from the dense groups."""

from __future__ import annotations

import torch
from torch import Tensor


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


def feedback_bound(
    x: Tensor, bits: int, size: int, base: Tensor, include_zero: bool = True
) -> Tensor:
    """The same for grid "affine_zero" where feedback moves numbers before they are rounded: they
    end somewhere on the grid, which reaches half a step beyond the group at most."""
    unit = base.float()[..., None, None] + 2**-17
    bounds = []
    for part in x.split(size, -1):
        span, beyond = _range(part, include_zero)
        bound = span * (1 + 1 / (2 * (2**bits - 1))) + 2**bits * unit + beyond
        bounds.append(bound.expand_as(part))
    return torch.cat(bounds, -1) * (1 + 1e-5)


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
