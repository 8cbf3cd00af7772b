"""Flicker: does the video change from frame to frame as the reference does?"""

from __future__ import annotations

import torch

from steadykv.errors import ShapeError
from steadykv.evaluation.metrics.frames import PEAK, Frames, check_window, frame_pair
from steadykv.evaluation.metrics.psnr import exact_sum


def flicker_by_step(reference: Frames, video: Frames) -> torch.Tensor:
    """Mean |(v_t - v_(t-1)) - (r_t - r_(t-1))| for every step t, FP64 [T - 1] or [B, T - 1].

    ``reference`` and ``video`` are uint8 [T, H, W, 3] or [B, T, H, W, 3]. Unit: the full range of a
    pixel, 0 .. 1 (a difference of differences can reach 2). Frames in -1 .. 1 would give twice the
    number, grey levels 255 times. Element t - 1 belongs to the step that ends in frame t. Allocates
    10 bytes per pixel value of one frame of every video. Raises ShapeError (sizes differ, one
    frame only).
    """
    first, second, batched = frame_pair(reference, video)
    count = first.shape[1]
    if count < 2:
        raise ShapeError(f"the videos have {count} frame; flicker expects at least 2")
    steps = []
    error = second[:, 0].short() - first[:, 0].short()
    for index in range(1, count):
        # (v_t - v_(t-1)) - (r_t - r_(t-1)) is the change of the error v - r: exact in int16.
        following = second[:, index].short() - first[:, index].short()
        steps.append(exact_sum((following - error).abs_().flatten(1).float()))
        error = following
    values_per_frame = first[0, 0].numel()
    result = torch.stack(steps, dim=1) / (values_per_frame * PEAK)
    return result if batched else result[0]


def window_flicker(by_step: torch.Tensor, start: int = 0, end: int | None = None) -> torch.Tensor:
    """Mean over the steps that end in frames ``start`` .. ``end`` - 1 of flicker_by_step's result.

    ``by_step`` is [..., T - 1]; the step into the window's first frame belongs to the window.
    Raises ConfigError when the window is empty, leaves the video, or is frame 0 alone.
    """
    start, end = check_window(max(start, 1), end, by_step.shape[-1] + 1)
    return by_step[..., start - 1 : end - 1].mean(dim=-1)


def flicker_error(
    reference: Frames, video: Frames, start: int = 0, end: int | None = None
) -> torch.Tensor:
    """Mean flicker of frames ``start`` .. ``end`` - 1, FP64 [] or [B]; identical videos give 0.

    A constant offset between the two videos gives 0 as well: this metric sees only what moves.
    Unit and errors as :func:`flicker_by_step` and :func:`window_flicker`.
    """
    return window_flicker(flicker_by_step(reference, video), start, end)
