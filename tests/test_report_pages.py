"""The page of a real comparison: complete, self-contained, and true to the rows it shows."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from steadykv.evaluation.collector import ComparisonResult
from steadykv.evaluation.comparison import run_comparison
from steadykv.evaluation.metrics import psnr_by_frame
from steadykv.report import text
from steadykv.report.html import Cell, Column, Row, looks, table
from steadykv.report.measures import is_best, measures
from steadykv.report.pages import Report, report_page, shift_looks, side_captions
from steadykv.report.tables import number_table
from steadykv.report.terminal import result_table
from steadykv.report.theatre import SHEET_COLUMNS, film_sheet
from steadykv.report.video import decode_mp4, encode_mp4, enlarge
from tests.worlds import TINY, tiny_episodes, tiny_world

METHODS = ("bf16", "kivi", "quantwm", "bf16:qvg")
FRAMES = 12
VOID = {"meta", "img", "input", "br", "rect", "image", "path", "use", "link"}


@pytest.fixture(scope="module")
def result() -> ComparisonResult:
    return run_comparison(
        tiny_world(),
        tiny_episodes(2),
        METHODS,
        frames=FRAMES,
        centroids=8,
        paired_against="kivi",
        resamples=200,
    )


@pytest.fixture(scope="module")
def report(result: ComparisonResult) -> Report:
    videos = {method: kept[0].numpy() for method, kept in result.videos.items()}
    return Report(
        rows=result.rows,
        videos=videos,
        mp4={name: encode_mp4(enlarge(video, 2), 12) for name, video in videos.items()},
        shift=result.shift,
        fps=12,
        command="steadykv compare --episodes 2 --out 'a <folder>'",
    )


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return report_page(report)


class Reader(HTMLParser):
    """Checks that tags nest, and collects tags, visible text and cells."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def named(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [
            found
            for name, found in self.tags
            if name == tag and all(found.get(key) == value for key, value in attributes.items())
        ]


@pytest.fixture(scope="module")
def reader(page: str) -> Reader:
    return Reader(page)


def embedded(uri: str | None, kind: str) -> bytes:
    assert uri is not None
    assert uri.startswith(f"data:{kind};base64,")
    return base64.b64decode(uri.partition(",")[2], validate=True)


def links(reader: Reader) -> Iterator[str]:
    for _, attributes in reader.tags:
        for name in ("src", "href", "xlink:href", "poster", "action", "srcset", "data"):
            if attributes.get(name):
                yield str(attributes[name])


def test_the_page_loads_nothing(page: str, reader: Reader) -> None:
    assert not re.search(r"(?:https?:)?//[a-z]", re.sub(r"base64,[\w+/=]+", "", page))
    assert {link.partition(":")[0] for link in links(reader) if not link.startswith("#")} == {
        "data"
    }
    assert "@import" not in page
    assert not re.search(r"\b(?:fetch|XMLHttpRequest|import)\s*\(", page)


def test_every_method_has_its_video_with_every_frame(report: Report, reader: Reader) -> None:
    videos = reader.named("video")
    assert len(videos) == len(METHODS)
    for method, found in zip(METHODS, videos, strict=True):
        decoded = decode_mp4(embedded(found["src"], "video/mp4"))
        assert len(decoded) == 3 + FRAMES
        shown = decoded[:, ::2, ::2].astype(float)
        assert np.abs(shown - report.videos[method]).mean() < 4.0
        assert text.method_title(method) in "".join(reader.text)


def test_the_players_show_the_exact_pixels(report: Report, reader: Reader) -> None:
    (theatre,) = reader.named("section")
    facts = json.loads(theatre["data-film"] or "")
    assert facts["frames"] == 3 + FRAMES
    assert facts["firstFrame"] == 3
    sheets = reader.named("img", **{"class": "sheet"})
    for method, found in zip(METHODS, sheets, strict=True):
        with Image.open(io.BytesIO(embedded(found["src"], "image/webp"))) as image:
            sheet = np.asarray(image.convert("RGB"))
        height, width = facts["height"], facts["width"]
        for frame in range(facts["frames"]):
            top, left = frame // SHEET_COLUMNS * height, frame % SHEET_COLUMNS * width
            np.testing.assert_array_equal(
                sheet[top : top + height, left : left + width], report.videos[method][frame]
            )


