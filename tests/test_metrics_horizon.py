"""Long videos: windowed PSNR, drift of colour and sharpness, revisit consistency."""

from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest
import torch

from steadykv.errors import ConfigError, NonFiniteError, ShapeError
from steadykv.evaluation.metrics import psnr
from steadykv.evaluation.metrics.drift import UNITS, drift, frame_statistics
from steadykv.evaluation.metrics.horizon import revisit_consistency, windowed_psnr
from steadykv.evaluation.revisits import Revisit, revisits, there_and_back, turn_poses
from steadykv.world import load_episodes


def pictures(count: int, seed: int = 0, height: int = 20, width: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, height, width, 3), generator=generator, dtype=torch.uint8)


def scaled(video: torch.Tensor, gain: float, offset: float = 0.0) -> torch.Tensor:
    return (video.float() * gain + offset).round().clamp(0, 255).to(torch.uint8)


# --- windowed PSNR ----------------------------------------------------------------------------


def test_each_window_is_the_psnr_of_its_frames() -> None:
    first, second = pictures(30), pictures(30, seed=1)
    second[3:9] = first[3:9]
    found = windowed_psnr(first, second, start=3, window=6)
    assert (found.starts, found.window) == ((3, 9, 15, 21), 6)
    assert found.psnr[0] == math.inf
    for at, value in zip(found.starts, found.psnr, strict=True):
        assert value == psnr(first, second, at, at + 6)
    batch = windowed_psnr(torch.stack((first, second)), torch.stack((second, second)), 3, 6, 2)
    assert batch.starts == tuple(range(3, 25, 2))
    assert batch.psnr.shape == (2, 11)
    assert torch.isinf(batch.psnr[1]).all()
    assert torch.equal(batch.psnr[0, ::3], found.psnr)


@pytest.mark.parametrize(("start", "window", "stride"), [(0, 31, None), (25, 6, None), (0, 0, None),
                                                         (-1, 6, None), (0, 6, 0)])  # fmt: skip
def test_windows_that_do_not_fit_are_refused(start: int, window: int, stride: int | None) -> None:
    with pytest.raises(ConfigError, match="do not fit a video of 30 frames"):
        windowed_psnr(pictures(30), pictures(30), start, window, stride)
    if stride is None:
        with pytest.raises(ConfigError, match="do not fit"):
            drift(pictures(30), start=start, window=window)


# --- statistics and drift ----------------------------------------------------------------------


def test_statistics_are_those_of_their_definitions() -> None:
    """Pixel by pixel, in Python numbers, with the standard library's HSV."""
    video = pictures(2, height=5, width=6)
    video[0, 0, 0] = 0
    found = frame_statistics(video)
    assert set(found) == set(UNITS)
    for index, frame in enumerate(video.numpy()):
        levels = frame.astype(np.float64)
        for place, colour in enumerate(("red", "green", "blue")):
            assert float(found[f"mean_{colour}"][index]) == pytest.approx(levels[..., place].mean())
            assert float(found[f"std_{colour}"][index]) == pytest.approx(levels[..., place].std())
        saturation = [colorsys.rgb_to_hsv(*(pixel / 255.0))[1] for pixel in levels.reshape(-1, 3)]
        assert float(found["saturation"][index]) == pytest.approx(np.mean(saturation))
        luma = levels @ [0.299, 0.587, 0.114]
        rows, columns = luma.shape
        across = [
            (luma[y, x + 1] - luma[y, x]) ** 2 for y in range(rows) for x in range(columns - 1)
        ]
        down = [(luma[y + 1, x] - luma[y, x]) ** 2 for y in range(rows - 1) for x in range(columns)]
        energy = np.mean(across) + np.mean(down)
        assert float(found["gradient_energy"][index]) == pytest.approx(energy, rel=1e-5)
        laplacian = [
            luma[y, x - 1] + luma[y, x + 1] + luma[y - 1, x] + luma[y + 1, x] - 4 * luma[y, x]
            for y in range(1, rows - 1) for x in range(1, columns - 1)
        ]  # fmt: skip
        assert float(found["laplacian_variance"][index]) == pytest.approx(
            np.var(laplacian), rel=1e-5
        )
    batch = frame_statistics(torch.stack((video, video.flip(0))))
    for name, values in found.items():
        assert torch.equal(batch[name][0], values)
        assert torch.equal(batch[name][1], values.flip(0))


