"""The part of two videos that a page plays: at their own size, where they flicker most.

The first frames are kept while everything is measured. Where another part turns out to be the
worst, the files are read once more up to its end; nothing but the excerpt is held at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steadykv.errors import ConfigError
from steadykv.evaluation.video_pair import PairOptions, VideoPair

Films = NDArray[np.uint8]

MOST_FRAMES = 400  # 16 seconds of 25 frames
# By themselves, 100 frames of 1280 x 720 (44 of 1920 x 1080): 276 MB of memory a video, and 5 to 50
# MB of page at crf 14, by how much they move.
OWN_PIXELS = 100 * 1280 * 720
# What --page-frames may ask for: 0.7 GB of memory a video.
LARGEST_PIXELS = 250 * 1280 * 720


@dataclass(frozen=True)
class ExcerptOptions:
    """What of the videos a page plays.

    start: frame of A; None: the part that flickers most. frames: how many; None: as many as
    OWN_PIXELS holds, at most MOST_FRAMES. width: pixels to which wider videos are scaled down,
    which weakens their finest flicker; None: their own size. Raises ConfigError.
    """

    start: int | None = None
    frames: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("frames", 1), ("width", 16)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--page-{name}: got {value}, expected {least} or more")

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of a frame as it is shown."""
        if self.width is None or width <= self.width:
            return width, height
        return self.width, max(1, math.floor(height * self.width / width + 0.5))

    def count(self, width: int, height: int) -> int:
        """How many frames of this shown size. Raises ConfigError for more than LARGEST_PIXELS."""
        most = max(1, LARGEST_PIXELS // (width * height))
        if self.frames is None:
            return min(MOST_FRAMES, max(1, OWN_PIXELS // (width * height)))
        if self.frames > most:
            raise ConfigError(
                f"--page-frames: got {self.frames}, expected at most {most} of {width} x {height} "
                "pixels; show fewer, or scale them with --page-width"
            )
        return self.frames


class Excerpt:
    """Frames of both videos, uint8 [n, h, w, 3], consecutive: a gap would flicker by itself.

    pairing: of the measurement; size: (width, height) of its frames. Raises ConfigError for options
    that these do not allow.
    """

    def __init__(
        self,
        size: tuple[int, int],
        options: ExcerptOptions | None = None,
        pairing: PairOptions | None = None,
    ) -> None:
        self.options, self.pairing = options or ExcerptOptions(), pairing or PairOptions()
        width, height = self.options.size(*size)
        self.most = self.options.count(width, height)
        self.first = 0  # of those that are compared
        if self.options.start is not None:
            self.first = self.options.start - self.pairing.start
            if self.first < 0:
                raise ConfigError(
                    f"--page-start: got {self.options.start}, expected a frame that is compared: "
                    f"{self.pairing.start} or later"
                )
        self._films = [np.empty((self.most, height, width, 3), np.uint8) for _ in range(2)]
        self._held, self._seen = 0, 0

    def add(self, a: Films, b: Films) -> None:
        """Take what the excerpt needs of the next frames of both videos, uint8 [n, H, W, 3]."""
        skipped = max(0, self.first - self._seen)
        self._seen += len(a)
        count = max(0, min(len(a) - skipped, self.most - self._held))
        for film, frames in zip(self._films, (a, b), strict=True):
            for place, frame in enumerate(frames[skipped : skipped + count], self._held):
                film[place] = self._shown(frame)
        self._held += count

    def settle(
        self,
        flicker: Sequence[float] | NDArray[np.float64],
        paths: tuple[str, str],
        on_progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        """After the measurement: read the part that flickers most, unless it is here already.

        flicker: the error of every step, element i of the one into frame i + 1. Raises ConfigError
        where the chosen start lies behind the end, and what VideoPair raises.
        """
        if self.options.start is not None:
            if not self._held:
                last = self.pairing.start + self._seen - 1
                raise ConfigError(
                    f"--page-start: got {self.options.start}, expected a frame that was compared: "
                    f"{self.pairing.start} to {last}"
                )
            return
        first = worst_start(flicker, self.most)
        if first == self.first or self._seen <= self.most:
            return
        self.read(first, self._seen, paths, on_progress)

    def read(
        self,
        first: int,
        frames: int,
        paths: tuple[str, str],
        on_progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        """Read the part that begins with frame `first` of the `frames` that are compared."""
        start = self.pairing.start + first
        part = replace(self.pairing, start=start, end=start + min(self.most, frames - first))
        self.first, self._held, self._seen = first, 0, first
        with VideoPair(*paths, part) as pair:
            for chunk in pair.chunks():
                self.add(chunk.a, chunk.b)
                if on_progress is not None:
                    on_progress(self._held, self.most, "reading the worst part again")

    def _shown(self, frame: Films) -> Films:
        height, width = self._films[0].shape[1:3]
        if frame.shape[:2] == (height, width):
            return frame
        planes = torch.from_numpy(np.ascontiguousarray(frame)).movedim(-1, 0)[None].float()
        scaled = torch.nn.functional.interpolate(planes, (height, width), mode="area")
        return scaled[0].round_().byte().movedim(0, -1).contiguous().numpy()

    def videos(self) -> tuple[Films, Films]:
        """The frames of both: views of what is held, n >= 1."""
        return self._films[0][: self._held], self._films[1][: self._held]

    def to_dict(self) -> dict[str, Any]:
        """What ``measure.json`` says about it; ``start`` is a frame of A."""
        height, width = self._films[0].shape[1:3]
        start = self.pairing.start + self.first
        return {"start": start, "frames": self._held, "width": width, "height": height}


def worst_start(flicker: Sequence[float] | NDArray[np.float64], length: int) -> int:
    """The first of `length` frames around the strongest flicker error; 0 where nothing flickers.

    flicker: of every step, element i of the one into frame i + 1. Steps in the middle of a part
    weigh more, so that what flickers stands there and not at its edge.
    """
    steps = np.nan_to_num(np.asarray(flicker, np.float64))
    if len(steps) < length or not steps.any():
        return 0
    if length == 1:
        return 1 + int(steps.argmax())
    weighted = np.convolve(steps, np.bartlett(length + 1)[1:-1], "valid")
    # What is as bad as the worst but for rounding is: the first of them.
    return int(np.flatnonzero(weighted >= weighted.max() * (1 - 1e-9))[0])