def test_the_players_know_the_psnr_of_what_they_show(report: Report, reader: Reader) -> None:
    screens = [found for found in reader.named("figure") if "data-psnr" in found]
    for method, found in zip(METHODS, screens, strict=True):
        shown = json.loads(found["data-psnr"] or "")
        true = psnr_by_frame(report.videos["bf16"], report.videos[method])[3:].tolist()
        expected = [None if value == float("inf") else round(value, 2) for value in true]
        assert shown == expected
    assert json.loads(screens[0]["data-psnr"] or "") == [None] * FRAMES


def test_long_films_are_kept_small() -> None:
    frames = np.random.default_rng(0).integers(0, 255, (500, 16, 16, 3), dtype=np.uint8)
    lossless = film_sheet(frames[:300])
    assert len(film_sheet(frames)) < len(lossless)


def cells(html: str) -> list[list[str]]:
    """Text of a table's body, row by row, without the small second lines."""
    body = html[html.index("<tbody>") : html.index("</tbody>")]
    body = re.sub(r"<small>.*?</small>", "", body)
    return [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", line)]
        for line in re.findall(r"<tr.*?</tr>", body)
    ]


def test_the_table_shows_the_numbers_of_the_rows(report: Report) -> None:
    lines = cells(number_table(report.rows, report.series))
    titles = [text.method_title(method) for method in (*METHODS, "floor")]
    assert [line[0] for line in lines] == titles
    columns = measures(report.rows)
    kivi = report.rows[1]
    shown = dict(zip([column.path for column in columns], lines[1][1:], strict=True))
    assert shown["bits_per_element",] == f"{kivi['bits_per_element']:.3f}"
    assert shown["resident_bytes",] == f"{kivi['resident_bytes'] / 2**20:.2f}"
    assert shown["flicker_error",] == f"{1000 * kivi['flicker_error']:.2f}"
    assert shown["top1_shift",] == f"{100 * kivi['top1_shift']:.1f}"
    for window, value in kivi["psnr_windows"].items():
        assert shown["psnr_windows", window] == f"{value:.1f}"
    assert lines[0][5] == "∞"  # BF16 against itself
    assert lines[-1][1:5] == ["–"] * 4  # the floor has no size of its own


@pytest.mark.parametrize(
    ("value", "changed", "shown"),
    [(100.0, None, "∞"), (100.0, 9, "∞"), (100.0, 8, "≥ 100.0"), (99.96, 7, "≥ 100.0"),
     (99.9, 7, "99.9")],
)  # fmt: skip
def test_only_equal_pictures_have_an_infinite_psnr(
    report: Report, value: float, changed: int | None, shown: str
) -> None:
    """100 dB is where rows stop counting: one pixel off by one grey level in a window is more."""
    row = {**report.rows[1], "psnr_windows": {"6-8": value}, "first_changed_frame": changed}
    psnr = next(column for column in measures([row]) if column.is_psnr)
    assert psnr.shown(row) == shown


def test_intervals_and_differences_are_shown(report: Report, page: str) -> None:
    low, high = report.rows[1]["intervals"]["psnr"]
    assert f"{low:.1f}–{high:.1f}" in page
    difference = report.rows[2]["paired"]["psnr"]["mean"]
    assert f"{difference:+.1f}".replace("-", "−") in page
    assert "Differences to KIVI" in page
    assert "Quality against size" in page


