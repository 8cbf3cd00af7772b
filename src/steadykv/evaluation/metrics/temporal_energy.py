"""Where in temporal frequency a video changes: the spectrum of each block's brightness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional

from steadykv.errors import ConfigError, ShapeError
from steadykv.evaluation.metrics.frames import PEAK, Frames, frame_batch
from steadykv.evaluation.metrics.ssim import LUMA

EDGES = (0.0, 0.0625, 0.125, 0.25, 0.5)
"""Octaves of the frame rate; the last band holds what alternates from frame to frame."""
SHORTEST = 4


def temporal_energy(
    video: Frames, fps: float | None = None, edges: Sequence[float] = EDGES, block: int = 8
) -> dict[str, torch.Tensor]:
    """Variance along time of the blocks' luma in each band, {band: FP64 [] or [B]}.

    ``video`` is uint8 [T, H, W, 3] or [B, T, H, W, 3]. A block is ``block`` x ``block`` pixels
    (what is left at the right and lower edge is not looked at); its mean BT.601 luma over time,
    less the mean, goes through a Hann window and a Fourier transform. Band [low, high) of
    ``edges``, in fractions of the frame rate (the last one holds its upper edge), sums the power of
    its frequencies, averaged over blocks: (full range of a pixel)², so that all bands together are
    the variance. Names are "0.25-0.5" in fractions, or in Hz, "6-12 Hz", where ``fps`` is given.

    A static video gives exactly 0 and a constant offset changes nothing. Motion is not taken out:
    fast texture is fast energy (the flicker index tells them apart). Welch 1967, one segment.
    Allocates 24 bytes per block of all T frames and 16 per pixel of a frame. Raises ConfigError
    (edges, block, fps) and NonFiniteError, ShapeError (frames; fewer than 4; smaller than a block).
    """
    frames = frame_batch(video, "video")
    count, height, width = frames.shape[1:4]
    if not (
        len(edges) > 1 and edges[0] >= 0 and edges[-1] <= 0.5 and list(edges) == sorted(set(edges))
    ):
        raise ConfigError(
            f"edges are {list(edges)}; expected rising fractions of the frame rate within 0 .. 0.5"
        )
    if fps is not None and not (math.isfinite(fps) and fps > 0):
        raise ConfigError(f"fps is {fps}; expected a positive number of frames a second")
    if not 1 <= block <= min(height, width):
        raise ConfigError(
            f"block is {block}; expected 1 to {min(height, width)}, the shorter side of a frame"
        )
    if count < SHORTEST:
        raise ShapeError(f"video has {count} frames; temporal energy expects at least {SHORTEST}")
    blocks = torch.stack([_means(frames[:, i], block) for i in range(count)], dim=-1)
    blocks -= blocks[..., :1].clone()  # exact zeros where nothing changes
    blocks -= blocks.mean(dim=-1, keepdim=True)
    window = torch.hann_window(count, periodic=True, dtype=torch.float64, device=frames.device)
    power = torch.fft.rfft(blocks * window).abs().square_()
    # One side holds both: all but 0 and, for an even length, half the frame rate count twice.
    power[..., 1 : (count + 1) // 2] *= 2.0
    power /= count * window.square().sum()
    by_frequency = power.flatten(1, -2).mean(dim=1)
    frequency = torch.arange(by_frequency.shape[-1], device=frames.device) / count
    found = {}
    for low, high in pairwise(edges):
        inside = (frequency >= low) & (frequency < high)
        if high == edges[-1]:
            inside |= frequency == high
        energy = by_frequency[:, inside].sum(dim=1)
        name = f"{low:g}-{high:g}" if fps is None else f"{low * fps:g}-{high * fps:g} Hz"
        found[name] = energy if video.ndim == 5 else energy[0]
    return found


def _means(frames: torch.Tensor, block: int) -> torch.Tensor:
    """Mean luma of every block over 255: uint8 [B, H, W, 3] -> FP64 [B, H // block, W // block]."""
    luma = frames.double() @ torch.tensor(LUMA, dtype=torch.float64, device=frames.device)
    return functional.avg_pool2d(luma[:, None], block)[:, 0] / PEAK
