"""Players in step: the markup and the pixels of one or several takes of the same length.

Small takes travel as one lossless picture each (a sheet), so the page draws and compares the true
pixels. Large ones travel as one film whose tiles are the takes and, calculated here from raw
frames, maps of their difference and their flicker; tiles of one frame cannot get out of step.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape

import numpy as np

from steadykv.errors import ShapeError
from steadykv.report.heat import HEAT_STEPS, difference, flicker_heat, halved, to_grey
from steadykv.report.html import colour_variable, data_uri
from steadykv.report.video import Frames, check_frames, encode_images

GAINS = (1, 2, 4, 8, 16, 32)
LOSSLESS_FRAMES = 400  # longer films take lossy sheets, so that the page stays below tens of MB
SHEET_COLUMNS = 8
# A sheet lies in the browser's memory decoded, 4 bytes a pixel: 64 MB a take.
SHEET_PIXELS = 16_000_000
# At the videos' own size; 12, as small takes have, makes a file of 720p a quarter larger.
REEL_CRF = 14
SHEET_SIDE = 16_383  # the largest side of a WebP picture


@dataclass(frozen=True)
class Film:
    """One player. ``psnr`` holds a value a generated frame; infinite or None means identical.

    ``mp4`` is what a browser without scripts plays; large takes need none.
    """

    title: str
    caption: str
    frames: Frames  # uint8 [T, H, W, 3]
    mp4: bytes
    series: int
    psnr: Sequence[float | None] = ()


def players(films: Sequence[Film], fps: Fraction | float, first_frame: int, start: int = 0) -> str:
    """Players in step over one timeline; film 0 is the original that the others are compared with.

    ``first_frame`` is the number of given frames before the first generated one; ``start`` is the
    number by which the page calls the films' first frame, where they are a part of longer ones.
    Raises ShapeError where a film differs from film 0 in size or length.
    """
    shapes = [check_frames(film.frames, film.title).shape for film in films]
    for film, shape in zip(films, shapes, strict=True):
        if shape != shapes[0]:
            raise ShapeError(
                f"players: got {list(shape)} for {film.title} and {list(shapes[0])} for "
                f"{films[0].title}, expected one size and length; cut or scale them first"
            )
    count, height, width = shapes[0][:3]
    is_small = fits_a_sheet(count, height, width)
    facts = {
        "frames": count,
        "width": width,
        "height": height,
        "sheetColumns": SHEET_COLUMNS,
        "firstFrame": first_frame,
        "start": start,
        "fps": float(fps),
        "heatSteps": HEAT_STEPS,
    }
    screens = "\n".join(_screen(film, width, height, is_small) for film in films)
    reel = "" if is_small else _reel(films, fps)
    columns = len(films) if len(films) <= 3 else math.ceil(math.sqrt(len(films)))
    return f"""<section class="theatre" data-film='{escape(json.dumps(facts))}' aria-label="videos">
<div class="screens" style="--columns:{columns}">
{screens}
</div>{reel}
{_deck(count, is_single=len(films) == 1)}
</section>"""


def _deck(count: int, is_single: bool) -> str:
    gains = "".join(
        f'<option value="{gain}"{" selected" if gain == 8 else ""}>×{gain}</option>'
        for gain in GAINS
    )
    compared = f"""<span class="segmented" role="group" aria-label="view">
<button type="button" data-view="picture" aria-pressed="true">Picture</button>
<button type="button" data-view="wipe" aria-pressed="false">Wipe</button>
<button type="button" data-view="difference" aria-pressed="false">Difference</button>
</span>
<button class="flicker" type="button" aria-pressed="false">Flicker map</button>
<label>strength <select class="gain">{gains}</select></label>
<button class="peek" type="button">Hold: show original</button>
"""
    if is_single:
        compared = ""
    hint = "" if is_single else "<kbd>d</kbd> difference · <kbd>f</kbd> flicker map · "
    return f"""<div class="deck">
