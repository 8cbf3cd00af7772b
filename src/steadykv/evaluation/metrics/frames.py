"""What every video metric accepts: raw frames, uint8, channels last."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch

from steadykv.errors import ConfigError, NonFiniteError, ShapeError

Frames: TypeAlias = torch.Tensor | np.ndarray

PEAK = 255.0
"""Largest value of a uint8 pixel: the data range of every metric."""


def frame_batch(frames: Frames, name: str) -> torch.Tensor:
    """Frames as a batch of videos [B, T, H, W, 3], uint8, on their own device; nothing is copied.

    ``frames`` is uint8 [T, H, W, 3] (one video) or [B, T, H, W, 3], torch or NumPy.
    Raises NonFiniteError (floating input holding NaN or inf) or ShapeError (any other dtype or
    layout), both naming the argument.
    """
    video = torch.as_tensor(frames)
    shape = tuple(video.shape)
    if video.dtype != torch.uint8:
        if video.is_floating_point() and not bool(torch.isfinite(video).all()):
            raise NonFiniteError(
                f"{name} holds NaN or inf (dtype {video.dtype}, shape {shape}); expected uint8 "
                "frames: repair the values, then round to 0..255 and cast"
            )
        raise ShapeError(
            f"{name} has dtype {video.dtype}; expected uint8 frames: "
            "scale to 0..255, round, clamp and cast first"
        )
    if video.dim() == 4:
        video = video[None]
    if video.dim() != 5 or video.shape[-1] != 3:
        raise ShapeError(
            f"{name} has shape {shape}; expected [T, H, W, 3] or [B, T, H, W, 3] (channels last)"
        )
    if video.numel() == 0:
        raise ShapeError(f"{name} has shape {shape}; expected at least one frame with pixels")
    return video


def frame_pair(reference: Frames, video: Frames) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Both videos as [B, T, H, W, 3] on the reference's device, and whether they came batched.

    Raises as :func:`frame_batch`, and ShapeError when the two differ in shape.
    """
    first = frame_batch(reference, "reference")
    second = frame_batch(video, "video")
    batched = reference.ndim == 5
    if first.shape != second.shape or (video.ndim == 5) != batched:
        raise ShapeError(
            f"video has shape {tuple(video.shape)}, reference {tuple(reference.shape)}; "
            "expected equal shapes: crop or resize one of them first"
        )
    return first, second.to(first.device), batched


def check_sides(
    video: torch.Tensor, smallest: int, metric: str, instead: str = ": use larger frames"
) -> None:
    """Raises ShapeError where a side of [B, T, H, W, 3] is under ``smallest`` pixels."""
    height, width = video.shape[2:4]
    if min(height, width) < smallest:
        raise ShapeError(
            f"frames are {height} x {width} pixels; {metric} expects at least {smallest} x "
            f"{smallest}{instead}"
        )


def check_window(start: int, end: int | None, frames: int) -> tuple[int, int]:
    """Frames ``start`` .. ``end`` - 1 of a video of ``frames`` frames (``None``: to its end).

    Raises ConfigError when the window is empty or leaves the video.
    """
    stop = frames if end is None else end
    if not 0 <= start < stop <= frames:
        raise ConfigError(
            f"window [{start}, {stop}) does not fit a video of {frames} frames; "
            f"expected 0 <= start < end <= {frames}"
        )
    return start, stop
