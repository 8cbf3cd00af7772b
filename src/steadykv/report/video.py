"""Video files: enlarge, caption, tile and encode so that every artefact of a method stays visible.

Frames are uint8 [T, H, W, 3] RGB everywhere. Files are H.264 in MP4 with 4:2:0 chroma, which every
browser plays; because frames are enlarged by whole factors without smoothing, one source pixel
covers whole chroma samples and loses no colour. Encoding happens in memory, so that a file can be
written whole or not at all.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace, Interpolation
from numpy.typing import NDArray

from steadykv.errors import ShapeError

Frames = NDArray[np.uint8]

CRF = 12  # visually lossless for enlarged pixels; the codec must not add artefacts of its own
KEY_FRAME_EVERY = 12  # a player that steps backwards decodes at most this many frames
CAPTION_INK = (240, 240, 244)
CAPTION_DIM = (160, 164, 176)
CAPTION_PAPER = (18, 19, 24)


def check_frames(frames: Frames, what: str = "frames") -> Frames:
    """Return ``frames`` as a contiguous uint8 [T, H, W, 3] array or raise ShapeError."""
    array = np.asarray(frames)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3 or 0 in array.shape:
        raise ShapeError(
            f"{what}: got {array.dtype} {list(array.shape)}, expected uint8 [T, H, W, 3] with at "
            "least one frame; convert the video to 8-bit RGB first"
        )
    return np.ascontiguousarray(array)


def enlarge(frames: Frames, factor: int) -> Frames:
    """Repeat every pixel ``factor`` times in both directions (no smoothing)."""
    return np.repeat(np.repeat(frames, factor, axis=-3), factor, axis=-2)


def encode_mp4(frames: Frames, fps: Fraction | int, crf: int = CRF) -> bytes:
    """Encode to an H.264 MP4 (yuv420p, BT.709), in memory; odd sizes gain one repeated edge row."""
    return encode_images(check_frames(frames), fps, crf)


def encode_images(images: Iterable[Frames], fps: Fraction | int, crf: int = CRF) -> bytes:
    """The same for pictures [H, W, 3] that come one by one; a few are held at a time."""
    images = iter(images)
    first = next(images)
    height, width = first.shape[:2]
    edges = ((0, height % 2), (0, width % 2), (0, 0))
    buffer = io.BytesIO()
    with av.open(buffer, mode="w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height = width + width % 2, height + height % 2
        stream.pix_fmt = "yuv420p"
        stream.gop_size = KEY_FRAME_EVERY
        # A fixed count of threads, so that the file does not depend on the machine's cores.
        # Without B frames, for which libx264 makes other choices in another place of memory: the
        # same pictures are the same bytes then, 1 to 3 % more of them.
        stream.options = {"crf": str(crf), "preset": "fast", "threads": "2", "bf": "0"}
        # State the matrix that the conversion below uses: players guess by the size otherwise.
        stream.codec_context.colorspace = Colorspace.ITU709
        stream.codec_context.color_range = ColorRange.MPEG
        for image in chain([first], images):
            frame = av.VideoFrame.from_ndarray(np.pad(image, edges, mode="edge"), format="rgb24")
            frame = frame.reformat(
                format="yuv420p",
                dst_colorspace=Colorspace.ITU709,
                dst_color_range=ColorRange.MPEG,
                # Bicubic chroma would mix neighbouring pixels: 20 grey levels at a red dot.
                interpolation=Interpolation.AREA,
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def decode_mp4(source: Path | bytes) -> Frames:
    """Decode a whole file to uint8 [T, H, W, 3]."""
    opened = io.BytesIO(source) if isinstance(source, bytes) else str(source)
    with av.open(opened, mode="r") as container:
        images = [
            frame.reformat(format="rgb24", interpolation=Interpolation.BILINEAR).to_ndarray()
            for frame in container.decode(video=0)
        ]
    return np.stack(images)


def caption(lines: Sequence[str], width: int, size: int) -> Frames:
    """One caption bar [height, width, 3]: the first line bright, the others dim.

    A line that is too wide is set smaller until it fits, down to 6 pixels.
    """
    from matplotlib import get_data_path  # its DejaVu Sans ships with every install
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(get_data_path()) / "fonts" / "ttf"
    margin = max(4, size // 2)
    pitch = math.ceil(size * 1.3)
    height = 2 * (margin // 2) + pitch * len(lines)
    image = Image.new("RGB", (width, height + height % 2), CAPTION_PAPER)
    draw = ImageDraw.Draw(image)
    for index, text in enumerate(lines):
        name = "DejaVuSans-Bold.ttf" if index == 0 else "DejaVuSans.ttf"
        points = size
        font = ImageFont.truetype(str(folder / name), points)
        while points > 6 and draw.textlength(text, font=font) > width - 2 * margin:
            points -= 1
            font = ImageFont.truetype(str(folder / name), points)
        ink = CAPTION_INK if index == 0 else CAPTION_DIM
        draw.text((margin, margin // 2 + index * pitch), text, font=font, fill=ink)
    return np.asarray(image, dtype=np.uint8)


def side_by_side(
    videos: Mapping[str, Frames], captions: Mapping[str, Sequence[str]], factor: int = 3
) -> Frames:
    """Tile videos of equal shape into one, each enlarged and with its caption underneath.

    Up to three stand in one row, four and more in rows of equal length, so that the result stays
    near the shape of a screen. Shorter videos hold their last frame.
    """
    if not videos:
        raise ShapeError("side_by_side: got no video, expected at least one")
    checked = {name: check_frames(video, name) for name, video in videos.items()}
    length = max(video.shape[0] for video in checked.values())
    sizes = {video.shape[1:] for video in checked.values()}
    if len(sizes) != 1:
        raise ShapeError(f"side_by_side: got frame sizes {sorted(sizes)}, expected one size")
    columns = len(checked) if len(checked) <= 3 else math.ceil(math.sqrt(len(checked)))
    gap = 4 * factor // 2 * 2 // 2
    tiles = []
    most = max(len(captions[name]) for name in checked)
    for name, video in checked.items():
        large = enlarge(video, factor)
        lines = [*captions[name], *[""] * (most - len(captions[name]))]
        bar = caption(lines, large.shape[2], size=max(11, 5 * factor))
        bars = np.broadcast_to(bar, (len(large), *bar.shape))
        tile = np.concatenate([large, bars], axis=1)
        hold = np.broadcast_to(tile[-1], (length - len(tile), *tile.shape[1:]))
        tiles.append(np.concatenate([tile, hold]))
    height, width = tiles[0].shape[1:3]
    rows = math.ceil(len(tiles) / columns)
    shape = (length, rows * height + (rows + 1) * gap, columns * width + (columns + 1) * gap, 3)
    sheet = np.full(shape, CAPTION_PAPER, dtype=np.uint8)
    for index, tile in enumerate(tiles):
        top = gap + (index // columns) * (height + gap)
        left = gap + (index % columns) * (width + gap)
        sheet[:, top : top + height, left : left + width] = tile
    return sheet
