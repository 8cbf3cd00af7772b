"""On a natural clip every metric orders the strengths of known distortions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch

from steadykv.evaluation.metrics import flicker_error, psnr, ssim_by_frame
from steadykv.evaluation.metrics.flicker import (
    flicker_index_of,
    temporal_energy,
    tlpips_by_step,
    vbench_flickering,
)
from steadykv.evaluation.metrics.flip import flip_by_frame
from steadykv.evaluation.metrics.flow import warped_error_by_step
from steadykv.evaluation.metrics.lpips import lpips_by_frame
from steadykv.evaluation.metrics.ms_ssim import ms_ssim_by_frame
from steadykv.evaluation.metrics.vmaf import vmaf_by_frame
from tests.natural import blurred, clip, compressed, dropping, flickering, noisy

FRAMES = 8
# Name: the distortion and its strengths, rising.
DISTORTIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[float, ...]]] = {
    "blur": (blurred, (0.5, 1.0, 2.0, 4.0)),
    "noise": (noisy, (2, 8, 24, 64)),
    "flicker": (flickering, (0.01, 0.03, 0.1, 0.3)),
    "frame drop": (dropping, (1, 2, 3)),
    # At a constant rate factor of 44 this clip stands still, and the last test begins to hold.
    "compression": (compressed, (12, 20, 28, 36)),
}
# Name: one number for a video, and whether more of it is worse.
METRICS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "PSNR": (psnr, False),
    "SSIM": (lambda a, b: ssim_by_frame(a, b).mean(), False),
    "SSIM of luma": (lambda a, b: ssim_by_frame(a, b, "luma").mean(), False),
    "MS-SSIM": (lambda a, b: ms_ssim_by_frame(a, b).mean(), False),
    "LPIPS": (lambda a, b: lpips_by_frame(a, b).mean(), True),
    "flicker error": (flicker_error, True),
    "tLPIPS": (lambda a, b: tlpips_by_step(a, b).mean(), True),
    "FLIP": (lambda a, b: flip_by_frame(a, b).mean(), True),
    "VMAF": (lambda a, b: vmaf_by_frame(a, b).mean(), False),
}
# Name: one number for a video. They ask how much it changes along time, not what it shows, so that
# whatever takes detail or motion away makes a video steadier for them.
ALONG_TIME: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "warped error": lambda a, b: warped_error_by_step(b, a).nanmean(),
    "flicker index": lambda a, b: flicker_index_of(b),
    "energy 0.25-0.5": lambda a, b: temporal_energy(b)["0.25-0.5"],
    "VBench flickering": lambda a, b: 1.0 - vbench_flickering(b),
}
# Name: the distortions that make a video steadier for it; all others add flicker.
CALMING = {
    "warped error": ("blur", "compression"),
    "flicker index": ("blur", "compression", "frame drop"),
    "energy 0.25-0.5": ("blur",),
    "VBench flickering": ("blur", "compression", "frame drop"),
}
NEEDED = {"FLIP": "flip_evaluator", "VMAF": "imageio_ffmpeg", "warped error": "cv2"}


@cache
def distorted(name: str) -> list[torch.Tensor]:
    distort, strengths = DISTORTIONS[name]
    return [distort(clip()[:FRAMES], strength) for strength in strengths]


def needs(metric: str) -> None:
    if metric in NEEDED:
        pytest.importorskip(NEEDED[metric], reason=f"optional extra of {metric}")


@pytest.mark.parametrize("distortion", DISTORTIONS)
@pytest.mark.parametrize("metric", METRICS)
def test_stronger_is_worse(metric: str, distortion: str) -> None:
    measure, more_is_worse = METRICS[metric]
    needs(metric)
    reference = clip()[:FRAMES]
    # The undistorted video comes first: perfect, so even the weakest distortion counts.
    values = [measure(reference, v).item() for v in (reference, *distorted(distortion))]
    assert values == sorted(set(values), reverse=not more_is_worse), values


@pytest.mark.parametrize("distortion", DISTORTIONS)
@pytest.mark.parametrize("metric", ALONG_TIME)
def test_what_looks_along_time_is_ordered_too(metric: str, distortion: str) -> None:
    needs(metric)
    reference = clip()[:FRAMES]
    measure = ALONG_TIME[metric]
    values = [measure(reference, v).item() for v in (reference, *distorted(distortion))]
    if (metric, distortion) == ("energy 0.25-0.5", "frame drop"):
        values = values[:-1]  # the third drop adds no fast change to eight frames
    expected = sorted(set(values), reverse=distortion in CALMING[metric])
    assert values == expected, values


def test_an_even_change_of_brightness_does_not_flicker_and_an_alternating_one_does() -> None:
    """The same gain in every frame, or with alternating sign: alike in PSNR, not in flicker."""
    reference = clip()[:FRAMES]
    steady = (reference.float() * 1.03).round().clamp(0, 255).to(torch.uint8)
    alternating = flickering(reference, 0.03)
    assert psnr(reference, steady).item() == pytest.approx(
        psnr(reference, alternating).item(), abs=0.3
    )
    assert flicker_error(reference, alternating) > 5 * flicker_error(reference, steady)


def test_flicker_error_is_proportional_to_the_gain() -> None:
    reference = (clip()[:FRAMES].float() * 0.6).to(torch.uint8)  # no pixel saturates
    values = [flicker_error(reference, flickering(reference, g)).item() for g in (0.05, 0.1, 0.2)]
    for weaker, stronger in pairwise(values):
        assert stronger == pytest.approx(2 * weaker, rel=0.02)


def test_flicker_error_of_a_frozen_video_is_the_motion_that_it_lacks() -> None:
    """Its ceiling for whatever takes motion away: more loss than that is not more flicker."""
    reference = clip()[:FRAMES]
    frozen = reference[:1].expand_as(reference)
    motion = reference.double().diff(dim=0).abs().mean() / 255
    assert flicker_error(reference, frozen).item() == pytest.approx(motion.item(), rel=1e-12)
    assert flicker_error(reference, dropping(reference, 3)) < motion
    assert psnr(reference, frozen) < psnr(reference, dropping(reference, 3)) - 5
