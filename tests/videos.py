"""Video files of every kind, made with PyAV, for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

Frames = NDArray[np.uint8]
TICKS = 1000  # timestamps are given in milliseconds


def moving(count: int, height: int = 48, width: int = 64, seed: int = 0) -> Frames:
    """Smooth colours that drift, and a bright square that walks: uint8 [count, H, W, 3]."""
    rng = np.random.default_rng(seed)
    phase = rng.uniform(0, 6, 3)
    y, x = np.mgrid[:height, :width]
    video = np.empty((count, height, width, 3), np.uint8)
    for t in range(count):
        for c in range(3):
            wave = np.sin(x / 9 + phase[c] + t / 5) + np.cos(y / 7 - t / 8)
            video[t, ..., c] = (128 + 45 * wave).round()
        left, top = (3 * t) % (width - 8), (2 * t) % (height - 8)
        video[t, top : top + 8, left : left + 8] = 230
    return video


def noisy(frames: Frames, strength: int = 4, seed: int = 1) -> Frames:
    """Uniform noise of +- `strength` grey levels."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(-strength, strength + 1, frames.shape)
    return np.clip(frames.astype(int) + noise, 0, 255).astype(np.uint8)


def write_video(
    path: Path,
    frames: Frames,
    *,
    codec: str = "ffv1",
    pixel_format: str | None = None,
    fps: int | Fraction = 10,
    times_ms: Sequence[int] | None = None,
    rotation: int | None = None,
    matrix: int | None = None,
    alpha: Frames | None = None,
    options: dict[str, str] | None = None,
    format: str | None = None,
) -> Path:
    """Encode uint8 [T, H, W, 3]; FFV1 in RGB, the default, keeps every bit.

    `times_ms` gives every frame its own time; `alpha` is uint8 [T, H, W].
    """
    source = "rgba" if alpha is not None else "rgb24"
    chosen = pixel_format or ("bgra" if alpha is not None else "bgr0")
    with av.open(str(path), "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=Fraction(fps))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = chosen
        stream.options = options or {}
        if times_ms is not None:
            stream.codec_context.time_base = Fraction(1, TICKS)
            stream.time_base = Fraction(1, TICKS)
        if matrix is not None:
            stream.codec_context.colorspace = matrix
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for index, image in enumerate(frames):
            pixels = image if alpha is None else np.dstack([image, alpha[index]])
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=source)
            frame = frame.reformat(format=chosen, dst_colorspace=matrix)
            frame.pts = index if times_ms is None else times_ms[index]
            frame.time_base = 1 / Fraction(fps) if times_ms is None else Fraction(1, TICKS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def damaged_packet(path: Path, number: int) -> bytes:
    """The file of an H.264 video, the length of one packet's first unit made impossible.

    What a decoder always sees, whatever the encoder wrote, which differs from run to run: zeros
    within a packet may be another valid picture, and zeros between packets lose a frame unseen.
    """
    data = path.read_bytes()
    with av.open(str(path)) as container:
        packet = bytes([p for p in container.demux() if p.size][number])
    at = data.index(packet)
    return data[:at] + bytes([255] * 4) + data[at + 4 :]


def write_sound(path: Path) -> Path:
    """A second of silence and no video."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        for start in range(0, 44100, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate, frame.pts = 44100, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path
