"""FLIP, the difference seen when two images alternate, of uint8 video, by frame (optional extra).

Andersson, Nilsson, Akenine-Möller, Oskarsson, Åström, Fairchild: FLIP: A Difference Evaluator for
Alternating Images, 2020. The authors' own package flip-evaluator computes it.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from steadykv.errors import ConfigError
from steadykv.evaluation.metrics.frames import Frames, frame_pair
from steadykv.evaluation.metrics.optional import optional_module

PIXELS_PER_DEGREE = 67.0
"""The authors' default: a 4K screen 0.7 m wide, seen from 0.7 m."""


def flip_by_frame(
    reference: Frames, video: Frames, pixels_per_degree: float = PIXELS_PER_DEGREE
) -> torch.Tensor:
    """Mean FLIP error of each frame, FP64 [T] or [B, T], 0 (equal) .. 1, on the reference's device.

    ``reference`` and ``video`` are uint8 [T, H, W, 3] or [B, T, H, W, 3], sRGB. LDR-FLIP on the
    CPU, frame by frame (about 0.8 s for 1280 x 720); the first argument is the reference.
    Allocates 24 bytes per pixel of one frame, and what the package needs. Raises
    BackendUnavailable (no flip-evaluator: ``pip install 'steadykv[flip]'``), ConfigError
    (``pixels_per_degree`` not positive), ShapeError or NonFiniteError.
    """
    if not 0.0 < pixels_per_degree < math.inf:
        raise ConfigError(
            f"pixels_per_degree is {pixels_per_degree}; expected a positive number, 67 for a 4K "
            "screen at arm's length"
        )
    first, second, batched = frame_pair(reference, video)
    evaluate = optional_module("flip_evaluator", "FLIP", "flip").evaluate

    def unit_range(frame: torch.Tensor) -> np.ndarray:
        return np.ascontiguousarray(frame.cpu().numpy().astype(np.float32) / np.float32(255))

    values = [
        evaluate(
            unit_range(a),
            unit_range(b),
            "LDR",
            applyMagma=False,
            parameters={"ppd": pixels_per_degree},
        )[1]
        for a, b in zip(first.flatten(0, 1), second.flatten(0, 1), strict=True)
    ]
    result = torch.tensor(values, dtype=torch.float64, device=first.device).view(first.shape[:2])
    return result if batched else result[0]
