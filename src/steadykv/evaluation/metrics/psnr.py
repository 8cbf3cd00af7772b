"""Peak signal-to-noise ratio of uint8 video, by frame and by window of frames."""

from __future__ import annotations

import torch

from steadykv.errors import NonFiniteError
from steadykv.evaluation.metrics.frames import PEAK, Frames, check_window, frame_pair

BLOCK = 256
"""Squares of grey levels that FP32 adds without rounding: 256 * 255**2 < 2**24."""


def exact_sum(values: torch.Tensor) -> torch.Tensor:
    """Sums of rows of whole numbers: FP32 [B, N], each 0 .. 65,025, to FP64 [B], without rounding.

    Blocks of 256 are added in FP32 and their sums in FP64: on a CPU six times faster than integers.
    """
    whole = values.shape[1] // BLOCK * BLOCK
    blocks = values[:, :whole].unflatten(1, (-1, BLOCK)).sum(dim=2)
    return blocks.double().sum(dim=1) + values[:, whole:].sum(dim=1).double()


def frame_mse(reference: Frames, video: Frames) -> torch.Tensor:
    """Mean squared error of each frame, in squared grey levels (0 .. 65,025).

    ``reference`` and ``video`` are uint8 [T, H, W, 3] or [B, T, H, W, 3]; the result is FP64 [T] or
    [B, T] on the reference's device. Sums are whole numbers, so the value is exact. Allocates 8
    bytes per pixel value of one frame of every video. Raises ShapeError or NonFiniteError.
    """
    first, second, batched = frame_pair(reference, video)
    errors = []
    for index in range(first.shape[1]):
        difference = first[:, index].float().sub_(second[:, index])
        errors.append(exact_sum(difference.square_().flatten(1)))
    values_per_frame = first[0, 0].numel()
    mse = torch.stack(errors, dim=1) / values_per_frame
    return mse if batched else mse[0]


def psnr_from_mse(mse: torch.Tensor) -> torch.Tensor:
    """10 log10(255^2 / mse), FP64, same shape; inf where the mean squared error is 0.

    Raises NonFiniteError when ``mse`` holds NaN (a synchronisation; metrics run after a rollout).
    """
    if bool(torch.isnan(mse).any()):
        raise NonFiniteError(
            f"mse holds {int(torch.isnan(mse).sum())} NaN of {mse.numel()} values; "
            "expected finite errors: compute them with frame_mse"
        )
    return 10.0 * torch.log10(PEAK**2 / mse.double())


def psnr_by_frame(reference: Frames, video: Frames) -> torch.Tensor:
    """PSNR of each frame in dB, FP64 [T] or [B, T]; identical frames give inf. See frame_mse."""
    return psnr_from_mse(frame_mse(reference, video))


def psnr(reference: Frames, video: Frames, start: int = 0, end: int | None = None) -> torch.Tensor:
    """PSNR in dB of frames ``start`` .. ``end`` - 1 from their common mean squared error.

    One number per video, FP64 [] or [B]; identical videos give inf. A window's PSNR is taken from
    the mean of the frames' errors, never from the mean of their decibels, so one lost frame counts.
    Raises ConfigError for an empty window, else as :func:`frame_mse`.
    """
    mse = frame_mse(reference, video)
    start, end = check_window(start, end, mse.shape[-1])
    return psnr_from_mse(mse[..., start:end].mean(dim=-1))
