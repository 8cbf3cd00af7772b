"""Metrics along time: the flicker index on real frames, spectra, tLPIPS and the warped error."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.flicker import with_flicker
from benchmarks.flicker_clip import read_clip
from steadykv.errors import BackendUnavailable, ConfigError, NonFiniteError, ShapeError
from steadykv.evaluation.metrics.flicker import (
    flicker_index,
    flicker_index_of,
    temporal_energy,
    tlpips_by_step,
    vbench_flickering,
)
from steadykv.evaluation.metrics.flow import visible_pixels, warped_error_by_step
from steadykv.evaluation.metrics.lpips import LPIPS
from steadykv.evaluation.metrics.motion import displaced, match, softened
from tests.natural import blurred

CLIP = Path(__file__).parent / "data" / "walk-and-turn.mp4"


@pytest.fixture(scope="module")
def walk() -> torch.Tensor:
    """A real walk with a turn, one tic a frame: uint8 [21, 96, 128, 3]."""
    return torch.from_numpy(read_clip(CLIP))


def test_a_static_video_does_not_flicker(walk: torch.Tensor) -> None:
    still = walk[:1].expand(6, -1, -1, -1)
    assert flicker_index(still).tolist() == [0.0] * 4
    assert [value.item() for value in temporal_energy(still).values()] == [0.0] * 4
    assert vbench_flickering(still).item() == 1.0
    assert tlpips_by_step(still, still).tolist() == [0.0] * 5
    pytest.importorskip("cv2")
    assert warped_error_by_step(still).tolist() == [0.0] * 5


def test_a_constant_offset_changes_nothing(walk: torch.Tensor) -> None:
    dark = walk[:6].clamp(max=200)
    assert torch.allclose(flicker_index(dark + 55), flicker_index(dark), rtol=2e-3)
    before, after = temporal_energy(dark), temporal_energy(dark + 55)
    assert all(torch.allclose(before[band], after[band]) for band in before)


def test_the_index_does_not_see_the_speed_of_the_camera(walk: torch.Tensor) -> None:
    slow, fast = flicker_index_of(walk), flicker_index_of(walk[::2])
    assert 0.9 < fast / slow < 1.3
    assert 0.2 < 255 * slow < 1.5  # the floor of this clip, in grey levels
    difference = [1.0 - vbench_flickering(walk[::step]) for step in (1, 2)]
    assert difference[1] / difference[0] > 1.4  # what VBench's formula makes of it


@pytest.mark.parametrize(
    ("kind", "strengths", "exponents"),
    [
        ("gain", (0.04, 0.08, 0.16), (0.9, 1.4)),
        # Blocks of a random sign are texture too: matching explains a part of them, and they hide
        # another, so that twice the strength adds less than twice as much.
        ("block", (0.01, 0.02, 0.04, 0.08), (0.5, 1.1)),
        ("noise", (2.0, 4.0, 8.0), (0.9, 1.2)),
    ],
)
def test_the_index_grows_with_flicker(
    walk: torch.Tensor,
    kind: str,
    strengths: tuple[float, ...],
    exponents: tuple[float, float],
) -> None:
    """What flicker adds grows as a power of its strength; 1 is proportion."""
    fast = walk[:14:2]
    floor = flicker_index_of(fast)
    added = [flicker_index_of(with_flicker(fast, kind, s)) - floor for s in strengths]
    assert added[0] > 0.15 * floor
    for weaker, stronger in pairwise(added):
        assert exponents[0] < math.log2(stronger / weaker) < exponents[1]


def test_blur_is_no_flicker(walk: torch.Tensor) -> None:
    """A blurred video has a lower index: a method that blurs does not count as flickering."""
    assert flicker_index_of(blurred(walk, 0.7)) < 0.9 * flicker_index_of(walk)


def test_the_index_by_hand() -> None:
    """One level up and down: |a| = |b| = 1 or 2, |a + b| twice that; a fade has a = -b."""
    grey = torch.full((7, 32, 40, 3), 100, dtype=torch.uint8)
    blinking = grey.clone()
    blinking[1::2] += 2
    assert (255 * flicker_index(blinking)).tolist() == pytest.approx([2.0] * 5)
    fade = grey + 3 * torch.arange(7, dtype=torch.uint8)[:, None, None, None]
    assert flicker_index(fade).tolist() == [0.0] * 5
    step = grey.clone()
    step[3:] += 50  # a cut is no flicker: each frame has one neighbour that it resembles
    assert flicker_index(step).tolist() == [0.0] * 5
    flash = grey.clone()
    flash[3] += 10
    assert (255 * flicker_index(flash)).tolist() == pytest.approx([0.0, 0.0, 10.0, 0.0, 0.0])
    half = grey.clone()
    half[1::2, :, :20] += 8  # a quarter of the square of the mean of roots
    assert (255 * flicker_index(half)).mean().item() == pytest.approx(2.0, rel=0.2)
    assert flicker_index_of(flash, 3, 5).item() == pytest.approx(5.0 / 255)
    assert flicker_index_of(flash, 6 - 2).item() == 0.0


def test_a_panning_texture_does_not_flicker() -> None:
    generator = torch.Generator().manual_seed(2)
    coarse = torch.rand((1, 3, 8, 16), generator=generator)
    wide = torch.nn.functional.interpolate(coarse, size=(96, 192), mode="bicubic")[0]
    wide = (wide.clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1)
    pan = torch.stack([wide[:, 5 * t : 5 * t + 128] for t in range(8)])
    plain = (pan[1:].float() - pan[:-1].float()).abs().mean()
    assert 255 * flicker_index_of(pan) < 0.03 * plain
    blinking = with_flicker(pan, "gain", 0.05)
    assert 255 * flicker_index_of(blinking) > 3.0  # 10 % of its mean level is about 12


def test_matching_finds_known_displacements() -> None:
    generator = torch.Generator().manual_seed(3)
    plane = torch.nn.functional.interpolate(
        torch.rand((1, 1, 8, 10), generator=generator) * 255, size=(96, 120), mode="bicubic"
    )[0]
    for down, right in ((0, 0), (3, -7), (-12, 14)):
        moved = torch.roll(plane, (down, right), (1, 2))
        dy, dx = match(plane, moved)
        middle = slice(20, -20)
        assert (dy[:, middle, middle] - down).abs().median() < 0.1
        assert (dx[:, middle, middle] - right).abs().median() < 0.1
    dy, dx = match(plane, plane)
    assert dy.abs().max() == dx.abs().max() == 0
    zero = torch.zeros_like(plane)
    assert torch.equal(displaced(plane, zero + 2, zero)[:, :-2], plane[:, 2:])
    assert torch.equal(softened(plane, zero + 2, zero - 3), plane)
    read, own = displaced(plane, zero + 0.5, zero), softened(plane, zero + 0.5, zero)
    assert 0.9 < read[:, 2:-2].std() / own[:, 2:-2].std() < 1.1


def test_large_frames_are_averaged_down(walk: torch.Tensor) -> None:
    small = walk[:4]
    large = small.repeat_interleave(7, 1).repeat_interleave(7, 2)
    assert torch.allclose(flicker_index(large), flicker_index(small), rtol=1e-3)


def test_a_batch_equals_its_videos_alone(walk: torch.Tensor) -> None:
    pair = torch.stack((walk[:5], walk[9:14].flip(2)))
    for metric in (flicker_index, flicker_index_of, vbench_flickering):
        together, alone = metric(pair), torch.stack([metric(video) for video in pair])
        assert together.shape == alone.shape
        assert torch.allclose(together, alone, rtol=1e-4)
    energy = temporal_energy(pair)
    for row, video in enumerate(pair):
        assert all(torch.allclose(energy[k][row], v) for k, v in temporal_energy(video).items())


def test_temporal_energy_puts_a_sine_into_its_band() -> None:
    time = torch.arange(64) / 64
    for cycles, band in (
        (2, "0-0.0625"),
        (6, "0.0625-0.125"),
        (12, "0.125-0.25"),
        (24, "0.25-0.5"),
    ):
        wave = 100 + 20 * torch.sin(2 * math.pi * cycles * time)
        video = wave.round().to(torch.uint8)[:, None, None, None].expand(-1, 16, 24, 3)
        energy = temporal_energy(video)
        assert energy[band].item() == pytest.approx(20**2 / 2 / 255**2, rel=0.03)
        assert sum(value.item() for value in energy.values()) < 1.03 * energy[band].item()
    assert list(temporal_energy(video, fps=24)) == ["0-1.5 Hz", "1.5-3 Hz", "3-6 Hz", "6-12 Hz"]


def test_temporal_energy_of_noise_is_its_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    grey = torch.randint(80, 121, (256, 16, 16, 1), generator=generator).expand(-1, -1, -1, 3)
    energy = temporal_energy(grey.to(torch.uint8), block=1)
    total = sum(value.item() for value in energy.values())
    assert total == pytest.approx((41**2 - 1) / 12 / 255**2, rel=0.03)
    assert energy["0.25-0.5"].item() == pytest.approx(total / 2, rel=0.05)


def test_vbench_formula(walk: torch.Tensor) -> None:
    frames = walk.numpy().astype(np.float32)
    steps = [np.mean(np.abs(a - b)) for a, b in pairwise(frames)]
    assert vbench_flickering(walk).item() == pytest.approx((255.0 - np.mean(steps)) / 255.0)
    assert vbench_flickering(walk[::4]) < vbench_flickering(walk)


def test_tlpips_compares_changes(walk: torch.Tensor) -> None:
    reference, model = walk[:4, :64, :64], LPIPS()
    video = with_flicker(reference, "noise", 10.0)
    own = [model(x[:-1], x[1:]) for x in (reference, video)]
    found = tlpips_by_step(reference, video, model)
    assert torch.allclose(found, (own[0] - own[1]).abs(), atol=1e-6)
    assert found.min() > 0.01
    assert tlpips_by_step(reference, reference, model).tolist() == [0.0] * 3


def test_the_warped_error_takes_motion_out(walk: torch.Tensor) -> None:
    pytest.importorskip("cv2")
    fast = walk[:7:2]
    plain = (fast[1:].double() - fast[:-1].double()).div(255).square().flatten(1).mean(1)
    error = warped_error_by_step(fast)
    assert bool((error < 0.2 * plain).all())
    values = [error.mean()]
    for strength in (5.0, 10.0, 20.0):
        noisy = with_flicker(fast, "noise", strength)
        values.append(warped_error_by_step(noisy, fast).mean())
    assert values == sorted(values)
    assert 0 < values[-1] - values[0] < 2 * (20 / 255) ** 2  # reading bilinearly averages noise
    assert torch.equal(warped_error_by_step(fast[None])[0], error)


def test_the_mask_leaves_out_what_is_hidden() -> None:
    pytest.importorskip("cv2")
    forward = np.zeros((40, 40, 2), np.float32)
    assert visible_pixels(forward, forward).all()
    backward = forward.copy()
    backward[10:20, 10:20] = 4.0  # does not lead back
    visible = visible_pixels(forward, backward)
    assert not visible[10:20, 10:20].any()
    assert visible.sum() == 1500
    forward[..., 0] = 30.0  # out of the picture
    assert visible_pixels(forward, -forward).sum() == 40 * 10


def test_bad_input_is_refused_by_name(walk: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = walk.float()
    broken[0, 0, 0, 0] = float("nan")
    for metric in (flicker_index, temporal_energy, vbench_flickering, warped_error_by_step):
        with pytest.raises(NonFiniteError, match="video holds NaN"):
            metric(broken)
        with pytest.raises(ShapeError, match="frame"):
            metric(walk[:1])
    with pytest.raises(ShapeError, match="16 x 16"):
        flicker_index(walk[:, :12])
    with pytest.raises(ShapeError, match="16 x 16"):
        warped_error_by_step(walk[:, :12])
    for start, end in ((20, None), (0, 1), (5, 5), (0, 22)):
        with pytest.raises(ConfigError, match="window"):
            flicker_index_of(walk, start, end)
    for wrong in ({"edges": (0.2, 0.1)}, {"edges": (0.0, 0.6)}, {"block": 97}, {"fps": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            temporal_energy(walk, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="video has shape"):
        tlpips_by_step(walk, walk[:3])
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(BackendUnavailable, match=r"steadykv\[flow\]"):
        warped_error_by_step(walk)
