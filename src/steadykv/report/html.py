"""Building blocks of a self-contained page: players, tables, figures, facts, and the page itself.

Every function returns an HTML fragment; text is escaped here and nowhere else. Pictures and videos
are embedded, so that one file can be sent, opened without a network, and kept.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

import numpy as np
from numpy.typing import NDArray

from steadykv.report.plots import SERIES_COUNT
from steadykv.report.video import Frames, check_frames

GAINS = (2, 4, 8, 16, 32)
LOSSLESS_FRAMES = 400  # longer films take lossy sheets, so that the page stays below tens of MB
SHEET_COLUMNS = 8


@dataclass(frozen=True)
class Film:
    """One player. ``psnr`` holds a value a generated frame; infinite or None means identical."""

    title: str
    caption: str
    frames: Frames  # uint8 [T, H, W, 3]
    mp4: bytes
    series: int
    psnr: Sequence[float | None] = ()


@dataclass(frozen=True)
class Column:
    """A table column: its head, the unit below it, and the sentence that explains it."""

    title: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Cell:
    """A table cell; ``detail`` is a small second line, ``bar`` a length of 0 to 1 below."""

    text: str
    detail: str = ""
    is_best: bool = False
    bar: float | None = None


@dataclass(frozen=True)
class Row:
    """A table row of one method; ``is_aside`` greys it (a yardstick, not a contender)."""

    title: str
    cells: Sequence[Cell]
    series: int | None
    is_aside: bool = False


@dataclass(frozen=True)
class Look:
    """A frame with one marked patch; ``box`` is x, y, width, height in pixels of the frame."""

    title: str
    caption: str
    frame: NDArray[np.uint8]  # uint8 [H, W, 3]
    box: tuple[int, int, int, int]
    series: int | None
    is_same: bool | None = None  # whether it is the patch of the original; None says nothing


def data_uri(kind: str, data: bytes) -> str:
    """``data`` as a data URI of the media type ``kind``."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def players(films: Sequence[Film], fps: int, first_frame: int) -> str:
    """Players in step over one timeline; film 0 is the original that the others are compared with.

    ``first_frame`` is the number of given frames before the first generated one.
    """
    for film in films:
        check_frames(film.frames, film.title)
    count, height, width = films[0].frames.shape[:3]
    facts = {
        "frames": count,
        "width": width,
        "height": height,
        "sheetColumns": SHEET_COLUMNS,
        "firstFrame": first_frame,
        "fps": fps,
    }
    screens = "\n".join(_screen(film, width, height) for film in films)
    gains = "".join(
        f'<option value="{gain}"{" selected" if gain == 8 else ""}>×{gain}</option>'
        for gain in GAINS
    )
    columns = len(films) if len(films) <= 3 else math.ceil(math.sqrt(len(films)))
    return f"""<section class="theatre" data-film='{escape(json.dumps(facts))}' aria-label="videos">
<div class="screens" style="--columns:{columns}">
{screens}
</div>
<div class="deck">
<div class="timeline">
<button class="play" type="button" aria-label="play">▶</button>
<button class="back step" type="button" aria-label="one frame back">◀❙</button>
<button class="forth step" type="button" aria-label="one frame forward">❙▶</button>
<input type="range" min="0" max="{count - 1}" value="0" step="1" aria-label="frame">
<output></output>
</div>
<div class="tools">
<span class="segmented" role="group" aria-label="view">
<button type="button" data-view="picture" aria-pressed="true">Picture</button>
<button type="button" data-view="difference" aria-pressed="false">Difference</button>
</span>
<label>strength <select class="gain">{gains}</select></label>
<button class="peek" type="button">Hold: show original</button>
<button class="light" type="button" aria-pressed="false">Brighter</button>
<label>speed <select class="speed"><option value="0.25">¼</option><option value="0.5">½</option>
<option value="1" selected>1</option><option value="2">2</option></select></label>
</div>
<p class="keys"><kbd>space</kbd> play or pause · <kbd>←</kbd> <kbd>→</kbd> one frame ·
<kbd>d</kbd> difference to the original · hold <kbd>b</kbd> to see the original everywhere</p>
</div>
</section>"""


def _screen(film: Film, width: int, height: int) -> str:
    psnr = [None if v is None or not math.isfinite(v) else round(float(v), 2) for v in film.psnr]
    title, colour = escape(film.title), _colour(film.series)
    sheet = data_uri("image/webp", film_sheet(film.frames))
    video = data_uri("video/mp4", film.mp4)
    return f"""<figure class="screen" style="--c:{colour}" data-psnr='{json.dumps(psnr)}'>
<div class="glass">
<canvas width="{width}" height="{height}" role="img" aria-label="{title}"></canvas>
<video controls loop muted playsinline preload="metadata" src="{video}"></video>
<img class="sheet" alt="" src="{sheet}"><span class="badge"></span>
</div>
<figcaption><b>{title}</b> <span>{escape(film.caption)}</span>
<span class="now"></span></figcaption>
</figure>"""


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


