"""Pages of measured videos and of times, the memory figure, and the maps that large films carry."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steadykv import KVCache, preset
from steadykv.cli.main import main
from steadykv.errors import ShapeError
from steadykv.evaluation.metrics import flicker_error
from steadykv.report import html, measure_page, theatre
from steadykv.report.heat import HEAT_STEPS, difference, flicker_heat, halved, to_grey
from steadykv.report.measure_figures import show
from steadykv.report.measure_page import lead
from steadykv.report.memory import (
    LOOKS,
    TRANSIENT,
    WORDS,
    memory_by_part,
    memory_columns,
    parts_of,
)
from steadykv.report.theatre import REEL_CRF, Film, fits_a_sheet, players
from steadykv.report.video import CRF, decode_mp4, encode_images, encode_mp4
from tests.browser.results import bench_rows, measured
from tests.browser.takes import copy_with_errors, original
from tests.test_report_pages import Reader, embedded

FIRST, SECOND = original(12), copy_with_errors(original(12))


def short_data(**changes: Any) -> dict[str, Any]:
    data = measured()
    by_frame = {name: values[: 12 - (len(values) == 39)] for name, values in
                data["by_frame"].items()}  # fmt: skip
    return data | {"frames": 12, "by_frame": by_frame} | changes


# --- maps -----------------------------------------------------------------------------------


def test_the_flicker_map_is_the_mean_error_of_the_latest_steps() -> None:
    v, r = SECOND.astype(float), FIRST.astype(float)
    steps = np.abs(np.diff(v, axis=0) - np.diff(r, axis=0)).mean(axis=-1)
    maps = list(flicker_heat(FIRST, SECOND))
    assert len(maps) == 12
    assert not maps[0].any()
    for frame in range(1, 12):
        expected = steps[max(0, frame - HEAT_STEPS) : frame].mean(axis=0)
        np.testing.assert_allclose(maps[frame], expected, rtol=1e-5)
    assert not any(map_.any() for map_ in flicker_heat(FIRST, FIRST))


def test_the_map_of_one_step_averages_to_the_flicker_error() -> None:
    """Over all pixels and steps it is the metric of the table, in grey levels."""
    maps = list(flicker_heat(FIRST, SECOND, steps=1))[1:]
    assert np.mean(maps) / 255 == pytest.approx(float(flicker_error(FIRST, SECOND)), rel=1e-5)


def test_the_curve_of_a_film_keeps_small_levels_apart() -> None:
    levels = np.array([0, 1, 2, 4, 64, 255, 400], dtype=np.float32)
    assert to_grey(levels).tolist() == [0, 16, 23, 32, 128, 255, 255]
    back = to_grey(levels).astype(float) ** 2 / 255
    np.testing.assert_allclose(back[:6], levels[:6], rtol=0.04)


def test_maps_are_halved_by_their_means() -> None:
    levels = np.array([[0, 4, 9], [8, 0, 9], [2, 4, 6]], dtype=np.float32)
    assert halved(levels).tolist() == [[3, 9], [3, 6]]


def test_a_large_film_carries_its_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theatre, "SHEET_PIXELS", 0)
    films = [Film("a", "", FIRST, b"", 0), Film("b", "", SECOND, b"", 1)]
    reader = Reader(players(films, 12, 0))
    (reel,) = reader.named("video")
    decoded = decode_mp4(embedded(reel["src"], "video/mp4")).astype(float)
    assert decoded.shape == (12, 64 + 32, 2 * 96, 3)
    heats = list(flicker_heat(FIRST, SECOND))
    for t in range(12):
        assert np.abs(decoded[t, :64, :96] - FIRST[t]).mean() < 5
        assert np.abs(decoded[t, :64, 96:] - SECOND[t]).mean() < 5
        assert decoded[t, 64:, :96].max() < 16  # nothing below the original
        maps = (difference(FIRST[t], SECOND[t]), heats[t])
        for left, levels in zip((96, 96 + 48), maps, strict=True):
            expected = to_grey(levels.reshape(32, 2, 48, 2).mean(axis=(1, 3)))
            shown = decoded[t, 64:, left : left + 48, 0]
            assert np.abs(shown - expected).mean() < 5
            assert shown.std() > 20 or t == 0
    assert not reader.named("img")


def test_what_fits_a_sheet() -> None:
    assert fits_a_sheet(51, 96, 128)
    assert not fits_a_sheet(60, 480, 640)  # 18 million pixels
    assert not fits_a_sheet(2, 8, 4096)  # wider than a WebP picture can be


def test_films_of_other_sizes_are_refused() -> None:
    films = [Film("a", "", FIRST, b"", 0), Film("b", "", SECOND[:5], b"", 1)]
    with pytest.raises(ShapeError, match=r"got \[5, 64, 96, 3\] for b and \[12, 64, 96, 3\] for a"):
        players(films, 12, 0)


def test_pictures_one_by_one_make_the_same_video() -> None:
    assert max(CRF, REEL_CRF) <= 14  # what does not hide flicker, at a video's own size
    kept = []
    for number in range(10):  # whatever lies beside them in memory
        kept.append(bytearray(10_000 * number + 1))
        assert encode_images(iter(FIRST), 12) == encode_mp4(FIRST, 12)
    assert decode_mp4(encode_mp4(FIRST, 12)).shape == FIRST.shape


# --- the page of two videos -----------------------------------------------------------------


def test_the_measured_page_shows_the_numbers_of_its_file() -> None:
    page = measure_page.measure_page(short_data(), FIRST, SECOND)
    words = "".join(Reader(page).text)
    for needed in ("second.mp4 measured against first.mp4", "31.25 dB", "0.9312", "2.10e−05",
                   "steadykv measure first.mp4 second.mp4", "folder/first.mp4: 96 × 64",
                   "flicker error"):  # fmt: skip
        assert needed in words
    assert len(re.findall("data-frames=", page)) == 3
    assert "∞" in words  # the first frame's PSNR, on its axis
    assert "players show" not in words


def test_values_of_both_videos_share_a_figure() -> None:
    index = {"flicker_index_a": [None, *[0.1] * 10, None], "flicker_index_b": [None, *[0.3] * 11]}
    data = short_data(by_frame={"psnr": [30.0] * 12, **index}, notes=["B has <other> colours"])
    page = measure_page.measure_page(data, FIRST, SECOND)
    assert page.count("data-frames=") == 2
    (figure,) = re.findall(r"<svg[^>]*flicker index of both videos by frame.*?</svg>", page, re.S)
    assert set(re.findall(r"stroke: var\((--s\d)\)", figure)) == {"--s0", "--s3"}
    assert "B has &lt;other&gt; colours" in page


def test_players_of_a_scaled_excerpt_say_so() -> None:
    page = measure_page.measure_page(short_data(width=960, height=640), FIRST, SECOND)
    assert "scaled from 960 × 640 to 96 × 64 pixels" in page
    assert "scaled from" not in measure_page.measure_page(
        short_data(width=96, height=64), FIRST, SECOND
    )


def test_identical_videos_are_called_that() -> None:
    data = short_data(summary={"psnr": "inf", "ssim": 1.0}, by_frame={"psnr": ["inf"] * 12})
    assert lead([data], ["b.mp4"], "a.mp4") == [
        "b.mp4 shows the same pixels as a.mp4 in all of its 12 frames, 1.0 seconds."
    ]
    page = measure_page.measure_page(data, FIRST, FIRST)
    assert "∞" in page
    Reader(page)


def test_numbers_of_the_summary_as_text() -> None:
    assert show("psnr", "inf") == "∞"
    assert show("psnr", 31.256) == "31.26 dB"
    assert show("lpips", 0.0) == "0.0000"
    assert show("lpips", 0.00001234) == "1.23e−05"
    assert show("something_new", None) == "–"
    assert show("psnr", -math.inf) == "−∞"


def test_players_of_a_part_say_which_and_count_its_frames() -> None:
    """Ten of 12 frames, from the third of the compared ones on, which begin with frame 100 of A."""
    excerpt = {"start": 102, "frames": 10, "width": 96, "height": 64}
    data = short_data(start=100, excerpt=excerpt)
    page = measure_page.measure_page(data, FIRST[2:], SECOND[2:])
    assert "The players show frames 102 to 111, 10 of the 12 that were measured" in page
    assert "their own size, 96 × 64, and are encoded without loss" in page
    facts = json.loads(Reader(page).named("section")[0]["data-film"] or "")
    assert (facts["start"], facts["frames"]) == (102, 10)
    (plane, *_) = re.findall(r"data-frames='(.*?)'", page)
    assert (json.loads(plane)["first"], json.loads(plane)["last"]) == (99.5, 111.5)
    assert "The shaded frames are those that the players have." in page
    psnr = json.loads(
        Reader(page).named("figure", **{"class": "screen crisp"})[1]["data-psnr"] or ""
    )
    assert psnr == [33.0, 31.0] * 5  # frames 102 on; the list begins with frame 100


def test_a_page_that_would_be_too_large_shows_the_worst_part() -> None:
    data = short_data()
    data["by_frame"]["flicker_error"] = [0.01] * 8 + [0.5, 0.01, 0.01]
    whole = len(measure_page.measure_page(data, FIRST, SECOND))
    page = measure_page.measure_page(data, FIRST, SECOND, most_bytes=1000)
    count = measure_page.FEWEST_FRAMES
    assert f"The players show frames 4 to 11, {count} of the 12" in page
    assert "More of them would make this page larger than 0 MB" in page
    assert len(page) < whole
    assert f'"frames": {count}' in page.replace("&quot;", '"')


def test_videos_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ShapeError, match="measure_page: got videos of"):
        measure_page.measure_page(short_data(), FIRST, SECOND[:4])


def test_names_from_outside_stay_text() -> None:
    data = short_data()
    attack = "<script>alert('x')</script>"
    for source in data["sources"]:
        source["path"] = attack
    data["by_frame"] = {attack: [1.0] * 12}
    data["summary"] = {attack: 1.0}
    page = measure_page.measure_page(data, FIRST, SECOND)
    assert page.count("<script") == 1  # the page's own


# --- memory, times, colours -----------------------------------------------------------------


def test_memory_is_drawn_by_the_parts_that_rows_have() -> None:
    row = {"method": "kivi", "resident_bytes": 3 << 20, "peak_bytes": 5 << 20}
    parts = {"codes": 2 << 20, "scales": 1 << 19, "open": 1 << 19, "dense": 0}
    assert parts_of(row, by_part=False) == {"held at the end": 3 << 20, "more at the peak": 2 << 20}
    newer = row | {"resident_parts": parts}
    assert parts_of(newer, by_part=True) == {
        "codes": 2 << 20, "scales": 1 << 19, "open chunk (BF16)": 1 << 19,
        "more at the peak": 2 << 20,
    }  # fmt: skip
    svg = memory_by_part([newer, newer | {"method": "qvg"}])
    assert ">codes<" in svg
    assert ">QVG<" in svg
    assert ">3.00 + 2.00<" in svg
    bar = r'<path d="M ([\d.]+) [\d.]+\s+L ([\d.]+) [^"]*z\s*" [^>]*fill: var\(--s[0-7]\)'
    codes, scales, open_chunk, peak = [
        float(right) - float(left) for left, right in re.findall(bar, svg)
    ][:4]
    assert codes == pytest.approx(4 * scales, rel=0.02)
    assert scales == pytest.approx(open_chunk, rel=0.02)
    assert codes == pytest.approx(peak, rel=0.02)
    assert "held at the end" not in svg
    assert "held at the end" in memory_by_part([newer, row | {"method": "qvg"}])
    assert dict(memory_columns([newer]))["codes"] == ["2.000"]


def test_every_part_of_a_ledger_has_its_own_look() -> None:
    """No two parts share a colour and an opacity, and every word of the ledger is known."""
    drawn = [LOOKS[name] for name in (*WORDS.values(), TRANSIENT)]
    assert len(set(drawn)) == len(drawn)
    config = preset("quantwm", centroids=8)
    cache = KVCache(num_layers=1, num_heads=2, head_dim=64, frame_tokens=16,
                    config=config, layout="BSHD")  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for start in range(0, 240, 48):
        q, k, v = torch.randn(3, 1, 48, 2, 64, generator=generator).bfloat16()
        cache[0].write(k, v, start)
        cache[0].observe_queries(q)
        cache.commit()
    assert set(cache.ledger().parts) <= set(WORDS)


def test_the_page_of_times_shows_its_rows(tmp_path: Path) -> None:
    from steadykv.report.bench_page import bench_page

    rows = bench_rows()
    words = "".join(Reader(bench_page(rows, "steadykv bench 'a <b>'")).text)
    for row in rows:
        assert f"{row['median_ms']:,.3f}" in words
    assert "steadykv bench 'a <b>'" in words
    assert "Times on NVIDIA H200" in words
    best = max(rows[2:], key=lambda row: row["share_of_limit"])
    assert f"Nearest to the limit is {best['work']}" in words


def test_bench_writes_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "bench.html"
    small = ["--heads", "1", "--tokens", "96", "--queries", "24", "--seconds", "0"]
    monkeypatch.chdir(tmp_path)
    command = ["bench", "--device", "cpu", *small, "--works", "decode", "--methods", "qvg"]
    assert main([*command, "--report", str(page)]) == 0
    assert " ".join(command) in page.read_text("utf-8")
    capsys.readouterr()
    assert main([*command, "--report", str(page)]) == 2
    assert "--report" in capsys.readouterr().err


def test_the_button_makes_the_same_dark_as_the_system() -> None:
    style = html.page("", "", [], [], "")
    asked, button = (
        dict(re.findall(r"--(\w+): ([^;]+);", re.search(pattern, style)[1]))  # type: ignore[index]
        for pattern in (r'not\(\[data-theme="light"\]\) \{(.*?)\}', r'="dark"\] \{\s*(--.*?)\}')
        if (style := style.replace("\n", " "))
    )
    assert len(asked) > 15
    assert asked == button


def test_windows_that_were_asked_for_are_on_the_page() -> None:
    data = short_data()
    page = measure_page.measure_page(data, FIRST, SECOND)
    assert "By window" not in page
    window = dict.fromkeys(data["summary"], 0.5) | {"start": 0, "end": 7, "psnr": 29.75}
    page = measure_page.measure_page(short_data(windows=[window]), FIRST, SECOND)
    assert "By window" in page
    assert "0–6" in page
    assert "29.75" in page
