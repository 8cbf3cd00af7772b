"""MS-SSIM against pytorch-msssim and against the authors' steps written out, and its limits."""

from __future__ import annotations

import numpy as np
import pytest
import pytorch_msssim
import torch

from steadykv.errors import ConfigError, NonFiniteError, ShapeError
from steadykv.evaluation.metrics.ms_ssim import ms_ssim_by_frame
from steadykv.evaluation.metrics.ssim import BLOCK, WINDOW, ssim_by_frame
from tests.natural import blurred, clip, noisy

WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)


def luma(frames: torch.Tensor) -> torch.Tensor:
    return frames.double() @ torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)


def test_agrees_with_pytorch_msssim() -> None:
    reference = clip()[:1, :176, 100:292]  # sides that can be halved four times
    for video in (noisy(reference, 4), noisy(reference, 90), blurred(reference, 2.0)):
        for channels, planes in (
            ("luma", [luma(x).float()[:, None] for x in (reference, video)]),
            ("rgb", [x.movedim(-1, 1).float() for x in (reference, video)]),
        ):
            ours = ms_ssim_by_frame(reference, video, channels=channels)
            theirs = pytorch_msssim.ms_ssim(*planes, data_range=255, size_average=False)
            assert torch.allclose(ours, theirs.double(), atol=5e-5)
    assert not torch.allclose(
        ms_ssim_by_frame(reference, video), ssim_by_frame(reference, video, "luma"), atol=1e-2
    )


def filtered(image: np.ndarray) -> np.ndarray:
    offsets = np.arange(11) - 5
    weights = np.exp(-(offsets**2) / (2 * 1.5**2))
    weights /= weights.sum()
    for axis in (0, 1):
        image = np.apply_along_axis(np.convolve, axis, image, weights, "valid")
    return image


def written_out(x: np.ndarray, y: np.ndarray) -> float:
    """The 2003 paper in FP64, halving as the authors' code: mirrored edges, every other pixel."""
    result = 1.0
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    for scale, weight in enumerate(WEIGHTS):
        if scale:
            x, y = (
                (p[:-1, :-1] + p[1:, :-1] + p[:-1, 1:] + p[1:, 1:])[::2, ::2] / 4
                for p in (np.pad(z, ((0, 1), (0, 1)), mode="symmetric") for z in (x, y))
            )
        mean_x, mean_y = filtered(x), filtered(y)
        covariance = filtered(x * y) - mean_x * mean_y
        variances = filtered(x * x) - mean_x**2 + filtered(y * y) - mean_y**2
        term = (2 * covariance + c2) / (variances + c2)
        if scale == 4:
            term *= (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
        result *= max(term.mean(), 0.0) ** weight
    return float(result)


@pytest.mark.parametrize("size", [(161, 163), (177, 190)])
def test_odd_sizes_follow_the_authors(size: tuple[int, int]) -> None:
    reference = clip()[3:4, : size[0], : size[1]]
    video = noisy(reference, 50)
    expected = written_out(luma(reference)[0].numpy(), luma(video)[0].numpy())
    assert ms_ssim_by_frame(reference, video).item() == pytest.approx(expected, abs=1e-6)


def test_identical_videos_give_exactly_one() -> None:
    frames = clip()[:4].unflatten(0, (2, 2))
    for channels in ("luma", "rgb"):
        assert ms_ssim_by_frame(frames, frames.clone(), channels).tolist() == [[1.0] * 2] * 2
    for height in range(WINDOW, WINDOW + 2 * BLOCK + 2):
        cut = clip()[:1, :height, : 2 * WINDOW + BLOCK]
        assert ssim_by_frame(cut, cut.clone()).tolist() == [1.0]


def test_a_batch_equals_its_videos_alone() -> None:
    frames = clip()[:4].unflatten(0, (2, 2))
    other = noisy(frames, 30)
    together = ms_ssim_by_frame(frames, other)
    assert torch.equal(
        together, torch.stack([ms_ssim_by_frame(frames[i], other[i]) for i in (0, 1)])
    )
    assert torch.equal(together, ms_ssim_by_frame(other, frames))


def test_an_inverted_video_counts_as_nothing() -> None:
    """Its structure is negative at every scale: no real power of that exists."""
    frames = clip()[:1]
    assert ms_ssim_by_frame(frames, 255 - frames).item() == 0.0


def test_a_host_that_lowered_the_precision_changes_nothing() -> None:
    frames = clip()[:1]
    other = noisy(frames, 30)
    expected = ms_ssim_by_frame(frames, other), ssim_by_frame(frames, other)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ms_ssim_by_frame(frames, other), expected[0])
            assert torch.equal(ssim_by_frame(frames, other), expected[1])
    finally:
        torch.set_float32_matmul_precision(before)


def test_what_it_refuses() -> None:
    good = clip()[:2]
    with pytest.raises(ShapeError, match=r"160 x 320 pixels; MS-SSIM expects at least 161 x 161"):
        ms_ssim_by_frame(good[:, :160], good[:, :160])
    with pytest.raises(ConfigError, match="rgb"):
        ms_ssim_by_frame(good, good, channels="yuv")
    with pytest.raises(ShapeError, match="video has shape"):
        ms_ssim_by_frame(good, good[:1])
    broken = good.float()
    broken[1, 2, 3, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="reference holds NaN or inf"):
        ms_ssim_by_frame(broken, good)
