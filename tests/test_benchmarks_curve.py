"""The curve of quality against bits: points above a line, and a picture that names all."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Annotation
from PIL import Image

from benchmarks import curve
from benchmarks.curve import MEASURES, held_to_the_line, line_at, read_points, renamed
from benchmarks.curve_figure import Point, draw
from steadykv.evaluation.results import write_csv

LONG = "qvg@metadata=int8+refinement=2"


def row(
    method: str, bits: float, psnr: float, flicker: float, shift: float | None
) -> dict[str, Any]:
    """As compare --rows writes it, with intervals of 1 dB, a tenth and a hundredth each way."""
    intervals = {"psnr": [psnr - 1, psnr + 1], "flicker_error": [flicker * 0.9, flicker * 1.1]}
    if shift is not None:
        intervals["top1_shift"] = [shift - 0.01, shift + 0.01]
    return {
        "method": method, "keys": method, "values": method, "bits_per_element": bits,
        "psnr": psnr, "flicker_error": flicker, "top1_shift": shift, "intervals": intervals,
        "n_episodes": 8, "n_seeds": 2,
        "configuration": {"frames": 24, "key_rope": "post", "world_sha256": "abc"},
    }  # fmt: skip


ROWS = [
    row("bf16", 16.0, 100.0, 0.0, 0.0),
    row("small", 2.0, 30.0, 0.020, 0.60),
    row("large", 3.0, 40.0, 0.010, 0.20),
    row("worse", 2.5, 33.0, 0.018, 0.50),
    row("close", 2.5, 35.5, 0.0145, 0.395),
    row(LONG, 2.5, 36.5, 0.013, 0.38),
    row("costly", 4.0, 39.5, 0.012, 0.19),
    row("tiny", 1.95, 20.0, 0.040, 0.80),
    row("outside", 5.0, 60.0, 0.001, 0.01),
    row("floor", 16.0, 50.0, 0.002, None),
]


def test_points_are_held_to_the_line_in_both_directions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, image = write_csv(tmp_path / "rows.csv", ROWS), tmp_path / "new" / "curve.png"
    curve.main(
        [str(rows), "--family", "large", "small", "--rename", f"better={LONG}",
         "--image", str(image)]
    )  # fmt: skip
    printed = capsys.readouterr().out
    psnr, flicker, shift = _panels(printed)
    names = ["tiny", "worse", "close", "better", "costly"]
    assert [line.split("  ")[-1] for line in psnr[:-1]] == names
    assert [_where(line) for line in psnr[:-1]] == [
        "no line",
        "below, clear of it",  # 33 + 1 of 35
        "above, its interval reaches it",  # 35.5 - 1
        "above, clear of it",  # 36.5 - 1
        "below, its interval reaches it",  # 39.5 + 1 of the last point's 40
    ]
    assert "36.50 (35.50 to 37.50)" in psnr[3]
    assert "line 35.00" in psnr[3]
    assert psnr[-1] == "  2 of 4 points above the line, 1 to its left"
    assert [_where(line) for line in flicker[:-1]] == [
        "no line",
        "below, clear of it",
        "above, its interval reaches it",
        "above, clear of it",
        "below, clear of it",
    ]
    assert [_where(line) for line in shift[:-1]] == [
        "no line",
        "below, clear of it",
        "above, its interval reaches it",
        "above, clear of it",
        "above, its interval reaches it",
    ]
    with Image.open(image) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape == (1440, 1440, 3)
    assert (pixels == (194, 90, 0)).all(-1).sum() > 500  # the line


def _panels(printed: str) -> list[list[str]]:
    """Lines of each panel, without its title."""
    panels: list[list[str]] = []
    for line in printed.splitlines():
        if not line.startswith(" "):
            panels.append([])
        else:
            panels[-1].append(line)
    assert len(panels) == 3
    return panels


def _where(line: str) -> str:
    return next(part for part in line.split("  ")[::-1][1:] if part.strip()).strip()


def test_the_line_interpolates_and_never_reaches_left() -> None:
    family = [Point("b", 3.0, 40.0), Point("a", 2.0, 30.0), Point("c", 3.5, 50.0)]
    assert [line_at(family, bits) for bits in (1.99, 2.0, 2.25, 3.25, 3.5, 9.0)] == [
        None, 30.0, 32.5, 45.0, 50.0, 50.0
    ]  # fmt: skip
    (found,) = held_to_the_line([*family, Point("x", 2.25, 32.5)], family, 1)
    assert (found.where, found.is_clear) == ("below", None)  # on the line is not above it
    (found,) = held_to_the_line([*family, Point("x", 2.25, 32.5)], family, -1)
    assert found.where == "below"


def test_every_name_is_drawn_and_none_on_another() -> None:
    rng = np.random.default_rng(0)
    points = [
        Point(f"method {i}", bits, value, value - 1, value + 1)
        for i, (bits, value) in enumerate(
            zip(rng.normal(2.9, 0.15, 14), rng.normal(41, 1.2, 14), strict=True)
        )
    ]
    family = [point.label for point in points[::5]]
    figure = draw(dict.fromkeys(MEASURES, points), family, (1.9, 4.3), {"psnr": 43.0})
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for axes in figure.axes:
        texts = [t for t in axes.texts if isinstance(t, Annotation)]
        names = [t for t in texts if t.get_text() != "noise floor"]
        assert sorted(t.get_text() for t in names) == sorted(p.label for p in points)
        boxes = [t.get_window_extent(renderer) for t in names]
        assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
        page = axes.get_window_extent(renderer).padded(15)
        assert all(page.x0 <= b.x0 and b.x1 <= page.x1 and page.y0 <= b.y0 for b in boxes)
    assert [t.get_text() for t in figure.axes[0].texts].count("noise floor") == 1
    assert [t.get_text() for t in figure.axes[1].texts].count("noise floor") == 0


def test_rows_without_a_number_and_dense_ones_are_no_points() -> None:
    texts = [{"method": "a", "keys": "qvg", "values": "bf16", "bits_per_element": "9", "psnr": "30",
              "top1_shift": ""},
             {"method": "b", "keys": "bf16", "values": "bf16", "bits_per_element": "16",
              "psnr": "99", "top1_shift": "0"}]  # fmt: skip
    assert read_points(texts, MEASURES[0], {"a": "short"}) == [Point("short", 9.0, 30.0)]
    assert read_points(texts, MEASURES[2], {}) == []


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    rows = write_csv(tmp_path / "rows.csv", ROWS)
    other = ROWS[1] | {"method": "other", "n_episodes": 9}
    more = write_csv(tmp_path / "more.csv", [other])
    words = [str(rows), "--family", "small"]
    with pytest.raises(SystemExit, match="n_episodes is 9, in the first file 8"):
        curve.main([str(rows), str(more), *words[1:]])
    with pytest.raises(SystemExit, match="no rows of absent"):
        curve.main([*words, "absent"])
    with pytest.raises(SystemExit, match="no rows of absent"):
        curve.main([*words, "--rename", "a=absent"])
    for wrong in (["a"], ["=b"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(SystemExit, match="--rename"):
            renamed(wrong)
    assert renamed([f"short={LONG}"]) == {LONG: "short"}


def test_bits_may_be_the_mean_over_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A method that is cheap at the end only is held to the line where its frames were made."""
    rows = [row("small", 2.0, 30.0, 0.02, 0.6), row("large", 3.0, 40.0, 0.01, 0.2)]
    rows = [one | {"bits_per_element_mean": one["bits_per_element"]} for one in rows]
    rows.append(row("fades", 2.2, 34.0, 0.018, 0.5) | {"bits_per_element_mean": 2.6})
    path = write_csv(tmp_path / "rows.csv", rows)
    words = [str(path), "--family", "small", "large"]
    told = {
        "": "2.200 bits    34.00 (33.00 to 35.00)   line 32.00  above",
        "--mean": "2.600 bits    34.00 (33.00 to 35.00)   line 36.00  below",
    }
    for option, line in told.items():
        curve.main([*words, *option.split()])
        assert line in capsys.readouterr().out
    old = write_csv(tmp_path / "old.csv", ROWS)
    with pytest.raises(SystemExit, match="has no bits_per_element_mean"):
        curve.main([str(old), "--family", "small", "large", "--mean"])
