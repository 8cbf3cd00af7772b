"""Structural similarity (Wang, Bovik, Sheikh, Simoncelli 2004) of uint8 video, by frame."""

from __future__ import annotations

import torch

from steadykv.errors import ConfigError
from steadykv.evaluation.metrics.frames import PEAK, Frames, check_sides, frame_pair
from steadykv.ops.precision import full_precision

# Constants of the 2004 paper, section III-C.
WINDOW = 11
SIGMA = 1.5
C1 = (0.01 * PEAK) ** 2
C2 = (0.03 * PEAK) ** 2
# ITU-R BT.601 weights of R, G, B.
LUMA = (0.299, 0.587, 0.114)
BLOCK = 8
"""Rows filtered by one matrix product: 16 and 32 take 10 and 65 % longer at 1280 x 720."""


def gaussian_band(device: torch.device) -> torch.Tensor:
    """The window's weights on BLOCK shifted diagonals, FP32 [BLOCK, BLOCK + WINDOW - 1].

    Times BLOCK + WINDOW - 1 rows of a plane it is BLOCK filtered rows.
    """
    offsets = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    weights = torch.exp(-offsets.square() / (2.0 * SIGMA**2))
    weights = (weights / weights.sum()).float()
    band = torch.zeros(BLOCK, BLOCK + WINDOW - 1)
    for row in range(BLOCK):
        band[row, row : row + WINDOW] = weights
    return band.to(device)


def _filter_rows(plane: torch.Tensor, band: torch.Tensor) -> torch.Tensor:
    """[H, W] -> [H - 10, W]: the window along the first dimension, without padding.

    Products with a narrow band are what a CPU does fastest: a plane of 1280 x 720 takes one core
    1.3 ms in both directions, shifted additions 2.5 ms, a single-channel convolution far more.
    """
    height, width = plane.shape
    blocks, rest = divmod(height - WINDOW + 1, BLOCK)
    filtered = torch.empty((height - WINDOW + 1, width), device=plane.device)
    if blocks:
        windows = plane.unfold(0, band.shape[1], BLOCK)[:blocks].mT
        target = filtered[: blocks * BLOCK].view(blocks, BLOCK, width)
        torch.bmm(band.expand(blocks, -1, -1), windows, out=target)
    if rest:
        tail = band[:rest, : rest + WINDOW - 1]
        torch.mm(tail, plane[blocks * BLOCK :], out=filtered[blocks * BLOCK :])
    return filtered


def _blur(plane: torch.Tensor, band: torch.Tensor) -> torch.Tensor:
    """Separable Gaussian without padding: [H, W] -> its transpose, [W - 10, H - 10]."""
    return _filter_rows(_filter_rows(plane, band).mT, band)


def compare_planes(
    x: torch.Tensor, y: torch.Tensor, band: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Means over one plane of contrast times structure, and of SSIM (equation 13): FP64 [] twice.

    ``x`` and ``y`` are FP32 [H, W] in 0 .. 255, contiguous, and ``band`` is gaussian_band's. Equal
    planes give exactly 1 twice: every term below is then the same number on both sides. Allocates
    about 40 bytes per pixel.
    """
    mean_x, mean_y = _blur(x, band), _blur(y, band)
    squares, product = _blur((x * x).add_(y * y), band), _blur(x * y, band)
    square_means = (mean_x * mean_x).add_(mean_y * mean_y)
    mean_product = mean_x.mul_(mean_y)
    # E[x*x] - E[x]**2 in FP32 loses 1e-2 of 65,025 at worst, small against C2 = 58.5.
    variances = squares.sub_(square_means).add_(C2)
    structure = product.sub_(mean_product).mul_(2.0).add_(C2).div_(variances)
    luminance = mean_product.mul_(2.0).add_(C1).div_(square_means.add_(C1))
    # Rows in FP32, then FP64: a plane of ones stays exactly 1 at any size.
    contrast = structure.mean(dim=1).double().mean()
    return contrast, structure.mul_(luminance).mean(dim=1).double().mean()


def planes_of(frame: torch.Tensor, channels: str) -> list[torch.Tensor]:
    """A frame uint8 [H, W, 3] as FP32 planes [H, W], contiguous: R, G, B or BT.601 luma alone."""
    values = frame.contiguous().float()
    if channels == "luma":
        return [values @ torch.tensor(LUMA, device=frame.device)]
    return [plane.contiguous() for plane in values.unbind(-1)]


def check_channels(channels: str) -> None:
    """Raises ConfigError for anything but "rgb" and "luma"."""
    if channels not in ("rgb", "luma"):
        raise ConfigError(f'channels is {channels!r}; expected "rgb" or "luma"')


def ssim_by_frame(reference: Frames, video: Frames, channels: str = "rgb") -> torch.Tensor:
    """SSIM of each frame, FP64 [T] or [B, T]; identical frames give exactly 1.

    ``reference`` and ``video`` are uint8 [T, H, W, 3] or [B, T, H, W, 3]. Gaussian window 11 x 11
    with sigma 1.5, no padding, data range 255, FP32. ``channels``: "rgb" averages the three
    channels' values, "luma" compares BT.601 luma. Works frame by frame and allocates about 80 bytes
    per pixel of one frame (luma: 50), whatever the length. Raises ConfigError (unknown
    ``channels``), ShapeError (sizes differ, or a side under 11 pixels) or NonFiniteError.
    """
    check_channels(channels)
    first, second, batched = frame_pair(reference, video)
    check_sides(first, WINDOW, "SSIM")
    band = gaussian_band(first.device)

    def of_frame(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        pairs = zip(planes_of(a, channels), planes_of(b, channels), strict=True)
        return torch.stack([compare_planes(x, y, band)[1] for x, y in pairs]).mean()

    with full_precision(first.device):
        values = [
            of_frame(a, b) for a, b in zip(first.flatten(0, 1), second.flatten(0, 1), strict=True)
        ]
    result = torch.stack(values).view(first.shape[:2])
    return result if batched else result[0]