<div class="timeline">
<button class="play" type="button" aria-label="play">▶</button>
<button class="back step" type="button" aria-label="one frame back">◀❙</button>
<button class="forth step" type="button" aria-label="one frame forward">❙▶</button>
<input type="range" min="0" max="{count - 1}" value="0" step="1" aria-label="frame">
<output></output>
</div>
<div class="tools">
{compared}<button class="light" type="button" aria-pressed="false">Brighter</button>
<label>speed <select class="speed"><option value="0.25">¼</option><option value="0.5">½</option>
<option value="1" selected>1</option><option value="2">2</option></select></label>
</div>
<p class="legend" hidden><i></i><span></span></p>
<p class="keys"><kbd>space</kbd> play or pause · <kbd>←</kbd> <kbd>→</kbd> one frame · {hint}
<kbd>?</kbd> all keys</p>
</div>"""


def _screen(film: Film, width: int, height: int, is_small: bool) -> str:
    psnr = [None if v is None or not math.isfinite(v) else round(float(v), 2) for v in film.psnr]
    title, colour = escape(film.title), colour_variable(film.series)
    source = ""
    if is_small:
        sheet = data_uri("image/webp", film_sheet(film.frames))
        video = data_uri("video/mp4", film.mp4)
        source = (
            f'\n<video controls loop muted playsinline preload="metadata" src="{video}"></video>\n'
            f'<img class="sheet" alt="" src="{sheet}">'
        )
    size = f'width="{width}" height="{height}"'
    crisp = " crisp" if is_small else ""
    return f"""<figure class="screen{crisp}" style="--c:{colour}" data-psnr='{json.dumps(psnr)}'>
<div class="glass">
<canvas class="picture" {size} role="img" aria-label="{title}"></canvas>
<canvas class="heat" {size} hidden></canvas>{source}
<span class="divider" hidden></span><span class="badge"></span>
</div>
<figcaption><b>{title}</b> <span>{escape(film.caption)}</span>
<span class="now"></span></figcaption>
</figure>"""


def fits_a_sheet(count: int, height: int, width: int) -> bool:
    """Whether a take of this shape travels as one picture."""
    rows = math.ceil(count / SHEET_COLUMNS)
    sides = (rows * height, SHEET_COLUMNS * width)
    return max(sides) <= SHEET_SIDE and sides[0] * sides[1] <= SHEET_PIXELS


def film_sheet(frames: Frames) -> bytes:
    """All frames in one WebP picture, row by row; lossless up to ``LOSSLESS_FRAMES`` frames."""
    from PIL import Image

    count, height, width = frames.shape[:3]
    rows = math.ceil(count / SHEET_COLUMNS)
    padded = np.zeros((rows * SHEET_COLUMNS, height, width, 3), dtype=np.uint8)
    padded[:count] = frames
    grid = padded.reshape(rows, SHEET_COLUMNS, height, width, 3).swapaxes(1, 2)
    buffer = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(grid.reshape(rows * height, -1, 3)))
    is_lossless = count <= LOSSLESS_FRAMES
    image.save(buffer, "WEBP", lossless=is_lossless, quality=60 if is_lossless else 90, method=3)
    return buffer.getvalue()


def _reel(films: Sequence[Film], fps: Fraction | float) -> str:
    """The one film of all takes; ``data-tile`` says how large a picture and a map is in it."""
    height, width = (side + side % 2 for side in films[0].frames.shape[1:3])
    columns = math.ceil(math.sqrt(len(films)))
    rate = fps if isinstance(fps, Fraction) else Fraction(fps).limit_denominator(100_000)
    images = _tiles([film.frames for film in films], height, width, columns)
    mp4 = encode_images(images, rate, REEL_CRF)
    tile = {"width": width, "height": height, "columns": columns}
    return f"""
<video class="reel" controls loop muted playsinline preload="auto"
data-tile='{escape(json.dumps(tile))}' src="{data_uri("video/mp4", mp4)}"></video>"""


def _tiles(films: Sequence[Frames], height: int, width: int, columns: int) -> Iterator[Frames]:
    """Frame by frame: each take above the maps of its difference and flicker, both half as large.

    Film 0 has no maps: nothing stands below it.
    """
    half = height // 2
    rows = math.ceil(len(films) / columns)
    heats = [flicker_heat(films[0], film) for film in films[1:]]
    for index, original in enumerate(films[0]):
        sheet = np.zeros((rows, columns, height + half, width, 3), dtype=np.uint8)
        for place, film in enumerate(films):
            cell = sheet[place // columns, place % columns]
            cell[: original.shape[0], : original.shape[1]] = film[index]
            if place:
                maps = (difference(original, film[index]), next(heats[place - 1]))
                for left, levels in zip((0, width // 2), map(halved, maps), strict=True):
                    tile = cell[height:, left : left + width // 2]
                    tile[: levels.shape[0], : levels.shape[1]] = to_grey(levels)[..., None]
        yield sheet.swapaxes(1, 2).reshape(rows * (height + half), columns * width, 3)
