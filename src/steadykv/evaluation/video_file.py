"""One video file, decoded frame by frame into what a viewer would see: upright 8-bit RGB.

Everything that can be wrong with a file ends as one SteadyKVError that names it and says how many
frames could be read. Nothing is kept but the frame that was decoded last.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.stream import Disposition
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from numpy.typing import NDArray

from steadykv.errors import ConfigError, SteadyKVError

Picture = NDArray[np.uint8]

# Frame threads hide the decoder behind the metrics; more than four cost memory (a frame each) and
# no longer help: one core decodes 720p H.264 ten times faster than the metrics are computed.
DECODE_THREADS = 4
# Four times 8K. A corrupted header may claim any size, and a frame is allocated before it is read.
MOST_PIXELS = 2**27
# Demuxers of character art: they take almost any text file for a video.
TEXT_FORMATS = {"tty", "bin", "xbin", "adf", "idf"}
# AVColorSpace (what a file says) as the matrix that swscale uses for it.
MATRICES = {
    1: Colorspace.ITU709,
    4: Colorspace.FCC,
    5: Colorspace.ITU601,
    6: Colorspace.ITU601,
    7: Colorspace.SMPTE240M,
    9: Colorspace.BT2020,
    10: Colorspace.BT2020,
}
PICTURES_FPS = 25.0  # of numbered pictures, which have no times: FFmpeg's default
HDR_TRANSFERS = {16: "PQ", 18: "HLG"}  # AVColorTransferCharacteristic

FAST = Interpolation.BILINEAR
"""Exact to one grey level, but repeats chroma samples: right for two videos of the same format."""
ACCURATE = Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
"""Flags of the conversion that interpolates chroma in every format, at several times the cost."""


class VideoFile:
    """A file that is open at its first frame. ``name`` stands for it in messages ("A: a.mp4").

    Attributes: ``width`` and ``height`` in pixels as displayed (after rotation), ``fps`` (None:
    pictures), ``codec``, ``pixel_format``, ``rotation`` in degrees counter-clockwise, ``matrix``
    (None when the file does not say which), ``promised`` (frames that the header claims, 0 if it
    says nothing), ``seconds`` (the same in time, or None), ``read`` (frames given out so far),
    ``transparent`` (a pixel was).

    Raises SteadyKVError when the file is missing, no regular file, empty, no video, broken before
    its first frame, or larger than MOST_PIXELS.
    """

    def __init__(self, path: str | os.PathLike[str], label: str) -> None:
        self.path = str(path)
        self.name = f"{label} ({self.path})"
        self.read = 0
        self.transparent = False
        self._container = self._open()
        try:
            self._stream = self._video_stream()
            context = self._stream.codec_context
            context.thread_type = "AUTO"
            context.thread_count = min(DECODE_THREADS, os.cpu_count() or 1)
            context.options = {"err_detect": "explode", "max_pixels": str(MOST_PIXELS)}
            self._decoded = self._decode()
            first = next(self._decoded, None)
            if first is None:
                raise SteadyKVError(
                    f"{self.name}: no frame could be read; expected a video: check that the file "
                    "is whole, or encode it again"
                )
        except BaseException:
            self.close()
            raise
        self._first = first
        self._describe(first)
        self._converter = VideoReformatter()

    def _open(self) -> Any:
        path = Path(self.path)
        options = {"protocol_whitelist": "file"}  # a playlist must not reach the network
        numbered = "%" in path.name and not path.exists()  # pictures: frame-%04d.png
        if path.is_dir():
            raise ConfigError(
                f"{self.name}: is a folder; expected a video file: for pictures give a pattern "
                f"such as {path / '%04d.png'}"
            )
        if not numbered:
            if re.match(r"[a-zA-Z][\w+.-]+:/", self.path) and not path.exists():
                raise ConfigError(
                    f"{self.name}: is a URL; expected a video file: download it first"
                )
            if not path.exists():
                raise ConfigError(f"{self.name}: no such file; expected a video: check the path")
            if not path.is_file():
                raise ConfigError(
                    f"{self.name}: is no regular file; expected a video file: save the stream first"
                )
            if path.stat().st_size == 0:
                raise ConfigError(f"{self.name}: is empty (0 bytes); expected a video file")
            with path.open("rb"):  # an unreadable file is the system's to explain
                pass
        try:
            # "file:": a colon in a name is no protocol. Metadata may hold any bytes.
            return av.open(
                f"file:{self.path}",
                format="image2" if numbered else None,
                options=options,
                metadata_errors="replace",
            )
        except (av.error.FFmpegError, ValueError) as error:
            what = "no such pictures" if numbered else "is no video, or its header is broken"
            raise ConfigError(
                f"{self.name}: {what} ({_reason(error)}); expected a file that FFmpeg can open"
            ) from None

    def _video_stream(self) -> Any:
        names = set(self._container.format.name.split(","))
        found = [
            stream
            for stream in self._container.streams.video
            if not stream.disposition & Disposition.attached_pic
        ]
        if not found or names & TEXT_FORMATS:
            kinds = sorted({str(stream.type) for stream in self._container.streams})
            held = f"holds {' and '.join(kinds)}" if kinds else "holds nothing that plays"
            if names & TEXT_FORMATS:
                held = "is a text file"
            raise ConfigError(f"{self.name}: {held}, no video; expected a video file")
        stream = found[0]
        if stream.codec_context is None:
            raise ConfigError(
                f"{self.name}: no decoder for its video; expected a codec that this build of "
                "FFmpeg reads: encode it again as H.264, VP9 or FFV1"
            )
        return stream

    def _decode(self) -> Iterator[av.VideoFrame]:
        """The frames in order of display. Raises SteadyKVError where the file is broken."""
        try:
            for frame in self._container.decode(self._stream):
                if frame.is_corrupt:
                    raise self._broken("its decoder calls the next frame corrupt")
                yield frame
        except (av.error.FFmpegError, ValueError) as error:
            raise self._broken(_reason(error)) from None

    def _broken(self, reason: str) -> SteadyKVError:
        frames = f"{self.read:,} frame{'' if self.read == 1 else 's'}"
        fix = f", or stop before with --end {self.read}" if self.read else ""
        return SteadyKVError(
            f"{self.name}: broken after {frames} ({reason}); expected a whole video: encode it "
            f"again{fix}"
        )

    def _describe(self, frame: av.VideoFrame) -> None:
        stream, context = self._stream, self._stream.codec_context
        rate = stream.average_rate or stream.guessed_rate or stream.base_rate
        # Numbered pictures have no times: FFmpeg makes up 25 a second.
        self._timeless = self._container.format.name == "image2"
        self.fps = float(rate) if rate and not self._timeless else None
        self.codec = str(context.name)
        self.promised = int(stream.frames or 0)
        self.seconds = self._promised_seconds()
        self._last_shown = 0.0
        self.rotation = int(frame.rotation) % 360
        if self.rotation % 90:
            raise ConfigError(
                f"{self.name}: is rotated by {self.rotation} degrees; expected a multiple of 90: "
                "encode it upright"
            )
        self._stored = (frame.width, frame.height, frame.format.name)
        self.width, self.height = self._upright(frame.width, frame.height)
        self.pixel_format = str(frame.format.name)
        self.bits = max((part.bits for part in frame.format.components), default=8)
        self.has_alpha = any(part.is_alpha for part in frame.format.components)
        self.hides_alpha = stream.metadata.get("alpha_mode") == "1" and not self.has_alpha
        self.is_rgb = bool(frame.format.is_rgb) or frame.format.name == "pal8"
        self.matrix: Colorspace | None = None if self.is_rgb else MATRICES.get(frame.colorspace)
        self.transfer = HDR_TRANSFERS.get(frame.color_trc)
        self.interlaced = bool(frame.interlaced_frame)
        self.aspect = stream.sample_aspect_ratio or 1

    def _promised_seconds(self) -> float | None:
        """How long the header says that the video lasts; other streams may last longer."""
        if self._timeless:
            return None
        if self._stream.duration is not None:
            return float(self._stream.duration * self._stream.time_base)
        alone = len(self._container.streams) == 1 and self._container.duration is not None
        return self._container.duration / av.time_base if alone else None

    @property
    def estimate(self) -> int:
        """About how many frames there are; 0 where nothing tells."""
        return self.promised or round((self.seconds or 0.0) * (self.fps or 0.0))

    def missing(self) -> str:
        """What the header promises beyond the frames that were read; "" if nothing."""
        if self.promised:
            return f"{self.promised:,} frames" if self.read < self.promised else ""
        end = self._last_shown + 2.0 / (self.fps or 1.0)
        early = self.seconds is not None and end < self.seconds
        return f"{self.seconds:.4g} s" if early else ""

    def _upright(self, width: int, height: int) -> tuple[int, int]:
        return (height, width) if self.rotation in (90, 270) else (width, height)

    def frames(self) -> Iterator[tuple[float | None, av.VideoFrame]]:
        """Every frame with its seconds since the first one, None without timestamps; call it once.

        Raises SteadyKVError where the file is broken or changes its size or format.
        """
        frame: av.VideoFrame | None = self._first
        zero: float | None = None
        while frame is not None:
            now = (frame.width, frame.height, frame.format.name)
            if now != self._stored:
                raise SteadyKVError(
                    f"{self.name}: frame {self.read} is {now[0]} x {now[1]} {now[2]}, those before "
                    f"{self._stored[0]} x {self._stored[1]} {self._stored[2]}; expected one size "
                    f"and format: encode it again, or stop before with --end {self.read}"
                )
            self.read += 1
            seconds = None if frame.pts is None or self._timeless else float(frame.time)
            if zero is None:
                zero = seconds
            if seconds is not None and zero is not None:
                seconds -= zero
                self._last_shown = max(self._last_shown, seconds)
            yield seconds, frame
            frame = next(self._decoded, None)

    def rgb(
        self,
        frame: av.VideoFrame,
        size: tuple[int, int],
        matrix: Colorspace | None,
        interpolation: Interpolation,
    ) -> Picture:
        """The frame upright as uint8 [H, W, 3]; ``size`` is its (width, height) when upright.

        Transparent pixels are laid on black. The array may be a view into the converted frame.
        """
        width, height = self._upright(*size)
        try:
            converted = self._converter.reformat(
                frame,
                width=width,
                height=height,
                format="rgba" if self.has_alpha else "rgb24",
                src_colorspace=matrix,
                dst_color_range=ColorRange.JPEG,
                interpolation=interpolation,
                threads=1,
            )
        except (av.error.FFmpegError, ValueError) as error:
            raise SteadyKVError(
                f"{self.name}: frame {self.read - 1} cannot be converted from {self.pixel_format} "
                f"to RGB ({_reason(error)}); encode it again as yuv420p"
            ) from None
        plane = converted.planes[0]
        rows = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)[:height]
        if self.has_alpha:
            pixels = rows[:, : 4 * width].reshape(height, width, 4)
            picture = self._on_black(pixels)
        else:
            picture = rows[:, : 3 * width].reshape(height, width, 3)
        return np.rot90(picture, self.rotation // 90) if self.rotation else picture

    def _on_black(self, pixels: Picture) -> Picture:
        alpha = pixels[..., 3:]
        if bool((alpha == 255).all()):
            return pixels[..., :3]
        self.transparent = True
        laid = pixels[..., :3].astype(np.uint16) * alpha
        return ((laid + 127) // 255).astype(np.uint8)

    def count_packets(self) -> int:
        """Frames that the file holds, by its index alone: nothing is decoded, some are not shown.

        Opens the file a second time. 0 where it cannot be told.
        """
        try:
            with self._open() as container:
                packets = container.demux(container.streams[self._stream.index])
                return sum(1 for packet in packets if packet.size and not packet.is_discard)
        except (av.error.FFmpegError, ValueError, SteadyKVError):
            return 0

    def to_dict(self) -> dict[str, Any]:
        """What ``measure.json`` says about the file. ``frames`` is the number that were read."""
        return {
            "path": self.path,
            "frames": self.read,
            "width": self.width,
            "height": self.height,
            "fps": self.fps or PICTURES_FPS,
            "codec": self.codec,
            "pixel_format": self.pixel_format,
            "rotation": self.rotation,
        }

    def close(self) -> None:
        """Give the file back."""
        self._container.close()


def _reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
