"""The room that changes and the room that stays, side by side: an animated WebP for a page.

    python -m benchmarks.memory_film --walks /tmp/turns --videos frames --walk houses-000-00 \\
        --image docs/images/turning.webp

Shows the generated frames of every video that `--videos FOLDER` of benchmarks.memory_long or
benchmarks.memory kept of one rollout (`--walk WALK` or `WALK@START`), beside the true frames, with
the PSNR over all that are shown; of `--part FIRST LAST` alone, if given, counted from the first
generated one.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.files import in_one_line
from benchmarks.memory_walks import Moment, load_moments, read_tracks
from steadykv.errors import ConfigError, PayloadError
from steadykv.evaluation.aggregate import capped_psnr
from steadykv.report.video import side_by_side

TRUE = "true"


class Kept(NamedTuple):
    """A video uint8 [T, H, W, 3] and what made it."""

    method: str
    window: int
    seed: int
    frames: NDArray[np.uint8]


def kept_videos(folder: Path, rollout: str) -> list[Kept]:
    """Those of one rollout, shortest window first. Raises ConfigError where there are none."""
    found = []
    for path in folder.glob(f"{rollout}-*.npy"):
        method, window, seed = path.stem.removeprefix(f"{rollout}-").rsplit("-", 2)
        try:
            frames = np.load(path, allow_pickle=False)
            found.append(Kept(method, int(window), int(seed), frames))
        except (OSError, EOFError, ValueError) as error:
            raise PayloadError(f"{path}: got no frames ({error}); make it again") from error
    if not found:
        raise ConfigError(
            f"--videos: got {folder} without {rollout}-METHOD-WINDOW-SEED.npy; expected what "
            "benchmarks.memory_long --videos keeps"
        )
    return sorted(found, key=lambda one: (one.window, one.method, one.seed))


def true_frames(walks: Path, rollout: str, prime: int, count: int) -> NDArray[np.uint8]:
    """[prime + count, H, W, 3]: true frames, and those that the rollout should have made."""
    name, _, at = rollout.partition("@")
    tracks = [one for one in read_tracks(walks) if one.name == name]
    if not tracks:
        raise ConfigError(f"--walk: got {name}, expected the name of one of the walks in {walks}")
    start = int(at) if at.isdecimal() else prime
    if not prime <= start <= tracks[0].length - count:
        raise ConfigError(
            f"--walk: got frames {start} to {start + count} after {prime} true ones, expected some "
            f"of the {tracks[0].length} of {name}"
        )
    _, true = load_moments([Moment(tracks[0], start, prime, (), ())], count)
    return true[0].numpy()


def film(
    true: NDArray[np.uint8],
    videos: Sequence[Kept],
    prime: int,
    factor: int,
    part: slice = slice(None),
) -> NDArray[np.uint8]:
    """[T, H', W', 3]: true frames first, then every video, a `part` of what follows `prime`."""
    real = true[prime:][part]
    shown, captions = {TRUE: real}, {TRUE: ["true frames", ""]}
    for one in videos:
        if not np.array_equal(one.frames[:prime], true[:prime]):
            raise ConfigError(
                f"--prime: got {prime}, but {one.method} with {one.window} frames does not begin "
                "with so many true ones of these walks; give what the benchmark was given"
            )
        made = one.frames[prime:][part]
        error = np.square(made.astype(float) - real).mean()
        key = f"{one.method} {one.window} {one.seed}"
        shown[key] = made
        captions[key] = [
            f"{one.method}, {one.window} frames",
            f"{float(capped_psnr(np.array(error))):.1f} dB",
        ]
    return side_by_side(shown, captions, factor)


def save_webp(path: Path, frames: NDArray[np.uint8], fps: float, quality: int) -> None:
    """An animation that repeats."""
    first, *others = map(Image.fromarray, frames)
    options = {"duration": round(1000 / fps), "loop": 0, "quality": quality, "method": 6}
    data = io.BytesIO()  # so that what fails leaves a file that was there as it is
    first.save(data, "WEBP", save_all=True, append_images=others, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.getvalue())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--walks", type=Path, required=True, help="the recorded walks of the rollout")
    add("--videos", type=Path, required=True, help="what --videos of the benchmark kept")
    add("--walk", required=True, help="WALK, or WALK@START for a moment")
    add("--image", type=Path, required=True, help="where the animated WebP goes")
    add("--prime", type=int, default=96, help="true frames before the generated ones")
    add("--part", type=int, nargs=2, metavar=("FIRST", "LAST"), help="which of those; default: all")
    add("--factor", type=int, default=3, help="a pixel becomes so many wide and high")
    add("--fps", type=float, default=8)
    add("--quality", type=int, default=60)
    given = parser.parse_args(arguments)
    if given.factor < 1 or not 1 <= given.fps <= 1000 or not 0 <= given.quality <= 100:
        parser.error("--factor is 1 or more, --fps 1 to 1000, --quality 0 to 100")
    if given.image.is_dir():
        parser.error(f"--image: got the folder {given.image}, expected a file")
    videos = kept_videos(given.videos, given.walk)
    lengths = {len(one.frames) for one in videos}
    if len(lengths) > 1 or not 0 < given.prime < max(lengths):
        raise ConfigError(
            f"--prime: got {given.prime} with videos of {sorted(lengths)} frames; expected one "
            "length above it: one run's"
        )
    count = max(lengths) - given.prime
    first, last = given.part or (0, count)
    if not 0 <= first < last <= count:
        raise ConfigError(f"--part: got {first} {last}, expected a part of the {count} frames")
    true = true_frames(given.walks, given.walk, given.prime, count)
    sheet = film(true, videos, given.prime, given.factor, slice(first, last))
    save_webp(given.image, sheet, given.fps, given.quality)
    print(f"{given.image}: {len(sheet)} frames, {given.image.stat().st_size:,} bytes")


if __name__ == "__main__":
    in_one_line(main)