def test_the_best_is_marked_among_those_that_pack(report: Report) -> None:
    psnr = next(column for column in measures(report.rows) if column.is_psnr)
    assert not [row for row in report.rows if is_best(psnr, row, report.rows)], "two walks"
    packed = [row["method"] for row in text.packed_rows(report.rows)]
    rows = [{**row, "better_than": {".".join(psnr.path): packed}} for row in report.rows]
    marked = [row["method"] for row in rows if is_best(psnr, row, rows)]
    values = {row["method"]: psnr.value(row) for row in text.packed_rows(report.rows)}
    assert marked == [max(values, key=lambda method: values[method] or 0.0)]
    assert "bf16" not in values
    assert "floor" not in values


def test_the_token_shift_picture_marks_the_recorded_patches(report: Report) -> None:
    assert report.shift is not None
    example = report.shift["example"]
    pictures = shift_looks(report, example)
    assert [look.title for look in pictures[1:]] == [text.method_title(m) for m in METHODS]
    places = [example["query"], *(example["selected"][method] for method in METHODS)]
    for look, place in zip(pictures, places, strict=True):
        size = TINY.patch
        assert look.box == (place["patch_column"] * size, place["patch_row"] * size, size, size)
        np.testing.assert_array_equal(look.frame, report.videos["bf16"][place["frame"]])
    same = [look.is_same for look in pictures[2:]]
    tokens = [example["selected"][method]["token"] for method in METHODS]
    assert same == [token == tokens[0] for token in tokens[1:]]
    assert same[-1]  # dense keys cannot shift
    html = looks(pictures)
    assert html.count("the same patch") == sum(map(bool, same))
    assert html.count("another patch") == len(same) - sum(map(bool, same))


def test_the_page_says_how_it_was_made(report: Report, reader: Reader) -> None:
    words = "".join(reader.text)
    environment = report.rows[0]["environment"]
    for needed in (report.command, environment["torch"], "walk-0, walk-1", *text.lead(report.rows)):
        assert needed in words


def test_style_defines_what_it_uses(page: str) -> None:
    style = page[page.index("<style>") : page.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark", 1)
    used = set(re.findall(r"var\(--([\w-]+)[,)]", page))
    own = {"c", "columns"}  # set by the elements themselves
    defined = [set(re.findall(r"--([\w-]+):", part)) for part in (light, dark)]
    assert used - own <= defined[0]
    assert defined[0] <= defined[1] | own, "a colour has no dark version"


def test_nothing_from_outside_becomes_markup() -> None:
    attack = "<script>alert('x')</script>"
    html = table(
        [Column(attack, attack, attack)], [Row(attack, [Cell(attack, attack)], 0)], first=attack
    )
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 8  # the title of a column stands in two places


def test_a_single_walk_has_hollow_points_and_no_intervals(report: Report) -> None:
    rows: list[Any] = [
        row | {"intervals": None, "paired": None, "n_episodes": 1, "n_rollouts": 1}
        for row in report.rows
    ]
    single = report_page(
        Report(rows, report.videos, report.mp4, report.shift, report.fps, report.command)
    )
    assert "Quality against size" in single
    assert "because one walk gives no confidence interval" in single
    assert "The vertical line" not in single
    assert "bootstrap" not in single
    assert "One walk, generated four times" in single
    Reader(single)


def test_side_captions_name_bits_and_compression(report: Report) -> None:
    captions = side_captions(report)
    assert list(captions) == list(METHODS)
    kivi = report.rows[1]
    assert captions["kivi"][0] == "KIVI"
    assert f"{kivi['bits_per_element']:.2f} bits" in captions["kivi"][1]
    assert f"{kivi['compression']:.1f}× smaller" in captions["kivi"][1]
    assert captions["bf16"] == ["BF16", "16 bits"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_table_fits(report: Report, width: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(result_table(report.rows, width))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in printed
    assert "QuantWM" in printed
    assert f"{report.rows[1]['psnr']:.1f}" in printed
    assert ("peak" in printed) == (width >= 92)
