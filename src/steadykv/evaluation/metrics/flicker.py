"""Flicker without a reference: what neither neighbour of a frame explains by motion.

Everything else that looks along time without a reference, or at its perceptual form, is to be had
from here too: temporal energy, VBench's formula and tLPIPS, each in its own file.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from steadykv.errors import ConfigError, ShapeError
from steadykv.evaluation.metrics.frames import PEAK, Frames, check_sides, check_window, frame_batch
from steadykv.evaluation.metrics.motion import displaced, lies_inside, match, softened
from steadykv.evaluation.metrics.ssim import LUMA
from steadykv.evaluation.metrics.temporal_energy import temporal_energy
from steadykv.evaluation.metrics.tlpips import tlpips_by_step
from steadykv.evaluation.metrics.vbench import vbench_flickering

__all__ = [
    "flicker_index",
    "flicker_index_of",
    "temporal_energy",
    "tlpips_by_step",
    "vbench_flickering",
]

WORKING_SIDE = 96
"""Larger frames are averaged down by a whole factor until their shorter side is about this."""
SMALLEST = 16


def flicker_index(video: Frames) -> Tensor:
    """Flicker of each frame that has two neighbours, FP64 [T - 2] or [B, T - 2]; lower is steadier.

    ``video`` is uint8 [T, H, W, 3] or [B, T, H, W, 3] with sides of at least 16. Element t - 1
    belongs to frame t. With a = v_t - v_(t-1) and b = v_t - v_(t+1), the neighbours read where
    :func:`motion.match` finds each pixel of v_t, and v_t softened as that reading softens them
    (three channels, means of absolute values over them), and with g the slope of the luma of
    v_t - (a + b) / 3, the mean of the three matched frames (central differences after a mean over
    3 x 3 pixels, in grey levels per pixel):

        e = min(|a|, |b|, |a + b|),   index = (mean of sqrt(e))² / sqrt(1 + mean of g)

    A step of motion or an uncovered background is explained by one neighbour, so that the minimum
    leaves it out; a fade has a = -b; what comes and goes from frame to frame has both, with one
    sign. The mean of square roots keeps few badly matched pixels from outweighing the rest, and
    still doubles when all e double. What matching misses of moving texture grows with about the
    root of its slopes from picture to picture, and texture hides flicker from the eye (spatial
    masking), hence the denominator; its 1, one grey level per pixel, is for pictures without any.
    Pixels whose place lies outside either neighbour do not count; NaN where there are none.

    Unit: the full range of a pixel, 0 .. 1, in a picture without texture. Static video gives
    exactly 0, a constant offset changes nothing (but for what it saturates), blur lowers it. Moving
    real video has a floor of 0.0003 to 0.003, which hardly depends on its speed (docs/metrics.md):
    compare paired videos, not a number with zero. A change that lasts for two frames or more counts
    in its first and last frame at most.

    Frames are averaged down by round(shorter side / 96), at least 1: the index sees flicker of
    areas of a hundredth of the picture's height, and less of finer noise. Our own definition; the
    parts are bidirectional motion compensation and minimum over both directions, as occlusion
    handling in frame interpolation has them (e.g. Herbst, Seitz, Baker 2009). Allocates about 100
    FP32 planes of the averaged size. Raises NonFiniteError, ShapeError (no uint8 frames, too few,
    too small).
    """
    frames = frame_batch(video, "video")
    count, height, width = frames.shape[1:4]
    if count < 3:
        raise ShapeError(f"video has {count} frames; the flicker index expects at least 3")
    check_sides(frames, SMALLEST, "the flicker index")
    factor = max(1, round(min(height, width) / WORKING_SIDE))
    before, middle = (_planes(frames[:, index], factor) for index in (0, 1))
    values = []
    for index in range(2, count):
        after = _planes(frames[:, index], factor)
        values.append(_index(before, middle, after))
        before, middle = middle, after
    result = torch.stack(values, dim=1) / PEAK
    return result if video.ndim == 5 else result[0]


def flicker_index_of(video: Frames, start: int = 0, end: int | None = None) -> Tensor:
    """Mean :func:`flicker_index` of frames ``start`` .. ``end`` - 1, FP64 [] or [B].

    The video's first and last frame have no index and are left out. Raises ConfigError (an empty
    window, one that leaves the video, or one without a frame between two others) and what
    :func:`flicker_index` raises.
    """
    count = frame_batch(video, "video").shape[1]
    start, end = check_window(start, end, count)
    first, stop = max(start, 1), min(end, count - 1)
    if count >= 3 and first >= stop:
        raise ConfigError(
            f"window [{start}, {end}) of {count} frames holds none that lies between two others; "
            "expected at least one"
        )
    near = video[..., first - 1 : stop + 1, :, :, :] if count >= 3 else video
    return flicker_index(near).mean(dim=-1)


def _planes(frames: Tensor, factor: int) -> Tensor:
    """uint8 [B, H, W, 3] -> FP32 [B, 3, H', W'], grey levels, averaged over factor x factor."""
    return functional.avg_pool2d(frames.movedim(-1, 1).float(), factor)


def _index(before: Tensor, middle: Tensor, after: Tensor) -> Tensor:
    """The index, FP64 [B], of frames FP32 [B, 3, H, W] in grey levels."""
    a, inside_before = _unexplained(middle, before)
    b, inside_after = _unexplained(middle, after)
    smaller = torch.minimum(a.abs().mean(dim=1), b.abs().mean(dim=1))
    left = torch.minimum(smaller, (a + b).abs_().mean(dim=1))
    slopes = _slope(_luma(middle - (a + b) / 3.0))
    counted = inside_before & inside_after
    number = counted.flatten(1).sum(dim=1)
    root, slope = (
        (x.double() * counted).flatten(1).sum(dim=1) / number for x in (left.sqrt_(), slopes)
    )
    return root.square() / (1.0 + slope).sqrt()


def _slope(luma: Tensor) -> Tensor:
    """Length of the gradient of FP32 [B, H, W] after a mean over 3 x 3 pixels."""
    p = functional.pad(luma[:, None], (2, 2, 2, 2), mode="replicate")
    p = functional.avg_pool2d(p, 3, 1)[:, 0]
    down, across = p[:, 2:, 1:-1] - p[:, :-2, 1:-1], p[:, 1:-1, 2:] - p[:, 1:-1, :-2]
    return torch.hypot(down, across) / 2.0


def _unexplained(middle: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """What motion from ``other`` leaves of ``middle``, FP32 [B, 3, H, W], and where it looked."""
    dy, dx = match(_luma(middle), _luma(other))
    flat_y, flat_x = (d.repeat_interleave(3, dim=0) for d in (dy, dx))
    own, seen = middle.flatten(0, 1), other.flatten(0, 1)
    left = softened(own, flat_y, flat_x) - displaced(seen, flat_y, flat_x)
    return left.view_as(middle), lies_inside(dy, dx)


def _luma(frame: Tensor) -> Tensor:
    """FP32 [B, H, W] of FP32 [B, 3, H, W]."""
    return (frame * torch.tensor(LUMA, device=frame.device)[:, None, None]).sum(dim=1)
