"""Figures: inline SVG that loads nothing, follows the theme and shows what it was given."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from steadykv.report.plots import CEILING_DB, Curve, Point, psnr_by_frame, quality_by_bits

CURVES = [
    Curve("KIVI", [math.inf, 40.0, 33.0, 31.0], 1),
    Curve("QuantWM", [math.inf, 47.0, 42.0, 40.0], 3, [60.0, 46.0, 41.0, 39.0], [61, 48, 43, 41]),
    Curve("noise floor", [58.0, 57.0, 56.0, 55.0], None),
]
POINTS = [
    Point("KIVI", 3.0, 33.0, 1, 32.0, 34.0),
    Point("QVG", 2.632, 30.0, 2),
    Point("QVG4", 2.663, 33.5, 4),
    Point("QuantWM", 3.031, 38.0, 3, 37.0, 39.0),
]
FIGURES = {
    "curves": (lambda prefix: psnr_by_frame(CURVES, 3, prefix), CURVES),
    "sizes": (lambda prefix: quality_by_bits(POINTS, 50.0, prefix), POINTS),
}


@pytest.mark.parametrize("name", FIGURES)
def test_svg_stands_alone_in_a_page(name: str) -> None:
    draw, marks = FIGURES[name]
    svg = draw("p")
    ElementTree.fromstring(svg)  # well formed without any namespace
    assert "http" not in svg
    assert "xmlns" not in svg
    assert "#fe0" not in svg  # no placeholder colour is left
    for mark in marks:
        assert f">{mark.label}<" in svg
    assert svg == draw("p")


@pytest.mark.parametrize("name", FIGURES)
def test_ids_of_two_figures_do_not_meet(name: str) -> None:
    draw, _ = FIGURES[name]
    first, second = draw("a"), draw("b")
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', first)
    assert used
    assert set(used) <= ids[0]


def test_colours_are_those_of_the_style_sheet() -> None:
    svg = psnr_by_frame(CURVES, 3)
    assert {"var(--s1)", "var(--s3)", "var(--dim)", "var(--line)"} <= set(
        re.findall(r"var\(--\w+\)", svg)
    )


def label_heights(svg: str, names: list[str]) -> dict[str, float]:
    """Vertical place of each label; small is high up."""
    return {
        name: float(re.search(rf'y="([\d.]+)"[^>]*>{name}<', svg)[1])  # type: ignore[index]
        for name in names
    }


def test_labels_are_ordered_like_the_lines_and_do_not_overlap() -> None:
    curves = [Curve(f"m{i}", [50.0, 40.0 - 0.01 * i], i) for i in range(6)]
    heights = label_heights(psnr_by_frame(curves, 3), [curve.label for curve in curves])
    ordered = [heights[f"m{i}"] for i in range(6)]
    gaps = [below - above for above, below in pairwise(ordered)]
    assert min(gaps) > 9.0  # the letters are 10 high


def test_values_above_the_ceiling_are_drawn_at_it() -> None:
    curves = [Curve("same", [math.inf, 100.0], 0), Curve("at", [CEILING_DB] * 2, 1)]
    svg = psnr_by_frame(curves, 3)
    assert "nan" not in svg.lower()
    assert "inf" not in svg.replace("info", "")
    lines = re.findall(r'<path d="(M [^"]*)"[^>]*var\(--s[01]\)', svg)
    assert len(lines) == 2
    assert lines[0] == lines[1]


def test_the_front_joins_only_methods_that_no_other_beats() -> None:
    """KIVI is larger and worse than QVG4: the stairs must pass above it."""
    svg = quality_by_bits(POINTS, None)
    stairs = re.search(r'<path d="(M [^"]*)"[^>]*stroke-dasharray[^>]*var\(--dim\)', svg)
    assert stairs is not None
    corners = len(re.findall(r"[ML] ", stairs[1]))
    assert corners == 5  # three points on the front, two steps between them


def test_points_without_an_interval_are_hollow() -> None:
    svg = quality_by_bits(POINTS, 50.0)
    marks = re.findall(r"style=\"fill: var\((--\w+)\); stroke: var\((--s\d)\)", svg)
    found = {(fill == "--paper", stroke) for fill, stroke in marks}
    for point in POINTS:
        assert (point.low is None, f"--s{point.colour}") in found
        assert (point.low is not None, f"--s{point.colour}") not in found


def test_a_floor_above_the_ceiling_is_named_and_the_axis_says_so() -> None:
    """Drawn at 60 dB beside a table that says 67.4, it would be another number."""
    svg = quality_by_bits(POINTS, 67.4)
    assert ">noise floor, 67.4 dB<" in svg
    assert ">60+<" in svg
    below = quality_by_bits(POINTS, 50.0)
    assert ">noise floor<" in below
    assert ">60+<" not in below
