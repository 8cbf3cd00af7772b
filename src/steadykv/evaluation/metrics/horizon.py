"""Long videos: PSNR window by window, and whether a place looks the same when it is seen again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from steadykv.errors import ConfigError, ShapeError
from steadykv.evaluation.metrics.frames import Frames, frame_batch
from steadykv.evaluation.metrics.psnr import frame_mse, psnr_from_mse
from steadykv.evaluation.metrics.ssim import ssim_by_frame

Distance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Pairs of frames, uint8 [N, H, W, 3] twice, to one number each [N]: LPIPS, for example."""

PAIRS_AT_ONCE = 32
"""Frames gathered for one call: 2 x 32 copies of 1280 x 720 are 177 MB."""


@dataclass(frozen=True)
class WindowedPSNR:
    """starts [N]: first frame of each window of `window` frames. psnr: dB, FP64 [N] or [B, N]."""

    starts: tuple[int, ...]
    window: int
    psnr: torch.Tensor


def window_starts(frames: int, start: int, window: int, stride: int | None) -> tuple[int, ...]:
    """First frames of all whole windows from `start` on. Raises ConfigError if none fits."""
    step = window if stride is None else stride
    if window < 1 or step < 1 or not 0 <= start <= frames - window:
        raise ConfigError(
            f"windows of {window} frames every {step} from frame {start} on do not fit a video of "
            f"{frames} frames; expected window and stride of 1 or more, and at least one window"
        )
    return tuple(range(start, frames - window + 1, step))


def windowed_psnr(
    reference: Frames, video: Frames, start: int = 0, window: int = 24, stride: int | None = None
) -> WindowedPSNR:
    """PSNR of each window from the mean of its frames' errors, as `psnr` of that window.

    `reference` and `video` are uint8 [T, H, W, 3] or [B, T, H, W, 3]. Windows follow each other
    (`stride` frames apart, if given); frames that fill none are left out. Two rollouts of a
    generative model part within seconds, and then the curve shows how unlike two walks are, not
    what packing costs: it sinks to the level of another noise seed, and is to be read up to there.
    Allocates as frame_mse. Raises ConfigError, ShapeError or NonFiniteError.
    """
    mse = frame_mse(reference, video)
    starts = window_starts(mse.shape[-1], start, window, stride)
    means = torch.stack([mse[..., first : first + window].mean(dim=-1) for first in starts], dim=-1)
    return WindowedPSNR(starts, window, psnr_from_mse(means))


class Visit(Protocol):
    """Two frames that should look alike, as `evaluation.revisits` finds them."""

    @property
    def first(self) -> int: ...
    @property
    def second(self) -> int: ...
    @property
    def within(self) -> bool: ...
    @property
    def control(self) -> int | None: ...


@dataclass(frozen=True)
class Likeness:
    """How alike pairs of frames of one video are.

    psnr in dB, of the mean error of all pairs (inf: all equal); ssim: mean over pairs, RGB;
    distance: mean of the perceptual distance, None without one.
    """

    psnr: float
    ssim: float
    distance: float | None


@dataclass(frozen=True)
class RevisitConsistency:
    """Revisits of one kind. gap: mean frames between the visits.

    revisits: the two visits of each pair. controls: second visit against the pair's control, a
    frame as old that looked elsewhere, over the pairs that have one (`paired` of them); None
    without any. `revisits` above `controls` in PSNR and SSIM (below in distance) is what the video
    remembers; a video that is one dull picture scores high in both.
    """

    pairs: int
    paired: int
    gap: float
    revisits: Likeness
    controls: Likeness | None


def revisit_consistency(
    video: Frames, visits: Sequence[Visit], distance: Distance | None = None
) -> dict[str, RevisitConsistency]:
    """ "within" and "beyond" the window: does a place look the same when it is seen again?

    `video` is uint8 [T, H, W, 3], at least 11 x 11 pixels; it is compared with itself, so no
    reference is needed. A kind without visits is left out. `distance` gets uint8 pairs of at most
    32 frames. Copies 64 frames at a time, and allocates what frame_mse and ssim_by_frame do. Raises
    ShapeError for a batch of videos or visits outside the video, else as frame_batch.
    """
    frames = frame_batch(video, "video")
    if len(frames) != 1:
        raise ShapeError(f"video has {len(frames)} rows; expected one: visits belong to one walk")
    clip = frames[0]
    indices = [i for v in visits for i in (v.first, v.second, v.control) if i is not None]
    if indices and not 0 <= min(indices) <= max(indices) < len(clip):
        raise ShapeError(
            f"visits name frames {min(indices)} to {max(indices)}; expected some of the video's "
            f"{len(clip)}: find them in the poses of this video"
        )
    found = {}
    for name in ("within", "beyond"):
        chosen = [visit for visit in visits if visit.within == (name == "within")]
        if not chosen:
            continue
        controlled = [(v.control, v.second) for v in chosen if v.control is not None]
        found[name] = RevisitConsistency(
            pairs=len(chosen),
            paired=len(controlled),
            gap=sum(v.second - v.first for v in chosen) / len(chosen),
            revisits=_likeness(clip, [(v.first, v.second) for v in chosen], distance),
            controls=_likeness(clip, controlled, distance) if controlled else None,
        )
    return found


def _likeness(
    clip: torch.Tensor, pairs: Sequence[tuple[int, int]], distance: Distance | None
) -> Likeness:
    """Means over pairs of frames of clip [T, H, W, 3]."""
    errors, similar, distances = [], [], []
    for at in range(0, len(pairs), PAIRS_AT_ONCE):
        block = torch.tensor(pairs[at : at + PAIRS_AT_ONCE], device=clip.device)
        first, second = clip[block[:, 0]], clip[block[:, 1]]
        errors.append(frame_mse(first, second))
        similar.append(ssim_by_frame(first, second))
        if distance is not None:
            distances.append(distance(first, second).double())
    psnr = float(psnr_from_mse(torch.cat(errors).mean()))
    return Likeness(
        psnr=psnr if math.isfinite(psnr) else math.inf,
        ssim=float(torch.cat(similar).mean()),
        distance=float(torch.cat(distances).mean()) if distances else None,
    )
