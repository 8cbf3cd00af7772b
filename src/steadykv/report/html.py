"""Building blocks of a self-contained page: tables, figures, facts, and the page itself.

Every function returns an HTML fragment; text is escaped here and nowhere else. Pictures and videos
are embedded, so that one file can be sent, opened without a network, and kept.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadykv.report.plots import SERIES_COUNT

# Files of page/ in the order in which the page holds them; later scripts use earlier ones.
STYLES = ("page.css", "theatre.css")
SCRIPTS = ("page.js", "pixels.js", "sources.js", "player.js", "curves.js", "arrows.js", "tables.js")


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
    """A frame with one marked patch; ``box`` is x, y, width, height in pixels of the frame.

    ``number`` is the frame's place in the players.
    """

    title: str
    caption: str
    frame: NDArray[np.uint8]  # uint8 [H, W, 3]
    box: tuple[int, int, int, int]
    series: int | None
    number: int
    is_same: bool | None = None  # whether it is the patch of the original; None says nothing


def data_uri(kind: str, data: bytes) -> str:
    """``data`` as a data URI of the media type ``kind``."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def table(columns: Sequence[Column], rows: Sequence[Row], first: str = "cache") -> str:
    """A table that scrolls sideways where it is too wide, and the meaning of its columns below."""
    meanings = "".join(
        f"<dt>{escape(column.title)}</dt><dd>{escape(column.meaning)}</dd>" for column in columns
    )
    explained = f"<dl>{meanings}</dl>"
    return f"{plain_table(columns, rows, first)}\n{folded('What the columns mean', explained)}"


def folded(summary: str, fragment: str) -> str:
    """A fragment that shows once its summary is clicked."""
    return f"<details><summary>{escape(summary)}</summary>{fragment}</details>"


def plain_table(columns: Sequence[Column], rows: Sequence[Row], first: str = "cache") -> str:
    """A table that scrolls sideways where it is too wide."""
    head = "".join(
        f"<th>{escape(column.title)}<small>{escape(column.unit)}</small></th>" for column in columns
    )
    body = []
    for row in rows:
        colour = colour_variable(row.series)
        cells = "".join(_cell(cell) for cell in row.cells)
        mark = f' class="aside" style="--c:{colour}"' if row.is_aside else f' style="--c:{colour}"'
        body.append(f"<tr{mark}><th><i></i>{escape(row.title)}</th>{cells}</tr>")
    return f"""<div class="scroll"><table><thead><tr><th>{escape(first)}</th>{head}</tr></thead>
<tbody>{"".join(body)}</tbody></table></div>"""


def _cell(cell: Cell) -> str:
    detail = f"<small>{escape(cell.detail)}</small>" if cell.detail else ""
    width = None if cell.bar is None else f"{100 * cell.bar:.1f}%"
    bar = "" if width is None else f'<span class="bar" style="width:{width}"></span>'
    mark = ' class="best"' if cell.is_best else ""
    return f"<td{mark}>{escape(cell.text)}{detail}{bar}</td>"


def looks(pictures: Sequence[Look]) -> str:
    """Frames side by side, one patch of each framed; arrows lead from the first to the others."""
    return f'<div class="figure"><div class="look asks">{"".join(map(_look, pictures))}</div></div>'


def _look(look: Look) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(look.frame)).save(buffer, "PNG")
    height, width = look.frame.shape[:2]
    x, y, box_width, box_height = look.box
    colour = colour_variable(look.series)
    # The frame of the patch: white under the colour, so that it shows on any picture.
    place = f'x="{x - 1}" y="{y - 1}" width="{box_width + 2}" height="{box_height + 2}"'
    rectangle = f'{place} rx="1" fill="none"'
    verdict = {
        None: "",
        True: '<span class="same">the same patch,</span> ',
        False: '<span class="other">another patch,</span> ',
    }[look.is_same]
    title, picture = escape(look.title), data_uri("image/png", buffer.getvalue())
    return f"""<figure style="--c:{colour}" data-frame="{look.number}">
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


def subheading(text: str) -> str:
    """A heading within a section."""
    return f"<h3>{escape(text)}</h3>"


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


def versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """What `evaluation.provenance.environment` found, as names and values."""
    return {
        "device": f"{environment['device']} ({environment['device_name']})",
        "versions": f"steadykv {environment['steadykv']}, torch {environment['torch']}, "
        f"Python {environment['python']}, {environment['system']}",
        "commit": str(environment["commit"] or "unknown (not run from a checkout)"),
    }


def page(title: str, headline: str, lead: Sequence[str], body: Sequence[str], footer: str) -> str:
    """The whole document. ``body`` are fragments; every other text is plain and gets escaped."""
    from steadykv import __version__

    folder = files("steadykv.report") / "page"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    return Template(read("page.html")).substitute(
        version=escape(__version__),
        title=escape(title),
        style="\n".join(map(read, STYLES)),
        headline=escape(headline),
        lead=paragraphs(lead, "lead"),
        body="\n".join(body),
        footer=escape(footer),
        script="\n".join(map(read, SCRIPTS)),
    )


def colour_variable(series: int | None) -> str:
    """The style sheet's colour of a series; None is grey."""
    return "var(--dim)" if series is None else f"var(--s{series % SERIES_COUNT})"
