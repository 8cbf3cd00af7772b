"""Real files of every kind through the reader: what is paired with what, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from steadykv.errors import ConfigError, ShapeError, SteadyKVError
from steadykv.evaluation.video_pair import CHUNK_FRAMES, PairOptions, VideoPair
from tests.videos import Frames, damaged_packet, moving, noisy, write_sound, write_video

VIDEO = moving(20)
H264 = {"codec": "libx264", "pixel_format": "yuv420p"}
QUIET = {"x265-params": "log-level=none"}


def read(a: Path, b: Path, **options: object) -> tuple[Frames, Frames, list[str], list[float]]:
    """Everything that two files give: frames of A and of B, notes, times."""
    with VideoPair(a, b, PairOptions(**options)) as pair:  # type: ignore[arg-type]
        chunks = list(pair.chunks())
        assert [chunk.first for chunk in chunks] == list(
            range(pair.options.start, pair.options.start + sum(len(c.a) for c in chunks),
                  CHUNK_FRAMES)
        )  # fmt: skip
        firsts, seconds = (np.concatenate([getattr(c, n) for c in chunks]) for n in "ab")
        return firsts, seconds, pair.notes, [t for chunk in chunks for t in chunk.times]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 frames, 10 a second, every bit kept."""
    return write_video(tmp_path_factory.mktemp("plain") / "plain.mkv", VIDEO)


def test_lossless_frames_arrive_unchanged_in_order(plain: Path, tmp_path: Path) -> None:
    other = noisy(VIDEO)
    a, b, notes, times = read(plain, write_video(tmp_path / "b.mkv", other))
    assert np.array_equal(a, VIDEO)
    assert np.array_equal(b, other)
    assert notes == []
    assert times == pytest.approx([i / 10 for i in range(20)])


