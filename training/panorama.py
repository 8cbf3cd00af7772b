"""Frames as parts of a panorama: columns of equal angle, so that a turn only shifts the picture.

The engine draws on a plane, where turning bends everything. Drawn on a cylinder, a turn by a whole
number of patches moves every patch's pixels to another patch: what a model with patches can copy.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

FINER = 3  # samples a pixel and axis, averaged: far textures do not alias


class Panorama:
    """From screens of `screen` (width, height) to frames of `frame`, both `degrees` wide."""

    def __init__(self, screen: tuple[int, int], frame: tuple[int, int], degrees: float):
        self.frame = frame
        width, height = (FINER * n for n in frame)
        half = np.radians(degrees / 2)
        focal = screen[0] / 2 / np.tan(half)
        angles = ((np.arange(width) + 0.5) / width - 0.5) * 2 * half
        # as high as the screen reaches at its left and right edges, where it shows least
        top = (screen[1] / 2 - 1) / focal * np.cos(half)
        slopes = ((np.arange(height) + 0.5) / height * 2 - 1) * top
        across = focal * np.tan(angles) + screen[0] / 2 - 0.5
        down = focal * slopes[:, None] / np.cos(angles) + screen[1] / 2 - 0.5
        self.across = np.broadcast_to(across, (height, width)).astype(np.float32)
        self.down = down.astype(np.float32)

    def __call__(self, screen: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8 [H,W,3] to uint8 [h,w,3]."""
        fine = cv2.remap(screen, self.across, self.down, cv2.INTER_LINEAR)
        return np.asarray(cv2.resize(fine, self.frame, interpolation=cv2.INTER_AREA), np.uint8)
