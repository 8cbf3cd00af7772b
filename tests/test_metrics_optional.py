"""FLIP and VMAF: real where their optional packages are installed, a clear refusal where not."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch

from steadykv.errors import BackendUnavailable, ConfigError, ShapeError
from steadykv.evaluation.metrics.flip import flip_by_frame
from steadykv.evaluation.metrics.vmaf import vmaf_by_frame
from tests.natural import blurred, clip, noisy

METRICS = {
    "flip": ("flip_evaluator", flip_by_frame),
    "vmaf": ("imageio_ffmpeg", vmaf_by_frame),
}


def needed(extra: str) -> None:
    """Skips for one reason: the extra is optional, and this environment was made without it."""
    pytest.importorskip(
        METRICS[extra][0], reason=f"optional extra: pip install 'steadykv[{extra}]'"
    )


@pytest.mark.parametrize("extra", METRICS)
def test_without_its_package_a_metric_says_how_to_get_it(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, metric = METRICS[extra]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendUnavailable) as caught:
        metric(clip()[:1], clip()[:1])
    message = str(caught.value)
    assert f"pip install 'steadykv[{extra}]'" in message
    assert "\n" not in message
    with pytest.raises(ShapeError, match="video has shape"):  # frames are looked at first
        metric(clip()[:2], clip()[:1])


def test_flip_of_equal_frames_is_zero_and_grows_with_noise() -> None:
    needed("flip")
    frames = clip()[:2, :90, :160]
    assert flip_by_frame(frames, frames.clone()).tolist() == [0.0, 0.0]
    weak, strong = (flip_by_frame(frames, noisy(frames, strength)) for strength in (5, 40))
    assert weak.dtype == torch.float64
    assert bool((weak > 0).all() and (strong > 2 * weak).all() and (strong < 1).all())


def test_flip_of_one_colour_against_another_follows_the_viewing_distance() -> None:
    needed("flip")
    black = torch.zeros((1, 40, 40, 3), dtype=torch.uint8)
    assert flip_by_frame(black, 255 - black).item() == pytest.approx(1.0, abs=0.05)
    frames = clip()[:1, :90, :160]
    near, far = (
        flip_by_frame(frames, noisy(frames, 40), pixels_per_degree=ppd) for ppd in (20, 200)
    )
    assert near.item() > 1.5 * far.item()  # fine noise is not seen from afar
    with pytest.raises(ConfigError, match="pixels_per_degree is 0"):
        flip_by_frame(black, black, pixels_per_degree=0)


def test_vmaf_orders_blur_and_noise() -> None:
    needed("vmaf")
    frames = clip()[:6]
    equal = vmaf_by_frame(frames, frames.clone())
    assert equal.shape == (6,)
    assert equal.dtype == torch.float64
    assert bool((equal > 97).all())
    steps = [vmaf_by_frame(frames, blurred(frames, sigma)).mean() for sigma in (0.5, 1.0, 2.0)]
    steps += [torch.zeros(())]
    assert all(a > b + 5 for a, b in pairwise(steps)), steps
    noise = vmaf_by_frame(frames, noisy(frames, 10))
    assert 85 < noise.mean() < 96
    # The blurred video comes second: were the two swapped on their way, sharpening would be seen.
    assert vmaf_by_frame(blurred(frames, 1.0), frames).mean() > steps[1] + 5


def test_vmaf_takes_batches_and_odd_sizes() -> None:
    needed("vmaf")
    frames = clip()[:6, :101, :133].unflatten(0, (2, 3))
    other = noisy(frames, 10)
    together = vmaf_by_frame(frames, other)
    alone = torch.stack([vmaf_by_frame(frames[row], other[row]) for row in range(2)])
    assert torch.equal(together, alone)


def test_vmaf_says_what_is_wrong_with_ffmpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    needed("vmaf")
    frames = clip()[:3]
    for program, words in (
        (sys.executable, "ended with status"),  # Python does not take these options
        ("/nowhere/ffmpeg", "does not run|got no FFmpeg"),
    ):
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", program)
        with pytest.raises(BackendUnavailable, match=words) as caught:
            vmaf_by_frame(frames, frames)
        assert "IMAGEIO_FFMPEG_EXE" in str(caught.value)
    with pytest.raises(ShapeError, match="20 x 320 pixels; VMAF expects at least 32 x 32"):
        vmaf_by_frame(frames[:, :20], frames[:, :20])
