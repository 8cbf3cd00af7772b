"""The beginning of two videos, scaled down, for a page that plays them side by side."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

MOST_FRAMES = 400  # 16 seconds of 25 frames
MOST_WIDTH = 480  # 400 frames of 480 x 270 are 156 MB a video


class Excerpt:
    """Keeps the first ``most`` pairs of frames, all of them: a gap would flicker by itself.

    Frames wider than ``width`` are scaled down by area, which also weakens their finest flicker.
    """

    def __init__(self, most: int = MOST_FRAMES, width: int = MOST_WIDTH) -> None:
        self.most, self.width = most, width
        self._kept: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []

    def add(self, a: NDArray[np.uint8], b: NDArray[np.uint8]) -> None:
        """Take what still fits of the next frames of both videos, uint8 [n, H, W, 3]."""
        for pair in list(zip(a, b, strict=True))[: self.most - len(self._kept)]:
            self._kept.append((self._small(pair[0]), self._small(pair[1])))

    def _small(self, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        height, width = frame.shape[:2]
        if width <= self.width:
            return frame.copy()
        size = max(1, math.floor(height * self.width / width + 0.5)), self.width
        planes = torch.from_numpy(frame).movedim(-1, 0)[None].float()
        scaled = torch.nn.functional.interpolate(planes, size, mode="area")
        return scaled[0].round_().byte().movedim(0, -1).contiguous().numpy()

    def videos(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The frames of both, uint8 [n, h, w, 3] with n >= 1; a copy of all of them."""
        return np.stack([a for a, _ in self._kept]), np.stack([b for _, b in self._kept])

    def to_dict(self) -> dict[str, Any]:
        """What ``measure.json`` says about it."""
        height, width = self._kept[0][0].shape[:2] if self._kept else (0, 0)
        return {"frames": len(self._kept), "width": width, "height": height}