def test_drift_of_true_frames_that_fade_and_blur() -> None:
    """Real pictures: brightness, saturation and sharpness each move as they are made to."""
    true = load_episodes(8).frames[:, :1].flatten(0, 1).repeat(3, 1, 1, 1)  # 3 windows of 8
    faded = true.clone()
    faded[8:16] = scaled(true[8:16], 0.8)
    faded[16:] = scaled(true[16:], 0.6)
    found = drift(faded, true, window=8)
    for colour in ("red", "green", "blue"):
        one = found[f"mean_{colour}"]
        assert one.unit == "grey levels"
        mean = float(one.values[0])
        assert one.change.tolist() == pytest.approx([0, -0.2 * mean, -0.4 * mean], abs=0.3)
        assert one.excess is not None
        assert torch.equal(one.excess, one.change)  # the reference repeats itself: no drift
    energy = found["gradient_energy"].values
    assert (energy / energy[0]).tolist() == pytest.approx([1, 0.64, 0.36], abs=0.03)
    grey = true.clone()
    grey[16:] = (
        true[16:].float().mean(-1, keepdim=True).round().to(torch.uint8).expand(-1, -1, -1, 3)
    )
    saturation = drift(grey, window=8)["saturation"]
    assert saturation.excess is None
    assert saturation.values[1] == saturation.values[0] > 0.1
    assert saturation.values[2] == 0
    blurred = true.clone()
    pixels = true[16:].movedim(-1, 1).float()
    blurred[16:] = torch.nn.functional.avg_pool2d(pixels, 3, 1, 1).round().movedim(1, -1).byte()
    for name in ("gradient_energy", "laplacian_variance"):
        one = drift(blurred, window=8)[name]
        assert one.change[1] == 0
        assert one.change[2] < -0.4 * one.values[0]


def test_what_the_reference_does_too_is_taken_off() -> None:
    both = pictures(12)
    both[6:] = scaled(both[6:], 0.5)
    video = both.clone()
    video[6:] = scaled(both[6:], 1.0, 10)
    one = drift(video, both, window=6)["mean_red"]
    assert float(one.change[1]) < -40
    assert one.excess is not None
    assert one.excess.tolist() == pytest.approx([0, 10])
    assert all(not one.excess.any() for one in drift(both, both, window=6).values())


def test_frames_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least 3 x 3"):
        frame_statistics(torch.zeros(1, 2, 9, 3, dtype=torch.uint8))
    with pytest.raises(NonFiniteError, match="video holds NaN"):
        drift(torch.full((30, 5, 5, 3), math.nan))
    with pytest.raises(NonFiniteError, match="reference holds NaN"):
        drift(pictures(12), torch.full((12, 5, 5, 3), math.nan), window=5)
    with pytest.raises(ShapeError, match="reference has frames of 2 x 9"):
        drift(pictures(12), torch.zeros(12, 2, 9, 3, dtype=torch.uint8), window=5)
    with pytest.raises(ShapeError, match="cut the longer one"):
        drift(pictures(12), pictures(10), window=5)


# --- revisits ----------------------------------------------------------------------------------


def panorama(poses: np.ndarray, width: int = 96) -> torch.Tensor:
    """Frames of a fixed round picture, seen over 90 degrees: the room is always the same."""
    around = pictures(1, seed=3, height=24, width=360)[0]
    columns = (poses[:, 2, None] + np.arange(width) * 90 / width).round().astype(int) % 360
    return around[:, torch.from_numpy(columns)].movedim(1, 0).contiguous()


def test_a_room_that_stays_is_told_from_one_that_changes() -> None:
    poses = turn_poses(there_and_back(144, 24))
    visits = revisits(poses, window_frames=21, chunk_frames=3)
    video = panorama(poses)
    found = revisit_consistency(video, visits)
    assert set(found) == {"within", "beyond"}
    for name, one in found.items():
        assert one.pairs == sum(visit.within == (name == "within") for visit in visits)
        assert one.paired == one.pairs
        assert (one.revisits.psnr, one.revisits.ssim) == (math.inf, 1.0)
        assert one.revisits.distance is None
        assert one.controls is not None
        assert one.controls.psnr < 10
    assert found["within"].gap < 21 <= found["beyond"].gap
    # Every frame of the second half in other colours: only what reaches back over it suffers.
    video[72:] = 255 - video[72:]
    changed = revisit_consistency(video, visits)
    assert changed["beyond"].revisits.psnr < 20
    assert changed["within"].revisits.psnr > changed["beyond"].revisits.psnr
    # One dull picture is alike everywhere, and its controls say so.
    dull = revisit_consistency(video[:1].expand(len(video), -1, -1, -1), visits)["beyond"]
    assert dull.controls is not None
    assert dull.revisits.psnr == dull.controls.psnr == math.inf


def test_the_numbers_are_means_over_the_pairs_and_a_distance_is_asked() -> None:
    video = pictures(90)
    visits = [Revisit(i, i + 40, False, i + 1) for i in range(40)] + [Revisit(0, 5, True, None)]
    asked = []

    def distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        asked.append(len(first))
        return (first.float() - second.float()).abs().mean(dim=(1, 2, 3))

    found = revisit_consistency(video, visits, distance)
    one = found["beyond"]
    assert one.revisits.psnr == float(psnr(video[:40], video[40:80]))
    expected = float((video[:40].float() - video[40:80].float()).abs().mean())
    assert one.revisits.distance == pytest.approx(expected)
    assert one.controls is not None
    assert one.controls.psnr == float(psnr(video[1:41], video[40:80]))
    assert found["within"].controls is None
    assert found["within"].paired == 0
    assert asked == [1, 32, 8, 32, 8]


def test_visits_of_another_video_are_refused() -> None:
    with pytest.raises(ShapeError, match="visits name frames 0 to 20"):
        revisit_consistency(pictures(20), [Revisit(0, 20, True, 3)])
    with pytest.raises(ShapeError, match="video has 2 rows"):
        revisit_consistency(pictures(20)[None].repeat(2, 1, 1, 1, 1), [])
    assert revisit_consistency(pictures(20), []) == {}
