"""VBench's temporal flickering: how little consecutive frames differ. It does not know motion."""

from __future__ import annotations

import torch

from steadykv.errors import ShapeError
from steadykv.evaluation.metrics.frames import PEAK, Frames, frame_batch


def vbench_flickering(video: Frames) -> torch.Tensor:
    """(255 - mean over steps of mean |v_t - v_(t-1)|) / 255, FP64 [] or [B]; static videos give 1.

    ``video`` is uint8 [T, H, W, 3] or [B, T, H, W, 3]; no unit, higher is steadier. The formula of
    the dimension "temporal flickering" of VBench (Huang et al. 2024; `mae_seq` and
    `cal_score` of version 0.1.5), which asks for videos of static scenes: what a camera or an
    object moves counts as flicker. The package decodes files to BGR; the order of channels does not
    matter to the mean. Allocates 4 bytes per pixel value of one frame of every video. Raises
    NonFiniteError, ShapeError (no uint8 frames; one frame only).
    """
    frames = frame_batch(video, "video")
    count = frames.shape[1]
    if count < 2:
        raise ShapeError(f"video has {count} frame; temporal flickering expects at least 2")
    total = torch.zeros(len(frames), dtype=torch.int64, device=frames.device)
    for index in range(1, count):
        step = frames[:, index].short() - frames[:, index - 1].short()
        total += step.abs_().flatten(1).sum(dim=1)
    mean = total.double() / ((count - 1) * frames[0, 0].numel())
    score = (PEAK - mean) / PEAK
    return score if video.ndim == 5 else score[0]
