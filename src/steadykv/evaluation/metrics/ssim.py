"""Structural similarity (Wang, Bovik, Sheikh, Simoncelli 2004) of uint8 video, by frame."""

from __future__ import annotations

import torch

from steadykv.errors import ConfigError, ShapeError
from steadykv.evaluation.metrics.frames import PEAK, Frames, frame_pair

# Constants of the 2004 paper, section III-C.
WINDOW = 11
SIGMA = 1.5
C1 = (0.01 * PEAK) ** 2
C2 = (0.03 * PEAK) ** 2
# ITU-R BT.601 weights of R, G, B.
LUMA = (0.299, 0.587, 0.114)


def _gaussian() -> list[float]:
    offsets = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    weights = torch.exp(-offsets.square() / (2.0 * SIGMA**2))
    return (weights / weights.sum()).tolist()


def _blur(planes: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """Separable Gaussian without padding: [..., H, W] -> [..., H - 10, W - 10].

    Shifted additions over planes that fit a core's cache: on CPU 16 times faster than the same
    filter as single-channel convolutions (0.04 s against 0.67 s for 51 frames of 128 x 96).
    """
    for dim in (-1, -2):
        size = planes.shape[dim] - WINDOW + 1
        blurred = planes.narrow(dim, 0, size) * weights[0]
        for offset in range(1, WINDOW):
            blurred.add_(planes.narrow(dim, offset, size), alpha=weights[offset])
        planes = blurred
    return planes


def _ssim_of_planes(x: torch.Tensor, y: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """Mean SSIM [N] of planes [N, P, H, W], FP32 in 0 .. 255."""
    stacked = _blur(torch.stack((x, y, x * x, y * y, x * y)), weights)
    mean_x, mean_y, square_x, square_y, product = stacked.unbind(0)
    # x*x - mean*mean in FP32 loses 1e-2 of 65,025 at worst, small against C2 = 58.5.
    variance_x = square_x - mean_x * mean_x
    variance_y = square_y - mean_y * mean_y
    covariance = product - mean_x * mean_y
    structure = (2.0 * covariance + C2) / (variance_x + variance_y + C2)
    luminance = (2.0 * mean_x * mean_y + C1) / (mean_x * mean_x + mean_y * mean_y + C1)
    return (structure * luminance).flatten(1).mean(dim=1)


def ssim_by_frame(reference: Frames, video: Frames, channels: str = "rgb") -> torch.Tensor:
    """SSIM of each frame, FP64 [T] or [B, T]; identical frames give exactly 1.

    ``reference`` and ``video`` are uint8 [T, H, W, 3] or [B, T, H, W, 3]. Gaussian window 11 x 11
    with sigma 1.5, no padding, data range 255, FP32. ``channels``: "rgb" averages the three
    channels' values, "luma" compares BT.601 luma. Works frame by frame and allocates about 60 bytes
    per pixel value of one frame of every video. Raises ConfigError (unknown ``channels``) or
    ShapeError (sizes differ, or a side under 11 pixels).
    """
    if channels not in ("rgb", "luma"):
        raise ConfigError(f'channels is {channels!r}; expected "rgb" or "luma"')
    first, second, batched = frame_pair(reference, video)
    height, width = first.shape[2:4]
    if min(height, width) < WINDOW:
        raise ShapeError(
            f"frames are {height} x {width} pixels; SSIM expects at least {WINDOW} x {WINDOW}: "
            "use larger frames"
        )
    weights = _gaussian()
    luma = torch.tensor(LUMA, device=first.device)

    def planes(frame: torch.Tensor) -> torch.Tensor:
        values = frame.float()
        return (values @ luma)[:, None] if channels == "luma" else values.movedim(-1, 1)

    values = [
        _ssim_of_planes(
            planes(first[:, index]).contiguous(), planes(second[:, index]).contiguous(), weights
        )
        for index in range(first.shape[1])
    ]
    result = torch.stack(values, dim=1).double()
    return result if batched else result[0]
