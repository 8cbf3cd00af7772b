"""Two video files read in step: chunks of frames that belong together, and never a whole video.

A decoder with two frames ahead and two chunks is all that is held, whatever the length.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import av
import numpy as np
from av.video.reformatter import Colorspace, Interpolation

from steadykv.errors import ConfigError, ShapeError, SteadyKVError
from steadykv.evaluation.video_file import ACCURATE, FAST, Picture, VideoFile

MATCHES = ("exact", "index", "time")
CHUNK_FRAMES = 8
CHUNK_BYTES = 48 * 2**20
"""A chunk holds 8 frames of each video, or as many as fit here (4K: 2), but at least one."""
CLOCK_SLACK = 0.0015  # seconds: Matroska and WebM round every timestamp to a millisecond
HD_ROWS = 720  # players take untagged video of this height for BT.709


@dataclass(frozen=True)
class PairOptions:
    """Which frames are compared.

    ``start`` .. ``end`` - 1 count frames of A (``end`` None: to the end). ``match``: "exact" pairs
    frame i with frame i and refuses pairs that are shown at different times, "index" does not look
    at times, "time" pairs every frame of A with the one that B shows then. ``shortest`` ends with
    the shorter video; ``resize`` scales B to the size of A. Raises ConfigError.
    """

    start: int = 0
    end: int | None = None
    match: str = "exact"
    shortest: bool = False
    resize: bool = False

    def __post_init__(self) -> None:
        if self.match not in MATCHES:
            raise ConfigError(f"match: got {self.match!r}, expected one of {', '.join(MATCHES)}")
        if self.start < 0:
            raise ConfigError(f"--start: got {self.start}, expected 0 or more")
        if self.end is not None and self.end <= self.start:
            raise ConfigError(
                f"--end: got {self.end}, expected more than --start {self.start}: frames "
                "--start .. --end - 1 are compared"
            )


@dataclass(frozen=True)
class Chunk:
    """Frames ``first`` .. ``first`` + n - 1 of A and those of B that belong to them.

    ``a`` and ``b`` are uint8 [n, H, W, 3]; ``times`` are seconds of A since its first frame.
    """

    first: int
    times: list[float]
    a: Picture
    b: Picture


class VideoPair:
    """Two files open at their first frames, checked against each other; a context manager.

    ``first`` and ``second`` are the VideoFiles, ``notes`` what a reader of the numbers must know.
    Raises what VideoFile raises, and ShapeError when the sizes differ and ``resize`` is not set.
    """

    def __init__(
        self, a: str | os.PathLike[str], b: str | os.PathLike[str], options: PairOptions
    ) -> None:
        self.options = options
        self.first = VideoFile(a, "A")
        try:
            self.second = VideoFile(b, "B")
        except BaseException:
            self.first.close()
            raise
        try:
            self.notes: list[str] = []
            self._interpolations = self._check()
            self._matrices = self._check_colours()
            self._describe_formats()
            self._frames = self._in_step()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of every frame that is compared."""
        return self.first.width, self.first.height

    @property
    def expected(self) -> int:
        """How many frames will be compared, as far as the headers tell; 0 if they do not."""
        counts = [file.estimate for file in (self.first, self.second) if file.estimate]
        if self.options.match == "time":
            counts = [self.first.estimate] if self.first.estimate else []
        ends = [*counts, *([] if self.options.end is None else [self.options.end])]
        return max(min(ends) - self.options.start, 0) if ends else 0

    def _check(self) -> tuple[Interpolation, Interpolation]:
        a, b = self.first, self.second
        same_format = a.pixel_format == b.pixel_format
        if (a.width, a.height) != (b.width, b.height):
            if not self.options.resize:
                raise ShapeError(
                    f"{b.name}: is {b.width} x {b.height} pixels, A {a.width} x {a.height}; "
                    "expected one size: add --resize to scale B, or crop one of them first"
                )
            smaller = a.width <= b.width and a.height <= b.height
            how = Interpolation.AREA if smaller else Interpolation.BICUBIC
            self.notes.append(
                f"B was scaled from {b.width} x {b.height} to {a.width} x {a.height} pixels "
                f"({'area' if smaller else 'bicubic'}): part of every difference is the scaling's"
            )
            return FAST | ACCURATE, how | ACCURATE
        path = FAST if same_format else FAST | ACCURATE
        return path, path

    def _check_colours(self) -> tuple[Colorspace | None, Colorspace | None]:
        """The YUV matrix of each video: its own, else the other's, else by height as players do."""
        chosen: list[Colorspace | None] = []
        for file, other in ((self.first, self.second), (self.second, self.first)):
            matrix = file.matrix
            if matrix is None and not file.is_rgb:
                guess = Colorspace.ITU709 if file.height >= HD_ROWS else Colorspace.ITU601
                matrix = other.matrix or guess
                if other.matrix is not None:
                    label = "A" if file is self.first else "B"
                    self.notes.append(
                        f"{label} does not say which YUV matrix it uses: the other's was assumed"
                    )
            chosen.append(matrix)
        return chosen[0], chosen[1]

    def _describe_formats(self) -> None:
        a, b = self.first, self.second
        if a.pixel_format != b.pixel_format:
            self.notes.append(
                f"A is {a.pixel_format}, B {b.pixel_format}: both were converted to 8-bit RGB"
            )
        for label, file in (("A", a), ("B", b)):
            if file.bits > 8:
                self.notes.append(
                    f"{label} has {file.bits} bits ({file.pixel_format}): compared as 8-bit RGB, "
                    "finer differences are not seen"
                )
            if file.rotation:
                self.notes.append(f"{label} was turned by {file.rotation} degrees, as it asks for")
            if file.transfer is not None:
                self.notes.append(
                    f"{label} is HDR ({file.transfer}): compared without tone mapping"
                )
            if file.hides_alpha:
                self.notes.append(f"{label} has transparency that its decoder does not show")
            if file.fps is None:
                self.notes.append(f"{label} is pictures without times: paired by number")
            if file.interlaced:
                self.notes.append(f"{label} is interlaced: whole frames are compared")
        if a.aspect != b.aspect:
            self.notes.append(
                f"A has pixels of {float(a.aspect):.3g}:1, B of {float(b.aspect):.3g}:1: "
                "compared pixel by pixel"
            )
        with suppress(OSError):
            if Path(a.path).samefile(b.path):
                self.notes.append("A and B are the same file")

    def chunks(self) -> Iterator[Chunk]:
        """The frames in order, the next chunk being decoded while the caller works on this one.

        To be called once. Raises SteadyKVError (broken file), ConfigError (times or lengths that
        differ, a window that leaves the videos). Allocates three chunks.
        """
        worker = ThreadPoolExecutor(1, thread_name_prefix="steadykv-decode")
        try:
            following = worker.submit(self._read_chunk)
            while (chunk := following.result()) is not None:
                following = worker.submit(self._read_chunk)
                yield chunk
            self._describe_reading()
        finally:
            worker.shutdown(wait=True, cancel_futures=True)

    def _read_chunk(self) -> Chunk | None:
        width, height = self.size
        most = max(1, min(CHUNK_FRAMES, CHUNK_BYTES // (width * height * 3)))
        a = np.empty((most, height, width, 3), np.uint8)
        b = np.empty_like(a)
        first = 0
        times: list[float] = []
        for index, time, frame, other in itertools.islice(self._frames, most):
            place = len(times)
            first = index - place
            a[place] = self.first.rgb(frame, self.size, self._matrices[0], self._interpolations[0])
            b[place] = self.second.rgb(other, self.size, self._matrices[1], self._interpolations[1])
            times.append(time)
        return Chunk(first, times, a[: len(times)], b[: len(times)]) if times else None

    def _in_step(self) -> Iterator[tuple[int, float, av.VideoFrame, av.VideoFrame]]:
        """(index in A, seconds, frame of A, frame of B) from --start to --end."""
        start, end = self.options.start, self.options.end
        pairs = self._by_time() if self.options.match == "time" else self._by_index()
        count = 0
        # islice: at --end nothing more is read, so what comes after it may be broken.
        for count, pair in enumerate(itertools.islice(pairs, end), 1):
            if count > start:
                yield count - 1, *pair
        asked = start + 1 if end is None else end
        if count < asked:
            option = f"--start: got {start}" if end is None else f"--end: got {end}"
            raise ConfigError(
                f"{option}, but only {count:,} frames can be compared; expected a window inside "
                "the videos"
            )

    def _by_index(self) -> Iterator[tuple[float, av.VideoFrame, av.VideoFrame]]:
        self._check_counts()
        rate = max(self.first.fps or 0.0, self.second.fps or 0.0)
        exact = self.options.match == "exact" and rate > 0.0
        frames = itertools.zip_longest(self.first.frames(), self.second.frames())
        for index, (one, other) in enumerate(frames):
            if one is None or other is None:
                if not self.options.shortest:
                    raise self._lengths_differ("A" if one is None else "B")
                return
            here, there = one[0], other[0]
            if exact and here is not None and there is not None and abs(here - there) > 0.5 / rate:
                raise ConfigError(
                    f"frame {index} of A is shown at {here:.3f} s, of B at {there:.3f} s "
                    f"({_rate(self.first)} and {_rate(self.second)} frames a second); expected the "
                    "same times: add --by-time to pair what is shown together, or --by-index to "
                    "ignore times"
                )
            seconds = here if here is not None else there
            yield (index / rate if rate else 0.0) if seconds is None else seconds, one[1], other[1]

    def _by_time(self) -> Iterator[tuple[float, av.VideoFrame, av.VideoFrame]]:
        """Every frame of A with the last of B that is shown by then."""
        step_a, step_b = _step(self.first), _step(self.second)
        slack = min(CLOCK_SLACK, 0.1 * min(step_a, step_b))
        shown = _timed(self.second)
        current, upcoming = next(shown), next(shown, None)
        now = 0.0
        for now, frame in _timed(self.first):
            while upcoming is not None and upcoming[0] <= now + slack:
                current, upcoming = upcoming, next(shown, None)
            if upcoming is None and now >= current[0] + step_b - slack:
                if not self.options.shortest:
                    raise self._lengths_differ("B")
                return
            yield now, frame, current[1]
        goes_on = upcoming is not None and upcoming[0] >= now + step_a - slack
        if goes_on and not self.options.shortest:
            raise self._lengths_differ("A")

    def _check_counts(self) -> None:
        """Refuse different lengths before anything is measured, where the files tell them."""
        one, other = self.first.promised, self.second.promised
        if self.options.shortest or self.options.end is not None or one == other or not one * other:
            return
        counted = self.first.count_packets(), self.second.count_packets()
        if all(counted) and counted[0] != counted[1]:
            raise _lengths(f"A has {counted[0]:,} frames, B {counted[1]:,}")

    def _lengths_differ(self, ended: str) -> SteadyKVError:
        file, goes_on = (self.first, "B") if ended == "A" else (self.second, "A")
        promise = f" (its header promises {missing})" if (missing := file.missing()) else ""
        return _lengths(f"{ended} ends after {file.read:,} frames{promise}, {goes_on} goes on")

    def _describe_reading(self) -> None:
        """What is known only at the end."""
        for label, file in (("A", self.first), ("B", self.second)):
            if file.transparent:
                self.notes.append(f"{label} has transparent pixels: laid on black")
            whole = self.options.end is None and not self.options.shortest
            if whole and (missing := file.missing()):
                self.notes.append(
                    f"{label} holds {file.read:,} frames that can be shown; its header promises "
                    f"{missing}"
                )

    def close(self) -> None:
        """Give both files back."""
        self.first.close()
        self.second.close()

    def __enter__(self) -> VideoPair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _lengths(what: str) -> ConfigError:
    return ConfigError(
        f"{what}; expected equal lengths: add --shortest to compare what both have, or --end FRAME"
    )


def _rate(file: VideoFile) -> str:
    return "unknown" if file.fps is None else f"{file.fps:.6g}"


def _step(file: VideoFile) -> float:
    """Seconds a frame is shown. Raises ConfigError for pictures, which have no times."""
    if not file.fps:
        raise ConfigError(
            f"{file.name}: has no times; expected a video for --by-time: use --by-index"
        )
    return 1.0 / file.fps


def _timed(file: VideoFile) -> Iterator[tuple[float, av.VideoFrame]]:
    """Frames with their times; one without a timestamp comes where its rate puts it."""
    step = _step(file)
    for index, (seconds, frame) in enumerate(file.frames()):
        yield (index * step if seconds is None else seconds), frame
