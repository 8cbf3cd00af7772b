"""PSNR, SSIM and flicker on raw uint8 frames: against oracles, by hand, and on bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import pytorch_msssim
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadykv.errors import ConfigError, NonFiniteError, ShapeError
from steadykv.evaluation.metrics import (
    flicker_by_step,
    flicker_error,
    frame_mse,
    psnr,
    psnr_by_frame,
    psnr_from_mse,
    ssim_by_frame,
    window_flicker,
)


def noisy_pair(
    shape: tuple[int, ...], strength: int = 40, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A smooth random video and a disturbed copy, uint8 of ``shape`` [..., H, W, 3]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand((math.prod(shape[:-3]), 3, 4, 4), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=shape[-3:-1], mode="bilinear")
    reference = (smooth.movedim(1, -1) * 255).round().to(torch.uint8).reshape(shape)
    noise = torch.randint(-strength, strength + 1, shape, generator=generator)
    return reference, (reference.int() + noise).clamp_(0, 255).to(torch.uint8)


def test_identical_videos_are_perfect() -> None:
    video, _ = noisy_pair((2, 4, 19, 23, 3))
    assert psnr(video, video).tolist() == [math.inf, math.inf]
    assert bool((psnr_by_frame(video, video) == math.inf).all())
    for channels in ("rgb", "luma"):
        assert bool((ssim_by_frame(video, video, channels) == 1.0).all())
    assert flicker_error(video, video).tolist() == [0.0, 0.0]


def test_psnr_follows_its_definition() -> None:
    reference, video = noisy_pair((5, 16, 20, 3))
    error = (reference.double() - video.double()).square().mean(dim=(1, 2, 3))
    assert torch.equal(frame_mse(reference, video), error)
    assert torch.allclose(psnr_by_frame(reference, video), 10 * torch.log10(255**2 / error))
    assert torch.equal(psnr(reference, video, 1, 4), psnr_from_mse(error[1:4].mean()))


def test_large_errors_are_summed_without_rounding() -> None:
    generator = torch.Generator().manual_seed(1)
    video = torch.randint(230, 256, (2, 41, 53, 3), dtype=torch.uint8, generator=generator)
    exact = video.long().square().sum(dim=(1, 2, 3)).double() / video[0].numel()
    assert torch.equal(frame_mse(torch.zeros_like(video), video), exact)


def test_psnr_of_one_grey_level() -> None:
    reference = torch.full((3, 96, 128, 3), 100, dtype=torch.uint8)
    everywhere = reference + 1
    assert psnr(reference, everywhere).item() == pytest.approx(48.1308, abs=1e-4)
    once = reference.clone()
    once[1, 5, 6, 2] += 1
    assert psnr(reference, once).item() == pytest.approx(98.57, abs=0.01)
    assert torch.isinf(psnr_by_frame(reference, once)).tolist() == [True, False, True]


def test_a_window_counts_error_not_decibels() -> None:
    reference = torch.zeros((2, 11, 11, 3), dtype=torch.uint8)
    video = reference.clone()
    video[1] = 255  # one frame lost entirely, the other perfect
    assert psnr(reference, video).item() == pytest.approx(10 * math.log10(2))


@pytest.mark.parametrize("size", [(96, 128), (11, 11), (33, 12)])
def test_ssim_agrees_with_pytorch_msssim(size: tuple[int, int]) -> None:
    for strength in (1, 12, 120):
        reference, video = noisy_pair((2, 3, *size, 3), strength)
        ours = ssim_by_frame(reference, video)
        planes = [x.flatten(0, 1).movedim(-1, 1).float() for x in (reference, video)]
        theirs = pytorch_msssim.ssim(*planes, data_range=255, size_average=False)
        assert torch.allclose(ours.flatten(), theirs.double(), atol=1e-4)
        weights = torch.tensor([0.299, 0.587, 0.114])
        grey = [torch.einsum("nchw,c->nhw", x, weights)[:, None] for x in planes]
        theirs = pytorch_msssim.ssim(*grey, data_range=255, size_average=False)
        luma = ssim_by_frame(reference, video, channels="luma")
        assert torch.allclose(luma.flatten(), theirs.double(), atol=1e-4)
        assert not torch.allclose(luma, ours, atol=1e-4)


def test_ssim_of_flat_grey_follows_the_luminance_term() -> None:
    reference = torch.full((1, 16, 16, 3), 100, dtype=torch.uint8)
    video = torch.full((1, 16, 16, 3), 150, dtype=torch.uint8)
    c1 = (0.01 * 255) ** 2
    expected = (2 * 100 * 150 + c1) / (100**2 + 150**2 + c1)
    assert ssim_by_frame(reference, video).item() == pytest.approx(expected, abs=1e-4)


def test_flicker_sees_change_and_nothing_else() -> None:
    reference, _ = noisy_pair((4, 12, 12, 3))
    reference = reference // 2
    assert flicker_error(reference, reference + 60).item() == 0.0  # an offset does not flicker
    blinking = reference.clone()
    blinking[2] += 51  # one frame brighter by a fifth of the range: the steps in and out are wrong
    assert flicker_by_step(reference, blinking).tolist() == pytest.approx([0.0, 0.2, 0.2])
    assert flicker_error(reference, blinking).item() == pytest.approx(0.4 / 3)
    assert flicker_error(reference, blinking, 2, 3).item() == pytest.approx(0.2)
    assert flicker_error(reference, blinking, 0, 2).item() == 0.0


def test_flicker_does_not_wrap_around() -> None:
    reference = torch.zeros((3, 11, 11, 3), dtype=torch.uint8)
    reference[1] = 255
    inverse = 255 - reference
    assert flicker_by_step(reference, inverse).tolist() == [2.0, 2.0]


@given(
    batch=st.integers(1, 3),
    frames=st.integers(2, 4),
    height=st.integers(11, 17),
    width=st.integers(11, 17),
    seed=st.integers(0, 99),
)
def test_a_batch_equals_its_videos_alone(
    batch: int, frames: int, height: int, width: int, seed: int
) -> None:
    reference, video = noisy_pair((batch, frames, height, width, 3), seed=seed)
    for metric in (psnr_by_frame, ssim_by_frame, flicker_by_step, psnr, flicker_error):
        together = metric(reference, video)
        alone = torch.stack([metric(reference[i], video[i]) for i in range(batch)])
        assert torch.equal(together, alone)
        assert torch.equal(metric(video, reference), together)  # none prefers a side


def test_numpy_frames_and_torch_frames_give_the_same() -> None:
    reference, video = noisy_pair((2, 12, 12, 3))
    as_numpy = np.asarray(reference), np.asarray(video)
    for metric in (psnr, ssim_by_frame, flicker_error):
        assert torch.equal(metric(reference, video), metric(*as_numpy))


def test_non_contiguous_frames_are_read_right() -> None:
    reference, video = noisy_pair((3, 24, 26, 3))
    views = reference[:, ::2, ::2], video[:, ::2, ::2]
    copies = [x.contiguous() for x in views]
    for metric in (psnr_by_frame, ssim_by_frame, flicker_by_step):
        assert torch.equal(metric(*views), metric(*copies))


@pytest.mark.parametrize("metric", [frame_mse, ssim_by_frame, flicker_by_step])
def test_bad_frames_are_refused_by_name(metric) -> None:  # type: ignore[no-untyped-def]
    good = torch.zeros((2, 12, 12, 3), dtype=torch.uint8)
    broken = good.float()
    broken[0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="video holds NaN"):
        metric(good, broken)
    with pytest.raises(ShapeError, match=r"reference has dtype torch.float32; expected uint8"):
        metric(good.float(), good)
    with pytest.raises(ShapeError, match=r"video has shape \(2, 12, 13, 3\), reference"):
        metric(good, torch.zeros((2, 12, 13, 3), dtype=torch.uint8))
    with pytest.raises(ShapeError, match="channels last"):
        metric(good, good.movedim(-1, 1))
    with pytest.raises(ShapeError, match="video has shape"):
        metric(good, good[None])
    with pytest.raises(ShapeError, match="at least one frame"):
        metric(good[:0], good[:0])


def test_bad_windows_and_sizes_are_refused() -> None:
    video = torch.zeros((3, 12, 12, 3), dtype=torch.uint8)
    for start, end in ((2, 2), (0, 4), (-1, 2), (3, None)):
        with pytest.raises(ConfigError, match="window"):
            psnr(video, video, start, end)
    with pytest.raises(ConfigError, match="window"):
        flicker_error(video, video, 0, 1)  # frame 0 has no step
    with pytest.raises(ShapeError, match="1 frame"):
        flicker_error(video[:1], video[:1])
    with pytest.raises(ShapeError, match="11 x 11"):
        ssim_by_frame(video[:, :10], video[:, :10])
    with pytest.raises(ConfigError, match="rgb"):
        ssim_by_frame(video, video, channels="yuv")
    with pytest.raises(NonFiniteError, match="1 NaN of 2"):
        psnr_from_mse(torch.tensor([1.0, float("nan")]))


def test_metrics_leave_the_global_generator_alone() -> None:
    reference, video = noisy_pair((2, 12, 12, 3))
    before = torch.get_rng_state()
    psnr(reference, video), ssim_by_frame(reference, video), flicker_error(reference, video)
    assert torch.equal(before, torch.get_rng_state())


def test_window_flicker_takes_the_step_into_the_window() -> None:
    steps = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)  # into frames 1, 2, 3
    assert window_flicker(steps, 2).item() == 2.0
    assert window_flicker(steps, 2, 3).item() == 1.0
    assert window_flicker(steps).item() == 1.5
