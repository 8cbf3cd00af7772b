"""The page of `steadykv measure`: videos in step, their numbers, and each metric by frame.

One measurement fills it, or several of the same frames of one reference (`steadykv report`).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from steadykv.errors import ShapeError
from steadykv.evaluation.video_excerpt import worst_start
from steadykv.report import html, text
from steadykv.report.measure_figures import METRICS, colour, figures, known, number, show
from steadykv.report.theatre import REEL_CRF, Film, fits_a_sheet, players
from steadykv.report.video import Frames, check_frames, encode_mp4

Data = Mapping[str, Any]

# A page that is sent and opened on a phone. Where the players' films take more than that, fewer
# frames are shown: noise of 720p costs some 2 MB a frame at crf 14.
PAGE_BYTES = 64_000_000
FEWEST_FRAMES = 8


def measure_page(
    data: Data, first: Frames, second: Frames, most_bytes: int | None = PAGE_BYTES
) -> str:
    """The page of one measurement: see `measured_page`."""
    return measured_page([data], [first, second], str_command(data["command"]), most_bytes)


def measured_page(
    runs: Sequence[Data],
    films: Sequence[Frames],
    command: str,
    most_bytes: int | None = PAGE_BYTES,
    notes: Sequence[str] = (),
    start: int | None = None,
) -> str:
    """The whole page as one HTML document that needs no other file and no network.

    runs: what `measure.json` holds, of the same frames of the same reference. films: the excerpt
    of the reference and of each judged video, uint8 [T, H, W, 3]; none where there are no players.
    Where their films take more than `most_bytes`, the worst part of them is shown. notes: said
    beside those of the runs. start: frame of the reference with which films begin (default: that of
    the first run's own excerpt). Raises ShapeError where films differ in length or size.
    """
    reference, labels = _name(runs[0]["sources"][0]), _labels(runs)
    theatre, shown, said = _theatre(runs, films, [reference, *labels], most_bytes, start)
    told = [
        note if len(runs) == 1 else f"{label}: {note}"
        for data, label in zip(runs, labels, strict=True)
        for note in data.get("notes", [])
    ]
    body = [
        theatre,
        html.paragraphs([*said, *dict.fromkeys([*told, *notes])], "note"),
        html.heading("In numbers"),
        _table(runs, labels),
        *_windows(runs),
        html.heading("Frame by frame"),
        html.paragraphs([_about_figures(runs, shown)]),
        f'<div class="pair">{"".join(map(html.figure, figures(runs, labels, shown)))}</div>',
        html.heading("How this was made"),
        html.command_line(command),
        html.facts(_facts(runs, labels)),
    ]
    names = text.listed(labels)
    return html.page(
        title=f"steadykv: {reference} and {names}",
        headline=f"{names} measured against {reference}",
        lead=lead(runs, labels, reference),
        body=body,
        footer="All numbers come from the decoded frames, never from the films on this page.",
    )


def measured_section(runs: Sequence[Data], number: int) -> list[str]:
    """Table and figures of one group of measurements on a page of several."""
    labels = _labels(runs)
    drawn = figures(runs, labels, prefix=f"group-{number}")
    return [_table(runs, labels), f'<div class="pair">{"".join(map(html.figure, drawn))}</div>']


def _theatre(
    runs: Sequence[Data],
    films: Sequence[Frames],
    names: Sequence[str],
    most_bytes: int | None,
    begin: int | None,
) -> tuple[str, range | None, list[str]]:
    """The players, the frames (of the reference) that they play, and what is to say about them."""
    if not films:
        return "", None, []
    checked = [check_frames(film, name) for film, name in zip(films, names, strict=True)]
    if len({film.shape for film in checked}) != 1:
        raise ShapeError(
            f"measure_page: got videos of {text.listed([str(list(f.shape)) for f in checked])}, "
            "expected the frames that were compared, in one size and length"
        )
    base, held = int(runs[0].get("start", 0)), len(checked[0])
    start = int((runs[0].get("excerpt") or {}).get("start", base)) if begin is None else begin
    fps = Fraction(runs[0]["fps"]).limit_denominator(100_000)
    count, offset = held, 0
    while True:
        shown = range(start + offset, start + offset + count)
        part = slice(shown.start - base, shown.stop - base)
        shots = [Film(names[0], "the reference", checked[0][offset : offset + count], b"", 0)]
        for index, (data, film, label) in enumerate(zip(runs, checked[1:], names[1:], strict=True)):
            psnr = list(map(number, data["by_frame"].get("psnr", [])))[part]
            if None in psnr:  # not measured; a player takes it for identical
                psnr = []
            frames = film[offset : offset + count]
            shots.append(Film(label, _caption(data), frames, b"", colour(index), psnr))
        markup = players([_with_file(shot, fps) for shot in shots], fps, 0, shown.start)
        if most_bytes is None or len(markup) <= most_bytes or count <= FEWEST_FRAMES:
            return markup, shown, _about_players(runs[0], shown, checked[0], most_bytes if
                                                 count < held else None)  # fmt: skip
        count = max(FEWEST_FRAMES, min(count - 1, int(0.9 * count * most_bytes / len(markup))))
        offset = worst_start(_flicker(runs)[start - base : start - base + held - 1], count)


def _about_players(data: Data, shown: range, film: Frames, limit: int | None) -> list[str]:
    """Which frames play, at which size, and how they are encoded."""
    height, width = film.shape[1:3]
    own = (data.get("width", width), data.get("height", height))
    said = []
    if len(shown) < data["frames"]:
        where = f"frames {shown.start:,} to {shown.stop - 1:,}"
        said.append(
            f"The players show {where}, {len(shown):,} of the {data['frames']:,} that were "
            "measured; the numbers are about all of them."
        )
    if limit is not None:
        said.append(f"More of them would make this page larger than {limit / 1e6:,.0f} MB.")
    if own == (width, height):
        small = fits_a_sheet(len(shown), height, width)
        how = "without loss" if small else f"with x264 at crf {REEL_CRF}"
        said.append(f"They have their own size, {width} × {height}, and are encoded {how}.")
    else:
        said.append(f"They are scaled from {own[0]} × {own[1]} to {width} × {height} pixels, which "
                    "hides their finest flicker.")  # fmt: skip
    return [" ".join(said)]


def _about_figures(runs: Sequence[Data], shown: range | None) -> str:
    said = "A value of a step stands at the frame that the step leads to."
    if shown is None:
        return said
    if len(shown) < runs[0]["frames"]:
        said += " The shaded frames are those that the players have."
    return f"{text.FOLLOWS} {said}"


def lead(runs: Sequence[Data], labels: Sequence[str], reference: str) -> list[str]:
    """The most telling numbers in words."""
    first = runs[0]
    length = f"{first['frames']} frames, {first['frames'] / first['fps']:.1f} seconds"
    found = []
    for data, label in zip(runs, labels, strict=True):
        summary = data["summary"]
        if number(summary.get("psnr")) == math.inf:
            found.append(f"{label} shows the same pixels as {reference} in all of its {length}.")
            continue
        names = [n for n in ("psnr", "ssim", "lpips", "flicker_error") if n in summary]
        said = ", ".join(f"{METRICS[name].title} {show(name, summary[name])}" for name in names)
        over = f"Over {length}" if len(runs) == 1 else label
        found.append(f"{over}: {said}." if said else f"{over}.")
    return found


def _flicker(runs: Sequence[Data]) -> list[float]:
    """The flicker error of every step, the largest of the runs."""
    lists = [data["by_frame"].get("flicker_error", []) for data in runs]
    longest = max(map(len, lists), default=0)
    return [
        max((number(v[i]) or 0.0 for v in lists if i < len(v)), default=0.0) for i in range(longest)
    ]


def _labels(runs: Sequence[Data]) -> list[str]:
    """A name for each judged video: of its file, with its folder where names repeat."""
    paths = [str(data["sources"][1]["path"]).replace("\\", "/") for data in runs]
    names = [path.rsplit("/", 1)[-1] for path in paths]
    wide = ["/".join(path.rsplit("/", 2)[-2:]) for path in paths]
    found = [n if names.count(n) == 1 else w for n, w in zip(names, wide, strict=True)]
    return [
        n if found.count(n) == 1 else f"{n} ({found[: i + 1].count(n)})"
        for i, n in enumerate(found)
    ]


def _caption(data: Data) -> str:
    source = data["sources"][1]
    return f"{source['codec']}, {source['width']} × {source['height']}"


def _table(runs: Sequence[Data], labels: Sequence[str]) -> str:
    names = list(dict.fromkeys(name for data in runs for name in data["summary"]))
    columns = [html.Column(k.title, k.unit, k.meaning) for k in map(known, names)]
    rows = [
        html.Row(label, [_cell(data, name) for name in names], colour(index))
        for index, (data, label) in enumerate(zip(runs, labels, strict=True))
    ]
    return html.table(columns, rows, first="video")


def _windows(runs: Sequence[Data]) -> list[str]:
    """The means of every --window of a single measurement, folded away."""
    windows = runs[0].get("windows") if len(runs) == 1 else None
    if not windows:
        return []
    names = list(runs[0]["summary"])
    rows = [
        html.Row(
            f"{window['start']:,}–{window['end'] - 1:,}",
            [html.Cell(show(name, window.get(name))) for name in names],
            colour(0),
        )
        for window in windows
    ]
    columns = [html.Column(k.title, k.unit, k.meaning) for k in map(known, names)]
    return [html.folded("By window", html.plain_table(columns, rows, first="frames"))]


def _cell(data: Data, name: str) -> html.Cell:
    """The mean, and below it the worst frame where the file knows it."""
    tail = (data.get("tails") or {}).get(name)
    worst = "" if tail is None else f"{show(name, tail['worst'])} at {tail['worst_frame']:,}"
    return html.Cell(show(name, data["summary"].get(name)), worst)


def _facts(runs: Sequence[Data], labels: Sequence[str]) -> dict[str, str]:
    first = runs[0]
    words = ["second video"] if len(runs) == 1 else [f"video {n}" for n in range(1, len(runs) + 1)]
    entries = {"first video" if len(runs) == 1 else "reference": _source(first["sources"][0])}
    for word, data in zip(words, runs, strict=True):
        entries[word] = _source(data["sources"][1])
    entries["compared"] = f"{first['frames']} frames, {float(first['fps']):g} a second"
    if len(runs) > 1:
        entries["commands"] = "; ".join(str_command(data["command"]) for data in runs)
    return entries | html.versions(first["environment"])


def _source(source: Data) -> str:
    parts = [
        f"{source['width']} × {source['height']}",
        f"{source['frames']} frames",
        f"{float(source['fps']):g} a second",
        source["codec"],
        source["pixel_format"],
    ]
    return f"{source['path']}: {', '.join(str(p) for p in parts if p)}"


def str_command(command: Any) -> str:
    """The command of a run as text."""
    return command if isinstance(command, str) else shlex.join(map(str, command))


def _with_file(film: Film, fps: Fraction) -> Film:
    """With a file for browsers without scripts; takes too large for a sheet share one film."""
    small = fits_a_sheet(*film.frames.shape[:3])
    mp4 = encode_mp4(film.frames, fps) if small else b""
    return Film(film.title, film.caption, film.frames, mp4, film.series, film.psnr)


def _name(source: Data) -> str:
    return str(source["path"]).replace("\\", "/").rsplit("/", 1)[-1]
