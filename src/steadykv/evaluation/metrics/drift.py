"""Drift: how colour and sharpness of a video move away from its own beginning.

Needs no reference video; with one, the drift that the reference has as well is taken off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steadykv.errors import ShapeError
from steadykv.evaluation.metrics.frames import Frames, frame_batch
from steadykv.evaluation.metrics.horizon import window_starts
from steadykv.evaluation.metrics.ssim import LUMA

LEVELS, ENERGY, SHARE = "grey levels", "grey levels^2", "share"

UNITS = {
    "mean_red": LEVELS,
    "mean_green": LEVELS,
    "mean_blue": LEVELS,
    "std_red": LEVELS,
    "std_green": LEVELS,
    "std_blue": LEVELS,
    "saturation": SHARE,
    "gradient_energy": ENERGY,
    "laplacian_variance": ENERGY,
}
"""Statistic -> unit; grey levels run from 0 to 255."""


def frame_statistics(video: Frames) -> dict[str, torch.Tensor]:
    """Colour and sharpness of each frame: the names of UNITS -> FP64 [T] or [B, T].

    `video` is uint8 [T, H, W, 3] or [B, T, H, W, 3], at least 3 x 3 pixels.
    mean_*, std_*: of a channel over the frame's pixels (population deviation).
    saturation: mean of (max - min) / max of R, G, B, 0 for black (the S of HSV).
    gradient_energy: mean squared step of BT.601 luma to the right plus that downwards.
    laplacian_variance: variance of 4-neighbour Laplacian of luma over the inner pixels, the focus
    measure of Pech-Pacheco et al. 2000. Noise and tiles raise both as detail does: neither says
    that a picture is good.
    Works frame by frame and allocates about 40 bytes per pixel value of one frame of every video.
    Raises ShapeError or NonFiniteError.
    """
    return _statistics(video, "video")


def _statistics(video: Frames, name: str) -> dict[str, torch.Tensor]:
    """`frame_statistics` of the argument ``name`` of whoever asks."""
    frames = frame_batch(video, name)
    if min(frames.shape[2:4]) < 3:
        raise ShapeError(
            f"{name} has frames of {frames.shape[2]} x {frames.shape[3]} pixels; expected at least "
            "3 x 3"
        )
    rows: list[torch.Tensor] = []
    for index in range(frames.shape[1]):
        levels = frames[:, index].float()  # [B, H, W, 3]
        pixels = levels.flatten(1, 2).double()
        most, least = levels.amax(-1), levels.amin(-1)
        saturation = ((most - least) / most.clamp_min(1.0)).flatten(1).double().mean(1)
        # not a product of matrices, whose last bits depend on how many videos there are
        luma = sum(levels[..., place] * weight for place, weight in enumerate(LUMA))
        assert isinstance(luma, torch.Tensor)
        across, down = luma.diff(dim=2), luma.diff(dim=1)
        energy = [step.double().square().flatten(1).mean(1) for step in (across, down)]
        inner = luma[:, 1:-1, 1:-1]
        sides = luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:] + luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1]
        laplacian = (sides - 4.0 * inner).double().flatten(1)
        rows.append(
            torch.cat(
                (
                    pixels.mean(1),
                    pixels.std(1, correction=0),
                    saturation[:, None],
                    (energy[0] + energy[1])[:, None],
                    laplacian.var(1, correction=0)[:, None],
                ),
                dim=1,
            )
        )
    table = torch.stack(rows, dim=1)  # [B, T, 9]
    if torch.as_tensor(video).dim() == 4:
        table = table[0]
    return {unit: table[..., place] for place, unit in enumerate(UNITS)}


@dataclass(frozen=True)
class Drift:
    """One statistic over windows that follow each other; all FP64 [N] or [B, N], in `unit`.

    values: mean over each window. change: values minus those of the first window. excess: change
    minus the reference's change, so that what the walk itself brings about (a dark corridor) is
    taken off as far as both walks see the same; None without a reference.
    """

    unit: str
    starts: tuple[int, ...]
    window: int
    values: torch.Tensor
    change: torch.Tensor
    excess: torch.Tensor | None


def drift(
    video: Frames,
    reference: Frames | None = None,
    *,
    start: int = 0,
    window: int = 24,
    stride: int | None = None,
) -> dict[str, Drift]:
    """Drift of every statistic of `frame_statistics` from the window that begins at `start`.

    `video` and `reference` are uint8 [T, H, W, 3] or [B, T, H, W, 3] of equal batch and length;
    sizes may differ, though energies of other sizes do not compare. A walk changes its statistics
    by going somewhere else: compare methods over the same walks, and look at `excess`.
    Raises ConfigError if no window fits, ShapeError, NonFiniteError.
    """
    found = frame_statistics(video)
    length = next(iter(found.values())).shape
    starts = window_starts(length[-1], start, window, stride)
    others = None
    if reference is not None:
        others = _statistics(reference, "reference")
        shape = next(iter(others.values())).shape
        if shape != length:
            raise ShapeError(
                f"reference has {tuple(shape)} frames, video {tuple(length)}; expected as many: "
                "cut the longer one"
            )

    def means(by_frame: torch.Tensor) -> torch.Tensor:
        return torch.stack([by_frame[..., s : s + window].mean(-1) for s in starts], dim=-1)

    drifts = {}
    for name, by_frame in found.items():
        values = means(by_frame)
        change = values - values[..., :1]
        excess = None
        if others is not None:
            expected = means(others[name])
            excess = change - (expected - expected[..., :1])
        drifts[name] = Drift(UNITS[name], starts, window, values, change, excess)
    return drifts
