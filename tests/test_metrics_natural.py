"""On a natural clip every metric orders the strengths of known distortions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch

from steadykv.evaluation.metrics import flicker_error, psnr, ssim_by_frame
from steadykv.evaluation.metrics.lpips import lpips_by_frame
from steadykv.evaluation.metrics.ms_ssim import ms_ssim_by_frame
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
}


@cache
def distorted(name: str) -> list[torch.Tensor]:
    distort, strengths = DISTORTIONS[name]
    return [distort(clip()[:FRAMES], strength) for strength in strengths]


@pytest.mark.parametrize("distortion", DISTORTIONS)
@pytest.mark.parametrize("metric", METRICS)
def test_stronger_is_worse(metric: str, distortion: str) -> None:
    measure, more_is_worse = METRICS[metric]
    reference = clip()[:FRAMES]
    # The undistorted video comes first: perfect, so even the weakest distortion counts.
    values = [measure(reference, v).item() for v in (reference, *distorted(distortion))]
    assert values == sorted(set(values), reverse=not more_is_worse), values


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
