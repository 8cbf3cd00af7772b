"""tLPIPS: does a video change from frame to frame, for a network's eye, as its reference does?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from steadykv.errors import ShapeError
from steadykv.evaluation.metrics.frames import Frames, frame_pair

if TYPE_CHECKING:
    from steadykv.evaluation.metrics.lpips import LPIPS


def tlpips_by_step(
    reference: Frames, video: Frames, model: LPIPS | None = None, batch: int = 8
) -> torch.Tensor:
    """|LPIPS(r_(t-1), r_t) - LPIPS(v_(t-1), v_t)| of every step, FP64 [T - 1] or [B, T - 1].

    ``reference`` and ``video`` are uint8 [T, H, W, 3] or [B, T, H, W, 3] with sides of at least 31;
    ``model`` and ``batch`` as for :func:`lpips_by_frame`. Unit: that of LPIPS; 0 where both change
    equally much, whatever each of them shows. Element t - 1 belongs to the step into frame t.
    Source: tLP of Chu et al. 2018 (TecoGAN, arXiv 1811.09393); the `metrics.py` that they released
    gives 100 times the number. Allocates what :func:`lpips_by_frame` does. Raises NonFiniteError,
    ShapeError.
    """
    from steadykv.evaluation.metrics.lpips import lpips_by_frame

    first, second, batched = frame_pair(reference, video)
    count = first.shape[1]
    if count < 2:
        raise ShapeError(f"the videos have {count} frame; tLPIPS expects at least 2")
    steps = [
        lpips_by_frame(frames[:, :-1], frames[:, 1:], model, batch) for frames in (first, second)
    ]
    result = (steps[0] - steps[1]).abs()
    return result if batched else result[0]
