"""Multi-scale structural similarity (Wang, Simoncelli, Bovik 2003) of uint8 video, by frame."""

from __future__ import annotations

import torch
from torch.nn import functional

from steadykv.evaluation.metrics.frames import Frames, check_sides, frame_pair
from steadykv.evaluation.metrics.ssim import (
    WINDOW,
    check_channels,
    compare_planes,
    gaussian_band,
    planes_of,
)
from steadykv.ops.precision import full_precision

# Exponents of the five scales, finest first: section 3.2 of the 2003 paper.
WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
SMALLEST = (WINDOW - 1) * 2 ** (len(WEIGHTS) - 1) + 1
"""Shortest side, 161, that still fills a window at the coarsest scale."""


def _halved(plane: torch.Tensor) -> torch.Tensor:
    """[H, W] -> [ceil(H / 2), ceil(W / 2)]: means of 2 x 2 pixels, an odd edge counted twice.

    As in the authors' code, which filters with mirrored edges and keeps every other pixel.
    """
    height, width = plane.shape
    image = plane[None, None]
    if height % 2 or width % 2:
        image = functional.pad(image, (0, width % 2, 0, height % 2), mode="replicate")
    return functional.avg_pool2d(image, 2)[0, 0]


def _ms_ssim_of_planes(x: torch.Tensor, y: torch.Tensor, band: torch.Tensor) -> torch.Tensor:
    """Equation 7 on FP32 planes [H, W]: FP64 []. A negative mean counts as 0 (no real power)."""
    result = torch.ones((), dtype=torch.float64, device=x.device)
    for scale, weight in enumerate(WEIGHTS):
        if scale:
            x, y = _halved(x), _halved(y)
        contrast, similarity = compare_planes(x, y, band)
        term = similarity if scale == len(WEIGHTS) - 1 else contrast
        result = result * term.clamp_min(0.0) ** weight
    return result


def ms_ssim_by_frame(reference: Frames, video: Frames, channels: str = "luma") -> torch.Tensor:
    """MS-SSIM of each frame, FP64 [T] or [B, T], 0 .. 1; identical frames give exactly 1.

    ``reference`` and ``video`` are uint8 [T, H, W, 3] or [B, T, H, W, 3]. Five scales; window and
    constants as :func:`ssim_by_frame`, at every scale; contrast and structure at all of them,
    luminance at the coarsest alone. ``channels``: "luma" compares BT.601 luma, "rgb" averages the
    three channels' values. Works frame by frame and allocates about 60 bytes per pixel of one
    frame. Raises ConfigError (unknown ``channels``), ShapeError (sizes differ, or a side under 161
    pixels) or NonFiniteError.
    """
    check_channels(channels)
    first, second, batched = frame_pair(reference, video)
    instead = f" for its {len(WEIGHTS)} scales: use larger frames, or SSIM"
    check_sides(first, SMALLEST, "MS-SSIM", instead)
    band = gaussian_band(first.device)

    def of_frame(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        pairs = zip(planes_of(a, channels), planes_of(b, channels), strict=True)
        return torch.stack([_ms_ssim_of_planes(x, y, band) for x, y in pairs]).mean()

    with full_precision(first.device):
        values = [
            of_frame(a, b) for a, b in zip(first.flatten(0, 1), second.flatten(0, 1), strict=True)
        ]
    result = torch.stack(values).view(first.shape[:2])
    return result if batched else result[0]
