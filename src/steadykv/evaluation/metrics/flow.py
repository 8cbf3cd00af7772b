"""Flow-warped error: what remains between consecutive frames once their motion is taken out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from steadykv.errors import ShapeError
from steadykv.evaluation.metrics.frames import PEAK, Frames, check_sides, frame_batch, frame_pair
from steadykv.evaluation.metrics.optional import optional_module

SMALLEST = 16
"""Shortest side in which DIS finds its 8 x 8 patches."""
# Ruder, Dosovitskiy, Brox 2016 (arXiv 1604.08610), the weights of their temporal consistency loss:
# occluded where forward and backward flow do not cancel, or where the flow itself has an edge. The
# same four numbers stand in `detect_occlusion` of the code that Lai et al. released.
CHECK_RATIO, CHECK_SLACK = 0.01, 0.5
EDGE_RATIO, EDGE_SLACK = 0.01, 0.002


def warped_error_by_step(video: Frames, reference: Frames | None = None) -> torch.Tensor:
    """Mean of (v_(t-1) - warped v_t)² where v_(t-1) stays visible, FP64 [T - 1] or [B, T - 1].

    ``video`` is uint8 [T, H, W, 3] or [B, T, H, W, 3] with sides of at least 16. The flow and the
    mask come from ``reference`` (same shape) if there is one, as in the paper, else from the video
    itself: flicker then disturbs the flow as well. Unit: (full range of a pixel)². Element t - 1
    belongs to the step into frame t; NaN where the mask is empty, as after a cut.

    Source: the flow warping error of Lai et al. 2018 (arXiv 1808.00449), as their released
    `evaluate_WarpError.py` computes it, with OpenCV's DIS flow (Kroeger et al. 2016, its medium
    preset) in place of FlowNet2 and, as there, the occlusion mask of Ruder et al. 2016. An empty
    mask counts as 0 there and is NaN here. Numbers of another flow do not compare. Runs on the CPU;
    allocates about 150 bytes per pixel of one frame. Raises BackendUnavailable (OpenCV is not
    installed), NonFiniteError, ShapeError.
    """
    frames = frame_batch(video, "video")
    guide = frames if reference is None else frame_pair(reference, video)[0]
    count = frames.shape[1]
    if count < 2:
        raise ShapeError(f"video has {count} frame; the warped error expects at least 2")
    check_sides(frames, SMALLEST, "optical flow")
    cv2 = optional_module("cv2", "the warped error", "flow")
    estimator = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    errors = torch.empty(len(frames), count - 1, dtype=torch.float64)
    for row, (own, seen) in enumerate(zip(frames.cpu().numpy(), guide.cpu().numpy(), strict=True)):
        grey = cv2.cvtColor(seen[0], cv2.COLOR_RGB2GRAY)
        for step in range(count - 1):
            before, grey = grey, cv2.cvtColor(seen[step + 1], cv2.COLOR_RGB2GRAY)
            forward = estimator.calc(before, grey, None)
            visible = visible_pixels(forward, estimator.calc(grey, before, None))
            warped = _warp(cv2, own[step + 1].astype(np.float32), forward)
            difference = (own[step].astype(np.float32) - warped)[visible].astype(np.float64) / PEAK
            errors[row, step] = np.square(difference).mean() if visible.any() else np.nan
    return errors if video.ndim == 5 else errors[0]


def visible_pixels(forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Pixels of the first frame that the second shows too: FP32 [H, W, 2] (x, y) -> bool [H, W].

    ``forward`` leads from the first frame to the second, ``backward`` the other way.
    """
    cv2 = optional_module("cv2", "the warped error", "flow")
    returned = _warp(cv2, backward, forward)
    length, back = (np.square(flow).sum(axis=-1) for flow in (forward, returned))
    mismatch = np.square(forward + returned).sum(axis=-1)
    fits = mismatch <= CHECK_RATIO * (length + back) + CHECK_SLACK
    slopes = [np.gradient(forward[..., axis]) for axis in (0, 1)]
    edge = sum(np.square(slope) for pair in slopes for slope in pair)
    smooth = edge <= EDGE_RATIO * length + EDGE_SLACK
    height, width = length.shape
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    x, y = columns + forward[..., 0], rows + forward[..., 1]
    inside = (x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)
    return np.asarray(fits & smooth & inside)


def _warp(cv2: Any, image: np.ndarray, flow: np.ndarray) -> np.ndarray:
    """``image`` FP32 [H, W, C] read bilinearly at every pixel's place plus its flow."""
    height, width = flow.shape[:2]
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    places = columns + flow[..., 0], rows + flow[..., 1]
    found: np.ndarray = cv2.remap(image, *places, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    return found