@pytest.mark.parametrize(("start", "end"), [(0, 20), (3, 11), (19, 20), (8, None), (0, 1)])
def test_windows(plain: Path, start: int, end: int | None) -> None:
    a, b, notes, times = read(plain, plain, start=start, end=end)
    assert np.array_equal(a, VIDEO[start:end])
    assert np.array_equal(b, a)
    assert times[0] == pytest.approx(start / 10)
    assert notes == ["A and B are the same file"]


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"start": -1}, "--start: got -1"),
        ({"start": 5, "end": 5}, "--end: got 5"),
        ({"end": 21}, "--end: got 21, but only 20 frames"),
        ({"start": 20}, "--start: got 20, but only 20 frames"),
        ({"match": "luck"}, "match: got 'luck'"),
    ],
)
def test_windows_outside_the_video_are_refused(
    plain: Path, options: dict[str, object], needed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(plain, plain, **options)
    assert needed in str(caught.value)


# --- lengths, rates, sizes ------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["mkv", "mp4"])
@pytest.mark.parametrize("swapped", [False, True])
def test_different_lengths(tmp_path: Path, suffix: str, swapped: bool) -> None:
    """MP4 says its length in front; Matroska is read to the end of the shorter one."""
    files = [
        write_video(tmp_path / f"{count}.{suffix}", VIDEO[:count], **H264) for count in (20, 13)
    ]
    a, b = reversed(files) if swapped else files
    with pytest.raises(ConfigError) as caught:
        read(a, b)
    assert "13" in str(caught.value)
    assert "--shortest" in str(caught.value)
    assert len(read(a, b, shortest=True)[0]) == 13
    assert len(read(a, b, end=13)[0]) == 13


def test_other_rates_are_refused_or_paired_by_index(plain: Path, tmp_path: Path) -> None:
    fast = write_video(tmp_path / "fast.mkv", VIDEO, fps=25)
    with pytest.raises(ConfigError) as caught:
        read(plain, fast)
    assert "frame 1 of A is shown at 0.100 s, of B at 0.040 s (10 and 25" in str(caught.value)
    a, b, _, times = read(plain, fast, match="index")
    assert np.array_equal(a, b)
    assert times[-1] == pytest.approx(1.9)


def test_by_time_pairs_what_is_shown_together(plain: Path, tmp_path: Path) -> None:
    """A shows 10 frames a second, B every one of them twice; then the other way round."""
    doubled = write_video(tmp_path / "double.mkv", VIDEO.repeat(2, axis=0), fps=20)
    a, b, _, _ = read(plain, doubled, match="time")
    assert np.array_equal(a, VIDEO)
    assert np.array_equal(b, VIDEO)
    a, b, _, times = read(doubled, plain, match="time")
    assert np.array_equal(b, VIDEO.repeat(2, axis=0))
    assert np.array_equal(a, b)
    assert times == pytest.approx([i / 20 for i in range(40)])


def test_by_time_refuses_other_durations(plain: Path, tmp_path: Path) -> None:
    short = write_video(tmp_path / "short.mkv", VIDEO[:10], fps=20)
    for pair in ((plain, short), (short, plain)):
        with pytest.raises(ConfigError, match="--shortest"):
            read(*pair, match="time")
    assert len(read(plain, short, match="time", shortest=True)[0]) == 5


def test_variable_frame_rates_are_compared_by_their_timestamps(plain: Path, tmp_path: Path) -> None:
    times = [0, 40, 200, 320, 330, 500, 700, 710, 900, 1500]
    varied = write_video(tmp_path / "varied.mkv", VIDEO[:10], times_ms=times)
    same = write_video(tmp_path / "same.mkv", VIDEO[:10], times_ms=times)
    late = write_video(tmp_path / "late.mkv", VIDEO[:10], times_ms=[*times[:5], 620, *times[6:]])
    a, b, _, read_times = read(varied, same)
    assert np.array_equal(a, b)
    assert read_times == pytest.approx([ms / 1000 for ms in times])
    with pytest.raises(ConfigError, match=r"frame 5 of A is shown at 0.500 s, of B at 0.620 s"):
        read(varied, late)
    # At 0.5 s the late one still shows what came before.
    _, b, _, _ = read(varied, late, match="time")
    assert np.array_equal(b, VIDEO[[0, 1, 2, 3, 4, 4, 6, 7, 8, 9]])


def test_other_sizes_are_refused_or_scaled(plain: Path, tmp_path: Path) -> None:
    big = write_video(tmp_path / "big.mkv", VIDEO.repeat(2, axis=1).repeat(2, axis=2))
    with pytest.raises(ShapeError, match=r"is 128 x 96 pixels, A 64 x 48; .*--resize"):
        read(plain, big)
    a, b, notes, _ = read(plain, big, resize=True)
    assert np.abs(a.astype(int) - b).max() <= 1  # the area of four equal pixels
    assert notes == ["B was scaled from 128 x 96 to 64 x 48 pixels (area): part of every "
                     "difference is the scaling's"]  # fmt: skip
    a, b, notes, _ = read(big, plain, resize=True)
    assert b.shape == (20, 96, 128, 3)
    assert "(bicubic)" in notes[0]
    assert 1 < np.abs(a.astype(int) - b).mean() < 6


def test_odd_sizes(tmp_path: Path) -> None:
    video = moving(3, 35, 51)
    file = write_video(tmp_path / "odd.mkv", video)
    assert np.array_equal(read(file, file)[1], video)
    chroma = write_video(tmp_path / "odd420.mkv", video, pixel_format="yuv420p")
    assert read(file, chroma)[1].shape == video.shape


# --- pixels ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "error", "note"),
    [
        ("a.mp4", H264, 2.8, "A is bgr0, B yuv420p"),
        ("a.mov", {"codec": "prores", "pixel_format": "yuv422p10le"}, 1.6, "B has 10 bits"),
        ("a.mp4", {"codec": "libx265", "pixel_format": "yuv420p10le", "options": QUIET}, 3,
         "B has 10 bits"),
        ("a.webm", {"codec": "libvpx-vp9", "pixel_format": "yuv420p"}, 3, "B yuv420p"),
        ("a.avi", {"codec": "mjpeg", "pixel_format": "yuvj420p"}, 6, "B yuvj420p"),
        ("b.mkv", {"pixel_format": "yuv444p16le"}, 0, "B has 16 bits"),
        ("b.mkv", {"pixel_format": "gbrp10le"}, 0, "B has 10 bits"),
        ("b.mkv", {"pixel_format": "yuv444p"}, 0.8, "B yuv444p"),
        ("b.mkv", {"pixel_format": "yuv444p", "matrix": 1}, 0.8, "B yuv444p"),
        ("a.gif", {"codec": "gif", "pixel_format": "rgb8"}, 22, "B bgra"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_pixel_formats_become_the_same_rgb(
    plain: Path, tmp_path: Path, name: str, settings: dict[str, object], error: float, note: str
) -> None:
    """The mean error is what codec and chroma lose (0: nothing), no wrong matrix or range."""
    file = write_video(tmp_path / name, VIDEO, **settings)  # type: ignore[arg-type]
    a, b, notes, _ = read(plain, file)
    assert np.array_equal(a, VIDEO)
    measured = np.abs(a.astype(int) - b).mean()
    assert error / 30 <= measured <= error, measured
    assert any(text.startswith(note) or note in text for text in notes), notes


def test_an_untagged_video_is_read_with_the_other_ones_matrix(tmp_path: Path) -> None:
    """A copy that lost its BT.709 tag must not differ in colour."""
    tagged = write_video(tmp_path / "709.mkv", VIDEO, pixel_format="yuv444p", matrix=1)
    data = tagged.read_bytes()
    # Matroska's MatrixCoefficients element (55B1, one byte): 1 is BT.709, 2 unspecified.
    assert data.count(b"\x55\xb1\x81\x01") == 1
    bare = tmp_path / "bare.mkv"
    bare.write_bytes(data.replace(b"\x55\xb1\x81\x01", b"\x55\xb1\x81\x02"))
    a, b, notes, _ = read(tagged, bare)
    assert np.array_equal(a, b)
    assert notes == ["B does not say which YUV matrix it uses: the other's was assumed"]


def test_alpha_is_laid_on_black(plain: Path, tmp_path: Path) -> None:
    alpha = np.full(VIDEO.shape[:3], 255, np.uint8)
    opaque = write_video(tmp_path / "opaque.mkv", VIDEO, alpha=alpha)
    assert read(plain, opaque)[2] == ["A is bgr0, B bgra: both were converted to 8-bit RGB"]
    alpha[:, :24], alpha[:, 24:30] = 0, 128
    file = write_video(tmp_path / "alpha.mkv", VIDEO, alpha=alpha)
    _, b, notes, _ = read(plain, file)
    expected = np.round(VIDEO * (alpha[..., None] / 255)).astype(int)
    assert np.abs(b - expected).max() <= 1
    assert np.array_equal(b[:, 30:], VIDEO[:, 30:])
    assert not b[:, :24].any()
    assert notes[-1] == "B has transparent pixels: laid on black"


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotated_videos_are_turned_upright(plain: Path, tmp_path: Path, degrees: int) -> None:
    """Stored lying down, shown as the plain one."""
    stored = np.ascontiguousarray(np.rot90(VIDEO, -degrees // 90, axes=(1, 2)))
    file = write_video(
        tmp_path / "turned.mov", stored, codec="png", pixel_format="rgb24", rotation=degrees
    )
    a, b, notes, _ = read(plain, file)
    assert np.array_equal(a, b)
    assert f"B was turned by {degrees} degrees, as it asks for" in notes


# --- what is no video, or a broken one ------------------------------------------------------


def missing(folder: Path) -> Path:
    return folder / "missing.mp4"


def empty(folder: Path) -> Path:
    (folder / "empty.mp4").touch()
    return folder / "empty.mp4"


def text(folder: Path) -> Path:
    (folder / "text.mp4").write_text("no video at all\n" * 99)
    return folder / "text.mp4"


def art(folder: Path) -> Path:
    (folder / "art.ans").write_text("\x1b[31mcoloured\x1b[0m characters\n" * 99)
    return folder / "art.ans"


def sound(folder: Path) -> Path:
    return write_sound(folder / "sound.m4a")


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def playlist(folder: Path) -> Path:
    (folder / "list.m3u8").write_text(
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n"
    )
    return folder / "list.m3u8"


def pictures(folder: Path) -> Path:
    return folder / "none-%03d.png"


def half_an_mp4(folder: Path) -> Path:
    whole = write_video(folder / "whole.mp4", VIDEO, **H264).read_bytes()
    (folder / "half.mp4").write_bytes(whole[: len(whole) // 2])
    return folder / "half.mp4"


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        (missing, "no such file"),
        (lambda path: Path("https://example.com/a.mp4"), "is a URL; expected a video file"),
        (empty, "is empty (0 bytes)"),
        (text, "is no video"),
        (art, "video"),
        (sound, "holds audio, no video"),
        (pipe, "no regular file"),
        (playlist, "video"),
        (pictures, "no such pictures"),
        (Path, "is a folder; expected a video file: for pictures give a pattern"),
        (half_an_mp4, "its header is broken"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("first", [False, True])
def test_what_is_no_video_is_refused_by_name(
    plain: Path, tmp_path: Path, make: Callable[[Path], Path], needed: str, first: bool
) -> None:
    file = make(tmp_path)
    files = (file, plain) if first else (plain, file)
    with pytest.raises(SteadyKVError) as caught:
        VideoPair(*files, PairOptions())
    message = str(caught.value)
    assert message.startswith(f"{'A' if first else 'B'} ({file})"), message
    assert needed in message
    assert "\n" not in message


def test_a_truncated_file_says_how_many_frames_it_holds(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "whole.mkv", VIDEO)
    data = whole.read_bytes()
    cut = tmp_path / "cut.mkv"
    cut.write_bytes(data[: len(data) // 2])
    with pytest.raises(SteadyKVError) as caught:
        read(whole, cut)
    held = int(str(caught.value).split(" after ")[1].split()[0])
    assert 5 <= held <= 12
    assert np.array_equal(read(whole, cut, end=held)[1], VIDEO[:held])


def test_a_file_that_ends_early_is_noted_even_beside_itself(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "whole.mkv", VIDEO, **H264, options={"g": "5"})
    cut = tmp_path / "cut.mkv"
    cut.write_bytes(whole.read_bytes()[: int(0.7 * whole.stat().st_size)])
    a, _, notes, _ = read(cut, cut)
    assert 3 < len(a) < 18
    assert f"B holds {len(a)} frames that can be shown; its header promises 2 s" in notes
    with pytest.raises(ConfigError) as caught:
        read(whole, cut)
    assert f"B ends after {len(a)} frames (its header promises 2 s), A goes on" in str(caught.value)


def test_a_damaged_frame_ends_the_reading_there(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "whole.mkv", VIDEO, **H264, options={"crf": "5"})
    broken = tmp_path / "broken.mkv"
    broken.write_bytes(damaged_packet(whole, 11))
    with pytest.raises(SteadyKVError, match=r"broken after \d+ frames \(.*--end \d+") as caught:
        read(whole, broken)
    held = int(str(caught.value).rsplit("--end ", 1)[1])
    assert 4 < held < 18
    a, b, _, _ = read(whole, broken, end=held)
    assert np.array_equal(a, b)


def test_damage_that_a_decoder_would_conceal_is_refused(tmp_path: Path) -> None:
    """MP4 finds packets by its index, so the decoder meets the damage and paints over it.

    One bit in 16 places: a few of them make another valid picture, which nothing can tell (1 to 5
    in 30 encodings, which differ).
    """
    whole = write_video(tmp_path / "whole.mp4", VIDEO, **H264, options={"crf": "5"})
    data = whole.read_bytes()
    assert data.index(b"moov") > 0.87 * len(data)  # the pictures come before it
    broken = tmp_path / "broken.mp4"
    refused = 0
    for place in np.linspace(0.3 * len(data), 0.85 * len(data), 16).astype(int):
        damaged = bytearray(data)
        damaged[place] ^= 16
        broken.write_bytes(damaged)
        try:
            read(whole, broken)
        except SteadyKVError as error:
            refused += "broken after" in str(error)
    assert refused >= 8


def test_a_size_that_changes_within_a_file_is_refused(tmp_path: Path) -> None:
    """Two MPEG transport streams joined end to end, as a broadcast may be."""
    joined = tmp_path / "joined.ts"
    parts = [
        write_video(tmp_path / f"{size}.ts", moving(6, size, 64), **H264).read_bytes()
        for size in (48, 64)
    ]
    joined.write_bytes(b"".join(parts))
    with pytest.raises(SteadyKVError, match=r"frame \d+ is 64 x 64 yuv420p, those before 64 x 48"):
        read(joined, joined)


def test_numbered_pictures_are_a_video(plain: Path, tmp_path: Path) -> None:
    for index, picture in enumerate(VIDEO):
        write_video(
            tmp_path / f"p{index:03d}.png", picture[None], codec="png", pixel_format="rgb24",
            format="image2",
        )  # fmt: skip
    a, b, notes, _ = read(plain, tmp_path / "p%03d.png")
    assert np.array_equal(a, b)
    assert "B is pictures without times: paired by number" in notes
    with pytest.raises(ConfigError, match="has no times"):
        read(plain, tmp_path / "p%03d.png", match="time")


def test_names_that_look_like_something_else(tmp_path: Path) -> None:
    for name in ("http:a.mkv", "100%d.mkv", "-out.mkv", "ä b'c.mkv"):
        file = write_video(tmp_path / "plain.mkv", VIDEO[:2]).rename(tmp_path / name)
        assert np.array_equal(read(file, file)[0], VIDEO[:2]), name
