"""A few small frames of two long videos, sampled evenly before their length is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steadykv.errors import ConfigError

MOST_FRAMES = 400  # a page of two videos of that many frames still opens at once
MOST_WIDTH = 480  # a phone held upright shows no more; two times 400 of 480 x 270 are 311 MB


class Samples:
    """Keeps every ``stride``-th pair; when there are too many, every second goes and it doubles.

    So between half of ``most`` and ``most`` pairs are kept, evenly spaced from the first one on.
    Frames wider than ``width`` are scaled down by area, and their flicker with them.
    """

    def __init__(self, most: int = MOST_FRAMES, width: int = MOST_WIDTH) -> None:
        if most < 2 or width < 1:
            raise ConfigError(f"samples: got {most} of width {width}, expected 2 and 1 at least")
        self.most, self.width, self.stride = most, width, 1
        self._kept: list[tuple[int, NDArray[np.uint8], NDArray[np.uint8]]] = []
        self._seen = 0

    def add(self, first: int, a: NDArray[np.uint8], b: NDArray[np.uint8]) -> None:
        """Look at frames ``first`` .. of both videos, uint8 [n, H, W, 3]."""
        for offset in range(len(a)):
            if self._seen % self.stride == 0:
                if len(self._kept) == self.most:
                    self._kept = self._kept[::2]
                    self.stride *= 2
                if self._seen % self.stride == 0:
                    pair = self._small(a[offset]), self._small(b[offset])
                    self._kept.append((first + offset, *pair))
            self._seen += 1

    def _small(self, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        height, width = frame.shape[:2]
        if width <= self.width:
            return frame.copy()
        size = max(1, math.floor(height * self.width / width + 0.5)), self.width
        planes = torch.from_numpy(frame).movedim(-1, 0)[None].float()
        scaled = torch.nn.functional.interpolate(planes, size, mode="area")
        return scaled[0].round_().byte().movedim(0, -1).contiguous().numpy()

    @property
    def indices(self) -> list[int]:
        """Which frames are kept, numbered as frames of A."""
        return [index for index, _, _ in self._kept]

    def videos(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The kept frames of both, uint8 [n, h, w, 3]. Raises ConfigError for none."""
        if not self._kept:
            raise ConfigError("samples: got no frames; expected at least one pair: add them first")
        return np.stack([a for _, a, _ in self._kept]), np.stack([b for _, _, b in self._kept])

    def to_dict(self) -> dict[str, Any]:
        """What ``measure.json`` says about the frames that a page shows."""
        height, width = self._kept[0][1].shape[:2] if self._kept else (0, 0)
        return {
            "frames": self.indices, "stride": self.stride, "width": width, "height": height
        }  # fmt: skip
