"""Films with known pixels: frames carry numbers, one region flickers, one is only lighter."""

from __future__ import annotations

import numpy as np

from steadykv.report.video import Frames

COUNT, HEIGHT, WIDTH, FPS = 40, 64, 96, 12
NUMBER = (slice(0, 16), slice(0, 16))  # its grey says which frame this is
FLICKERS = (slice(24, 48), slice(56, 88))
LIGHTER = (slice(24, 48), slice(16, 40))
STEP, OFFSET = 12, 30


def original(count: int = COUNT, height: int = HEIGHT, width: int = WIDTH) -> Frames:
    """A slow diagonal wave that moves by a pixel a frame."""
    y, x = np.mgrid[:height, :width]
    frames = [
        np.stack([90 + 40 * np.sin((x + y + t) / 9), 100 + 0.5 * y, 120 + 30 * np.cos(x / 7)], -1)
        for t in range(count)
    ]
    film = np.stack(frames).astype(np.uint8)
    for t in range(count):
        film[t][NUMBER] = grey_of(t)
    return film


def copy_with_errors(film: Frames) -> Frames:
    """A constant offset in one region, and one that alternates with every frame in the other."""
    other = film.astype(int)
    other[:, *LIGHTER] += OFFSET
    other[::2, *FLICKERS] += STEP
    other[1::2, *FLICKERS] -= STEP
    return other.clip(0, 255).astype(np.uint8)


def grey_of(frame: int) -> int:
    """Six levels a frame: a video codec's error does not reach the next one."""
    return 8 + 6 * frame


def frame_of(grey: float) -> int:
    """The number that a grey stands for."""
    return round((grey - 8) / 6)
