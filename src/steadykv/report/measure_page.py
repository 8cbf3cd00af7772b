"""The page of `steadykv measure`: two videos in step, their numbers, and each metric by frame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from steadykv.errors import ShapeError
from steadykv.report import html, plots, text
from steadykv.report.theatre import Film, players
from steadykv.report.video import Frames, check_frames

Data = Mapping[str, Any]

# Pixels a player gets, 150 frames of 720p: about 25 MB of page for a video of film quality.
PLAYER_PIXELS = 150 * 1280 * 720


# A metric that needs no reference has a value for each video: its names end so.
FIRST, SECOND = "_a", "_b"


@dataclass(frozen=True)
class Known:
    """What a metric is called and how it is read; `is_percentage` marks nothing else."""

    title: str
    unit: str
    meaning: str
    digits: int = 4


METRICS = {
    "psnr": Known("PSNR", "dB", "Closeness: more is closer, 6 dB more is half the error. ∞ is the "
                  "same picture.", 2),
    "ssim": Known("SSIM", "at most 1", "Structural similarity; 1 is the same picture."),
    "ms_ssim": Known("MS-SSIM", "at most 1", "SSIM over several sizes of detail; 1 is the same."),
    "lpips": Known("LPIPS", "0 is best", "Distance as a trained network sees it; 0 is the same."),
    "flicker_error": Known("flicker error", "0 is best", "How much the change from frame to frame "
                           "differs from the first video's; full range of a pixel is 1."),
    "flicker_index": Known("flicker index", "0 is calm", "Flicker of one video alone, with its "
                           "motion taken out."),
    "flicker_index_a": Known("flicker index", "first video", "Flicker of the first video alone, "
                             "with its motion taken out; 0 is calm."),
    "flicker_index_b": Known("flicker index", "second video", "The same of the second video."),
}  # fmt: skip


def measure_page(data: Data, first: Frames, second: Frames) -> str:
    """The whole page as one HTML document that needs no other file and no network.

    data: what `measure.json` holds. first, second: the frames that were compared, uint8
    [T, H, W, 3]; they may be fewer than were measured, from the beginning on, and the players show
    at most `PLAYER_PIXELS` of them. Raises ShapeError where the two differ in length or size.
    """
    first, second = check_frames(first, "first video"), check_frames(second, "second video")
    if first.shape != second.shape:
        raise ShapeError(
            f"measure_page: got videos of {list(first.shape)} and {list(second.shape)}, expected "
            "the frames that were compared, in one size and length"
        )
    count = min(len(first), max(1, PLAYER_PIXELS // (first.shape[1] * first.shape[2])))
    names = [_name(source) for source in data["sources"]]
    fps = Fraction(data["fps"]).limit_denominator(100_000)
    psnr = [_number(value) for value in data["by_frame"].get("psnr", [])]
    if None in psnr:  # not measured; a player takes it for identical
        psnr = []
    films = [
        Film(names[0], "first", first[:count], _file(first[:count], fps), 0),
        Film(names[1], "second", second[:count], _file(second[:count], fps), 3, psnr[:count]),
    ]
    shown = []
    if count < data["frames"]:
        shown = [f"The players show the first {count} of {data['frames']} frames that were "
                 "measured; the numbers are about all of them."]  # fmt: skip
    size = (data.get("width", first.shape[2]), data.get("height", first.shape[1]))
    if size != (first.shape[2], first.shape[1]):
        shown.append(f"They are scaled from {size[0]} × {size[1]} to {first.shape[2]} × "
                     f"{first.shape[1]} pixels, which hides their finest flicker.")  # fmt: skip
    body = [
        players(films, fps, 0),
        html.paragraphs([*shown, *data.get("notes", [])], "note"),
        html.heading("In numbers"),
        _table(data, names),
        html.heading("Frame by frame"),
        html.paragraphs(
            [f"{text.FOLLOWS} A value of a step stands at the frame that the step leads to."]),
        f'<div class="pair">{"".join(map(html.figure, figures(data, names[1])))}</div>',
        html.heading("How this was made"),
        html.command_line(_command(data["command"])),
        html.facts(_facts(data)),
    ]  # fmt: skip
    return html.page(
        title=f"steadykv: {names[0]} and {names[1]}",
        headline=f"{names[1]} measured against {names[0]}",
        lead=lead(data, names),
        body=body,
        footer="All numbers come from the decoded frames, never from the films on this page.",
    )


def lead(data: Data, names: Sequence[str]) -> list[str]:
    """The most telling numbers in words."""
    summary = data["summary"]
    length = f"{data['frames']} frames, {data['frames'] / data['fps']:.1f} seconds"
    psnr = _number(summary.get("psnr"))
    if psnr == math.inf:
        return [f"{names[1]} shows the same pixels as {names[0]} in all of its {length}."]
    known = [name for name in ("psnr", "ssim", "lpips", "flicker_error") if name in summary]
    said = ", ".join(f"{METRICS[name].title} {show(name, summary[name])}" for name in known)
    return [f"Over {length}: {said}."] if said else [f"Over {length}."]


def show(name: str, value: Any) -> str:
    """A number of the summary as text; infinite is ∞, and what was not measured a dash."""
    number = _number(value)
    if number is None:
        return "–"
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    digits = _known(name).digits
    unit = " dB" if _known(name).unit == "dB" else ""
    # A small number keeps three digits: 0.0000 would say that it is none.
    small = number != 0 and abs(number) < 10**-digits
    return (f"{number:.2e}" if small else f"{number:.{digits}f}").replace("-", "−") + unit


def figures(data: Data, label: str) -> list[str]:
    """One figure a metric that has values by frame; those of one video each share theirs."""
    result: list[str] = []
    by_frame = {name: [_number(v) for v in found] for name, found in data["by_frame"].items()}
    for name, values in by_frame.items():
        if name.endswith(SECOND) and name.removesuffix(SECOND) + FIRST in by_frame:
            continue
        lines = [(values, 3)]
        other = by_frame.get(name.removesuffix(FIRST) + SECOND) if name.endswith(FIRST) else None
        title = f"{_known(name).title} of {label}"
        if other is not None:
            lines = [(values, 0), (other, 3)]
            title = f"{_known(name.removesuffix(FIRST)).title} of both videos"
        if any(value is not None for line, _ in lines for value in line):
            figure, axes = _figure(name.removesuffix(FIRST) if other else name, lines, data)
            prefix = f"by-frame-{len(result)}"
            result.append(plots.inline_svg(figure, prefix, escape(f"{title} by frame"), axes))
    return result


def _figure(
    name: str, lines: Sequence[tuple[list[float | None], int]], data: Data
) -> tuple[Figure, Axes]:
    """Lines of (values, colour); infinite ones stand at the upper edge, which the axis names."""
    known, count = _known(name), max(1, data["frames"])
    figure, axes = plots.blank_figure(5.2, 2.6, f"{known.title}, {known.unit}".rstrip(", "))
    every = [v for values, _ in lines for v in values if v is not None]
    finite = [v for v in every if math.isfinite(v)]
    low, top = min(finite, default=0.0), max(finite, default=1.0)
    edge = top + 0.15 * (top - low or 1.0)
    for values, colour in lines:
        heights = [math.nan if v is None else edge if v == math.inf else v for v in values]
        start = data["frames"] - len(values)  # a value of a step belongs to its second frame
        axes.plot(range(start, data["frames"]), heights, color=plots.colour_of(colour),
                  linewidth=1.8, marker="o" if len(values) == 1 else None)  # fmt: skip
    if known.unit == "0 is best" and low >= 0:
        axes.set_ylim(0.0, 1.1 * top or 1.0)
    axes.set_xlim(-0.5, count - 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    if math.inf in every:
        ticks = [tick for tick in axes.get_yticks() if low <= tick <= top]
        axes.set_yticks([*ticks, edge], [*(f"{tick:g}" for tick in ticks), "∞"])
    axes.set_xlabel("frame")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    return figure, axes


def _table(data: Data, names: Sequence[str]) -> str:
    summary = data["summary"]
    columns = [html.Column(k.title, k.unit, k.meaning) for k in map(_known, summary)]
    cells = [html.Cell(show(name, value)) for name, value in summary.items()]
    return html.table(columns, [html.Row(names[1], cells, 3)], first="video")


def _facts(data: Data) -> dict[str, str]:
    environment = data["environment"]
    entries = {}
    for word, source in zip(("first video", "second video"), data["sources"], strict=True):
        parts = [
            f"{source['width']} × {source['height']}",
            f"{source['frames']} frames",
            f"{float(source['fps']):g} a second",
            source["codec"],
            source["pixel_format"],
        ]
        entries[word] = f"{source['path']}: {', '.join(str(p) for p in parts if p)}"  # fmt: skip
    entries["compared"] = f"{data['frames']} frames, {float(data['fps']):g} a second"
    return entries | html.versions(environment)


def _command(command: Any) -> str:
    import shlex

    return command if isinstance(command, str) else shlex.join(map(str, command))


def _file(frames: Frames, fps: Fraction) -> bytes:
    """For browsers without scripts; takes too large for a sheet have their one film instead."""
    from steadykv.report.theatre import fits_a_sheet
    from steadykv.report.video import encode_mp4

    return encode_mp4(frames, fps) if fits_a_sheet(*frames.shape[:3]) else b""


def _name(source: Data) -> str:
    return str(source["path"]).replace("\\", "/").rsplit("/", 1)[-1]


def _known(name: str) -> Known:
    title = name.replace("_", " ")
    return METRICS.get(name, Known(title, "", f"{title}, as `steadykv measure` names it."))


def _number(value: Any) -> float | None:
    """A number of the file: JSON has no infinity, so it is the word "inf" there."""
    return None if value is None else float(value)
