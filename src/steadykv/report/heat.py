"""Where two videos differ and where one flickers: the two maps that the players show.

Levels are grey levels, 0 to 255. A film carries a map as ``255 · sqrt(level / 255)``: the eye looks
for one or two levels, which that curve keeps apart (16 and 23) through 8 bits and a video codec.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from steadykv.report.video import Frames

Levels = NDArray[np.float32]

# A flicker of one frame is too short to see on a map; a third of a second at 12 frames a second.
HEAT_STEPS = 4


def difference(reference: Frames, picture: Frames) -> Levels:
    """Mean over R, G and B of |picture − reference|: uint8 [H, W, 3] twice to FP32 [H, W]."""
    gap = picture.astype(np.int16) - reference.astype(np.int16)
    return np.abs(gap).mean(axis=-1, dtype=np.float32)


def flicker_heat(reference: Frames, video: Frames, steps: int = HEAT_STEPS) -> Iterator[Levels]:
    """Temporal error a frame, averaged over the latest ``steps`` steps: T maps FP32 [H, W].

    The error of the step into frame t is |(v[t] − v[t−1]) − (r[t] − r[t−1])|, the mean over R, G
    and B (the error of frame differences, pixel by pixel). Frame 0, which no step leads to, is all
    zero; the next frames average over the steps there are. Reference and video are uint8
    [T, H, W, 3]; ``steps`` maps are held at a time.
    """
    held: deque[Levels] = deque(maxlen=steps)
    before = None
    for original, picture in zip(reference, video, strict=True):
        gap = picture.astype(np.int16) - original.astype(np.int16)
        if before is not None:
            held.append(np.abs(gap - before).mean(axis=-1, dtype=np.float32))
        before = gap
        yield np.mean(held, axis=0) if held else np.zeros(gap.shape[:2], dtype=np.float32)


def halved(levels: Levels) -> Levels:
    """Means of 2 × 2 levels: with such maps a film of 720p takes a third of the bytes.

    An odd side ends with the mean of what there is.
    """
    height, width = levels.shape
    padded = np.pad(levels, ((0, height % 2), (0, width % 2)), mode="edge")
    blocks = padded.reshape(padded.shape[0] // 2, 2, padded.shape[1] // 2, 2)
    return blocks.mean(axis=(1, 3), dtype=np.float32)


def to_grey(levels: Levels) -> NDArray[np.uint8]:
    """Levels as a film carries them; a step error can reach 510 and stops at 255."""
    return np.rint(255.0 * np.sqrt(np.minimum(levels, 255.0) / 255.0)).astype(np.uint8)