def table(columns: Sequence[Column], rows: Sequence[Row], first: str = "cache") -> str:
    """A table that scrolls sideways where it is too wide, and the meaning of its columns below."""
    head = "".join(
        f"<th>{escape(column.title)}<small>{escape(column.unit)}</small></th>" for column in columns
    )
    body = []
    for row in rows:
        colour = _colour(row.series)
        cells = "".join(_cell(cell) for cell in row.cells)
        mark = f' class="aside" style="--c:{colour}"' if row.is_aside else f' style="--c:{colour}"'
        body.append(f"<tr{mark}><th><i></i>{escape(row.title)}</th>{cells}</tr>")
    meanings = "".join(
        f"<dt>{escape(column.title)}</dt><dd>{escape(column.meaning)}</dd>" for column in columns
    )
    return f"""<div class="scroll"><table><thead><tr><th>{escape(first)}</th>{head}</tr></thead>
<tbody>{"".join(body)}</tbody></table></div>
<details><summary>What the columns mean</summary><dl>{meanings}</dl></details>"""


def _cell(cell: Cell) -> str:
    detail = f"<small>{escape(cell.detail)}</small>" if cell.detail else ""
    width = None if cell.bar is None else f"{100 * cell.bar:.1f}%"
    bar = "" if width is None else f'<span class="bar" style="width:{width}"></span>'
    mark = ' class="best"' if cell.is_best else ""
    return f"<td{mark}>{escape(cell.text)}{detail}{bar}</td>"


def looks(pictures: Sequence[Look]) -> str:
    """Frames side by side, one patch of each framed."""
    return f'<div class="figure"><div class="look">{"".join(map(_look, pictures))}</div></div>'


def _look(look: Look) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(look.frame)).save(buffer, "PNG")
    height, width = look.frame.shape[:2]
    x, y, box_width, box_height = look.box
    colour = _colour(look.series)
    # The frame of the patch: white under the colour, so that it shows on any picture.
    place = f'x="{x - 1}" y="{y - 1}" width="{box_width + 2}" height="{box_height + 2}"'
    rectangle = f'{place} rx="1" fill="none"'
    verdict = {
        None: "",
        True: '<span class="same">the same patch,</span> ',
        False: '<span class="other">another patch,</span> ',
    }[look.is_same]
    title, picture = escape(look.title), data_uri("image/png", buffer.getvalue())
    return f"""<figure style="--c:{colour}">
<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title}">
<image width="{width}" height="{height}" href="{picture}"/>
<rect {rectangle} stroke="#fff" stroke-width="3"/>
<rect {rectangle} stroke="{colour}" stroke-width="1.6"/>
</svg>
<figcaption><b>{title}</b><br>{verdict}{escape(look.caption)}</figcaption></figure>"""


def figure(svg: str) -> str:
    """A card around an inline SVG."""
    return f'<div class="figure">{svg}</div>'


def heading(text: str) -> str:
    """A section heading."""
    return f"<h2>{escape(text)}</h2>"


def paragraphs(texts: Sequence[str], css_class: str = "") -> str:
    """One escaped paragraph a text."""
    mark = f' class="{css_class}"' if css_class else ""
    return "".join(f"<p{mark}>{escape(text)}</p>" for text in texts)


def command_line(text: str) -> str:
    """A command in a box of its own."""
    return f"<pre>{escape(text)}</pre>"


def facts(entries: Mapping[str, str]) -> str:
    """A list of names and values."""
    return (
        "<dl>"
        + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries.items())
        + "</dl>"
    )


def page(title: str, headline: str, lead: Sequence[str], body: Sequence[str], footer: str) -> str:
    """The whole document. ``body`` are fragments; every other text is plain and gets escaped."""
    from steadykv import __version__

    folder = files("steadykv.report") / "page"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    return Template(read("page.html")).substitute(
        version=escape(__version__),
        title=escape(title),
        style=read("page.css"),
        headline=escape(headline),
        lead=paragraphs(lead, "lead"),
        body="\n".join(body),
        footer=escape(footer),
        script=read("player.js"),
    )


def _colour(series: int | None) -> str:
    return "var(--dim)" if series is None else f"var(--s{series % SERIES_COUNT})"
