"""`python -m benchmarks.memory_film` on videos that the memory benchmarks would keep."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import memory_film
from benchmarks.files import in_one_line
from benchmarks.memory_walks import load_moments, read_tracks
from steadykv.errors import ConfigError, PayloadError
from tests.recorded_walks import walks_of_a_tiny_world


@pytest.fixture
def walks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return walks_of_a_tiny_world(tmp_path, monkeypatch)


@pytest.mark.parametrize("at", ["", "@40"])
def test_videos_stand_beside_the_true_frames(
    walks: Path, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    track, kept = read_tracks(walks)[0], walks / "kept"
    name = f"{track.name}{at}"
    start = 40 if at else 30
    moment = memory_film.Moment(track, start, 30, (), ())
    true = load_moments([moment], 12)[1][0].numpy()
    kept.mkdir()
    np.save(kept / f"{name}-bf16-12-0.npy", true)
    other = np.concatenate((true[:30], np.clip(true[30:], 3, 200)))
    np.save(kept / f"{name}-kivi+qvg-48-0.npy", other)
    np.save(kept / "another-bf16-12-0.npy", true)
    videos = memory_film.kept_videos(kept, name)
    assert [one[:3] for one in videos] == [("bf16", 12, 0), ("kivi+qvg", 48, 0)]
    shown = memory_film.true_frames(walks, name, 30, 12)
    assert np.array_equal(shown, true)
    sheet = memory_film.film(shown, videos, 30, 2)
    shown = shown[30:]
    height, width = (2 * size for size in shown.shape[1:3])
    assert len(sheet) == 12
    for number, one in enumerate((shown, shown, np.clip(shown, 3, 200))):
        left = 4 + number * (width + 4)
        part = sheet[:, 4 : 4 + height, left : left + width]
        assert np.array_equal(part, one.repeat(2, 1).repeat(2, 2)), number

    part = memory_film.film(true, videos, 30, 2, slice(2, 6))
    assert np.array_equal(part[:, :, : 4 + width], sheet[2:6, :, : 4 + width])

    image = walks / "pages" / "film.webp"
    given = ["--walks", str(walks), "--videos", str(kept), "--walk", name, "--prime", "30"]
    memory_film.main([*given, "--image", str(image), "--factor", "2", "--fps", "10"])
    assert f"12 frames, {image.stat().st_size:,} bytes" in capsys.readouterr().out
    with Image.open(image) as film:
        assert getattr(film, "n_frames", 1) == 12
        assert film.size == sheet.shape[2:0:-1]
        shown_again = np.asarray(film.convert("RGB")).astype(int)
    assert np.abs(shown_again - sheet[0]).mean() < 10  # a lossy picture of random pixels


def test_what_cannot_be_shown_is_refused(walks: Path) -> None:
    kept, name = walks / "kept", read_tracks(walks)[0].name
    kept.mkdir()
    given = ["--walks", str(walks), "--videos", str(kept), "--image", str(walks / "x.webp")]
    with pytest.raises(ConfigError, match="expected what benchmarks"):
        memory_film.main([*given, "--walk", name])
    np.save(kept / f"{name}-bf16-12-0.npy", np.zeros((30, 8, 8, 3), np.uint8))
    with pytest.raises(ConfigError, match="--prime: got 96"):
        memory_film.main([*given, "--walk", name])
    np.save(kept / "nobody-bf16-12-0.npy", np.zeros((99, 8, 8, 3), np.uint8))
    with pytest.raises(ConfigError, match="--walk: got nobody"):
        memory_film.main([*given, "--walk", "nobody"])
    track = read_tracks(walks)[0]
    true = load_moments([memory_film.Moment(track, 30, 30, (), ())], 12)[1][0].numpy()
    np.save(kept / f"{name}-bf16-12-0.npy", true)
    np.save(kept / f"{name}@{track.length - 6}-bf16-12-0.npy", true)
    with pytest.raises(ConfigError, match=f"{track.length} of {name}"):  # beyond its end
        memory_film.main([*given, "--walk", f"{name}@{track.length - 6}", "--prime", "30"])
    np.save(kept / f"{name}-bf16-12-0.npy", true[::-1])
    with pytest.raises(ConfigError, match="bf16 with 12 frames does not begin"):
        memory_film.main([*given, "--walk", name, "--prime", "30"])
    np.save(kept / f"{name}-bf16-12-0.npy", true)
    for first, last in ((-1, 6), (6, 6), (0, 13)):
        with pytest.raises(ConfigError, match="--part: got"):
            memory_film.main(
                [*given, "--walk", name, "--prime", "30", "--part", f"{first}", f"{last}"]
            )
    for wrong in (["--factor", "0"], ["--fps", "0"], ["--quality", "101"], ["--image", str(walks)]):
        with pytest.raises(SystemExit):
            memory_film.main([*given, "--walk", name, *wrong])
    (kept / f"{name}-bf16-12-0.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(PayloadError, match="got no frames"):
        memory_film.main([*given, "--walk", name])
    assert not (walks / "x.webp").exists()


def test_a_program_ends_with_one_line() -> None:
    def refuse() -> None:
        raise ConfigError("--walk: got x, expected y")

    with pytest.raises(SystemExit, match="--walk: got x, expected y"):
        in_one_line(refuse)
