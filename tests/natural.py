"""A natural clip and known distortions of it, the same bytes on every machine where stated."""

from __future__ import annotations

import io
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import numpy as np
import torch

CLIP = Path(__file__).parent / "data" / "bunny.mp4"


@cache
def clip() -> torch.Tensor:
    """20 frames of Big Buck Bunny, uint8 [20, 180, 320, 3]; the same bytes everywhere.

    H.264 decodes to exact planes; the way to RGB (BT.601, limited range) is taken here in FP64,
    since that of an FFmpeg changes with its version.
    """
    frames = []
    with av.open(str(CLIP)) as container:
        for frame in container.decode(video=0):
            planes = frame.to_ndarray(format="yuv420p")
            height, width = frame.height, frame.width
            luma = planes[:height].astype(np.float64)
            chroma = planes[height:].reshape(2, height // 2, width // 2).astype(np.float64) - 128
            u, v = chroma.repeat(2, axis=1).repeat(2, axis=2)
            luma = (luma - 16) * (255 / 219)
            rgb = np.stack(
                [luma + 1.596 * v, luma - 0.392 * u - 0.813 * v, luma + 2.017 * u], axis=-1
            )
            frames.append(np.rint(rgb).clip(0, 255).astype(np.uint8))
    return torch.from_numpy(np.stack(frames))


def to_frames(values: torch.Tensor) -> torch.Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


def noisy(frames: torch.Tensor, strength: int, seed: int = 0) -> torch.Tensor:
    """Whole grey levels, even in -strength .. strength; the same bytes everywhere."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(-strength, strength + 1, frames.shape, generator=generator)
    return (frames.int() + noise).clamp(0, 255).to(torch.uint8)


def mosaic(frames: torch.Tensor, side: int) -> torch.Tensor:
    """Every square of side x side pixels shows its first pixel; the same bytes everywhere."""
    small = frames[:, ::side, ::side]
    large = small.repeat_interleave(side, 1).repeat_interleave(side, 2)
    return large[:, : frames.shape[1], : frames.shape[2]]


def blurred(frames: torch.Tensor, sigma: float) -> torch.Tensor:
    """Gaussian blur of every frame, edges repeated."""
    reach = int(3 * sigma + 1)
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float32)
    weights = torch.exp(-offsets.square() / (2 * sigma**2))
    kernel = (weights / weights.sum())[None, None].expand(3, 1, -1)
    planes = frames.movedim(-1, 1).float()
    padded = torch.nn.functional.pad(planes, (reach,) * 4, mode="replicate")
    wide = torch.nn.functional.conv2d(padded, kernel[:, :, None], groups=3)
    return to_frames(torch.nn.functional.conv2d(wide, kernel[..., None], groups=3).movedim(1, -1))


def flickering(frames: torch.Tensor, gain: float) -> torch.Tensor:
    """Frames times 1 + gain and 1 - gain in turn."""
    gains = 1.0 + gain * (1 - 2 * (torch.arange(len(frames)) % 2))
    return to_frames(frames.float() * gains[:, None, None, None])


def dropping(frames: torch.Tensor, lost: int) -> torch.Tensor:
    """Of every ``lost`` + 1 frames the first is shown ``lost`` + 1 times."""
    return frames[torch.arange(len(frames)) // (lost + 1) * (lost + 1)]


def compressed(frames: torch.Tensor, quality: int) -> torch.Tensor:
    """Through H.264 at constant rate factor ``quality`` (51 is the worst) and back."""
    memory = io.BytesIO()
    with av.open(memory, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        stream.options = {"crf": str(quality), "preset": "veryfast"}
        for index, pixels in enumerate(frames.numpy()):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    memory.seek(0)
    with av.open(memory) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(decoded))


def shared_images() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pairs uint8 [N, H, W, 3] whose LPIPS the published libraries gave: tests/data/lpips.json."""
    frames = clip()[::9]
    return {
        "noise 10": (frames, noisy(frames, 10)),
        "noise 60": (frames, noisy(frames, 60)),
        "mosaic 4": (frames, mosaic(frames, 4)),
        "half as bright": (frames, frames // 2),
        "later": (frames[:2], frames[1:]),
        "one row lower": (frames[:, :-1], frames[:, 1:]),
        "mirrored, 67 x 93": (frames[:, 50:117, 90:183], frames[:, 50:117, 90:183].flip(2)),
        "smallest": (frames[:, 60:91, 80:111], noisy(frames[:, 60:91, 80:111], 30)),
    }
