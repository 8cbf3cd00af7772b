"""Video files: what is written decodes to the same pictures, and tiles stand where they should."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest

from steadykv.errors import ShapeError
from steadykv.report.video import (
    CAPTION_PAPER,
    caption,
    decode_mp4,
    encode_mp4,
    enlarge,
    side_by_side,
)


def moving_frames(count: int, height: int = 24, width: int = 32, shift: int = 0) -> np.ndarray:
    """A coloured pattern that moves by one pixel a frame."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    frames = [
        np.stack([(x + t) * 5 % 200 + shift, y * 7 % 180, (x + y + t) * 3 % 220], axis=-1)
        for t in range(count)
    ]
    return np.stack(frames).astype(np.uint8)


@pytest.mark.parametrize(("height", "width"), [(24, 32), (23, 31)])
def test_a_file_decodes_to_the_same_frames(height: int, width: int) -> None:
    frames = moving_frames(14, height, width)
    decoded = decode_mp4(encode_mp4(enlarge(frames, 3), 12))
    large = enlarge(frames, 3)
    assert len(decoded) == 14
    # 4:2:0 needs even sides: an odd one is one row longer, never one shorter.
    assert decoded.shape[1:3] == (3 * height + 3 * height % 2, 3 * width + 3 * width % 2)
    error = decoded[:, : large.shape[1], : large.shape[2]].astype(float) - large
    assert np.sqrt((error**2).mean()) < 4.0
    still = np.sqrt(((large[1:].astype(float) - large[:-1]) ** 2).mean())
    assert still > 10.0  # the bound above would see a frame out of its place


def test_enlarged_by_an_even_factor_colour_survives_the_file() -> None:
    """Single red and blue pixels stay red and blue: that is why files are enlarged."""
    frames = np.full((2, 8, 8, 3), 60, dtype=np.uint8)
    frames[:, 2, 3] = (220, 30, 30)
    frames[:, 5, 6] = (30, 30, 220)
    decoded = decode_mp4(encode_mp4(enlarge(frames, 4), 12))[:, 2::4, 2::4]
    assert np.abs(decoded.astype(int) - frames).max() <= 8


def test_what_players_need_to_know() -> None:
    with av.open(io.BytesIO(encode_mp4(moving_frames(5), Fraction(35, 2)))) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert stream.average_rate == Fraction(35, 2)


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((2, 8, 8, 3), dtype=np.float32),
        np.zeros((8, 8, 3), dtype=np.uint8),
        np.zeros((2, 3, 8, 8), dtype=np.uint8),
        np.zeros((0, 8, 8, 3), dtype=np.uint8),
    ],
    ids=["float", "one picture", "channels first", "empty"],
)
def test_other_arrays_are_refused(frames: np.ndarray) -> None:
    with pytest.raises(ShapeError, match="expected uint8"):
        encode_mp4(frames, 12)


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3)])
def test_tiles_stand_in_rows_with_captions_below(count: int, columns: int) -> None:
    videos = {f"m{i}": moving_frames(3, shift=10 * i) for i in range(count)}
    sheet = side_by_side(videos, {name: [name, "detail"] for name in videos}, factor=3)
    gap = 6
    tile_width = 3 * 32
    assert sheet.shape[2] == columns * (tile_width + gap) + gap
    rows = -(-count // columns)
    tile_height = (sheet.shape[1] - gap) // rows - gap
    for index, video in enumerate(videos.values()):
        top = gap + index // columns * (tile_height + gap)
        left = gap + index % columns * (tile_width + gap)
        picture = sheet[:, top : top + 3 * 24, left : left + tile_width]
        np.testing.assert_array_equal(picture, enlarge(video, 3))
        words = sheet[0, top + 3 * 24 : top + tile_height, left : left + tile_width]
        assert words.max() > 200  # bright letters on dark paper
    np.testing.assert_array_equal(sheet[0, 0, 0], CAPTION_PAPER)


def test_a_shorter_video_holds_its_last_frame() -> None:
    videos = {"long": moving_frames(6), "short": moving_frames(2)}
    sheet = side_by_side(videos, {"long": ["long"], "short": ["short"]}, factor=2)
    right = sheet[:, :, sheet.shape[2] // 2 :]
    np.testing.assert_array_equal(right[1], right[5])
    assert not np.array_equal(right[0], right[1])


def test_sizes_that_differ_are_refused() -> None:
    videos = {"a": moving_frames(2), "b": moving_frames(2, height=20)}
    with pytest.raises(ShapeError, match="one size"):
        side_by_side(videos, {"a": ["a"], "b": ["b"]})
    with pytest.raises(ShapeError, match="at least one"):
        side_by_side({}, {})


def test_a_long_caption_is_set_smaller_and_not_cut() -> None:
    short = caption(["QuantWM"], 160, 20)
    long = caption(["QuantWM keys, BF16 values"], 160, 20)
    assert short.shape == long.shape
    assert np.all(long[:, -3:] == CAPTION_PAPER)  # the margin on the right stays free
    assert long.max() > 200
