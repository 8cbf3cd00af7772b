"""The players in Chromium: in step, exact to the pixel, linked to the curves, with keys."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import numpy as np
import pytest

from steadykv.report import html, plots, theatre
from steadykv.report.heat import HEAT_STEPS, flicker_heat
from steadykv.report.measure_page import measure_page
from steadykv.report.theatre import Film, players
from steadykv.report.video import encode_mp4
from tests.browser.results import measured
from tests.browser.takes import (
    COUNT,
    FLICKERS,
    FPS,
    LIGHTER,
    NUMBER,
    OFFSET,
    copy_with_errors,
    frame_of,
    original,
)
from tests.browser.window import Window

FIRST, SECOND = original(), copy_with_errors(original())
PICTURES = ".screen:nth-child({}) canvas.picture"
SOURCES = ("sheets", "reel")  # small takes travel as pictures, large ones as one film
CURVE_START = 3

# Each frame that the browser draws: the number in each canvas, and where the slider stands.
WATCH = """
const canvases = [...document.querySelectorAll("canvas.picture")], seen = [];
const start = performance.now(), slider = document.querySelector(".timeline input");
const scratch = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const grey = (canvas) => {
  scratch.drawImage(canvas, 0, 0);
  return scratch.getImageData(8, 8, 1, 1).data[0];
};
const look = () => {
  seen.push([...canvases.map(grey), Number(slider.value)]);
  if (performance.now() - start < 2000) requestAnimationFrame(look); else done(seen);
};
requestAnimationFrame(look);
"""
# The picture of a film comes a moment after the seek.
SETTLE = """
const theatre = document.querySelector(".theatre"), slider = theatre.querySelector("input");
const poll = () => (theatre.dataset.drawn === slider.value ? done() : setTimeout(poll, 10));
poll();
"""


@pytest.fixture(scope="module", params=SOURCES)
def page(request: pytest.FixtureRequest) -> str:
    films = [
        Film("Original", "16 bits", FIRST, encode_mp4(FIRST, FPS), 0),
        Film("Packed", "2 bits", SECOND, encode_mp4(SECOND, FPS), 3, [30.0] * COUNT),
    ]
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reel":
            patch.setattr(theatre, "SHEET_PIXELS", 0)
        markup = players(films, FPS, 0)
    assert ("reel" in markup) == (request.param == "reel")
    curve = plots.Curve("Packed", [30.0 + t % 5 for t in range(COUNT - CURVE_START)], 3)
    figure = html.figure(plots.psnr_by_frame([curve], CURVE_START))
    return html.page("players", "Players", ["A test."], [markup, figure], "")


@pytest.fixture
def opened(window: Window, page: str) -> Window:
    window.resize(1200, 900)
    window.open(page, "players")
    return window


def seek(window: Window, frame: int) -> None:
    window.run("document.dispatchEvent(new CustomEvent('seek', {detail: arguments[0]}))", frame)
    window.wait(SETTLE)


def is_exact(window: Window) -> bool:
    return not window.run("return Boolean(document.querySelector('.reel'))")


def pictures(window: Window) -> list[np.ndarray]:
    return [window.canvas(PICTURES.format(n))[..., :3].astype(int) for n in (1, 2)]


def number_in(picture: np.ndarray) -> int:
    return frame_of(picture[NUMBER][4:12, 4:12].mean())


def test_they_play_and_stay_in_step(opened: Window) -> None:
    seen = [[frame_of(a), frame_of(b), slider] for a, b, slider in opened.wait(WATCH)]
    frames = [row[0] for row in seen]
    advance = sum((b - a) % COUNT for a, b in pairwise(frames))
    assert 0.5 * 2 * FPS <= advance <= 1.2 * 2 * FPS
    assert len(set(frames)) > FPS / 2  # not one jump
    for first, second, slider in seen:
        assert abs(first - second) <= 1
        assert abs(first - slider) <= 1
    assert opened.complaints() == []


def test_they_stop_where_they_are_told(opened: Window) -> None:
    for frame in (0, 17, COUNT - 1, 16):
        seek(opened, frame)
        shown = pictures(opened)
        assert [number_in(picture) for picture in shown] == [frame, frame]
        bound = 0 if is_exact(opened) else 8
        for picture, film in zip(shown, (FIRST, SECOND), strict=True):
            assert np.abs(picture - film[frame]).mean() <= bound


def test_the_wipe_shows_the_original_on_the_left(opened: Window) -> None:
    seek(opened, 9)
    before = pictures(opened)[1]
    opened.click('[data-view="wipe"]')
    after = pictures(opened)[1]
    middle = after.shape[1] // 2
    bound = 0 if is_exact(opened) else 8
    assert np.abs(after[:, : middle - 2] - FIRST[9][:, : middle - 2]).mean() <= bound
    np.testing.assert_array_equal(after[:, middle + 2 :], before[:, middle + 2 :])
    assert np.abs(after - before)[LIGHTER].mean() > OFFSET / 2
    # The line goes where the pointer is: at a tenth, the lighter region is the copy's again.
    opened.run(
        """const glass = document.querySelectorAll(".glass")[1];
        const box = glass.getBoundingClientRect();
        glass.dispatchEvent(new PointerEvent("pointermove", {pointerType: "mouse",
          clientX: box.left + box.width / 10, clientY: box.top + 20}));"""
    )
    np.testing.assert_array_equal(pictures(opened)[1][LIGHTER], before[LIGHTER])
    left = opened.run('return document.querySelectorAll(".divider")[1].style.left')
    assert float(left.rstrip("%")) == pytest.approx(10.0, abs=0.5)


def test_the_difference_is_that_of_the_raw_frames(opened: Window) -> None:
    seek(opened, 10)
    opened.click('[data-view="difference"]')
    shown = pictures(opened)[1]
    gap = np.abs(SECOND[10].astype(int) - FIRST[10]).mean(axis=-1)
    expected = np.minimum(8 * gap, 255)[..., None]
    error = np.abs(shown - expected)
    assert error.max() <= 1 if is_exact(opened) else error.mean() < 6
    assert shown[LIGHTER].mean() > 200
    np.testing.assert_array_equal(pictures(opened)[0][NUMBER], shown[NUMBER] * 0 + 8 + 60) if (
        is_exact(opened)
    ) else None  # the original itself stays a picture
    opened.run(
        """const gain = document.querySelector(".gain"); gain.value = "2";
        gain.dispatchEvent(new Event("change", {bubbles: true}));"""
    )
    assert pictures(opened)[1][LIGHTER].mean() == pytest.approx(2 * OFFSET, abs=5)


def test_the_flicker_map_shows_what_changes_and_nothing_else(opened: Window) -> None:
    assert opened.run('return document.querySelectorAll("canvas.heat")[1].hidden')
    seek(opened, 20)
    before = pictures(opened)[1]
    opened.click(".flicker")
    assert opened.run(
        'return [...document.querySelectorAll("canvas.heat")].map((c) => c.hidden)'
    ) == [
        True,
        False,
    ]
    np.testing.assert_array_equal(pictures(opened)[1], before)  # a layer of its own
    heat = opened.canvas(".screen:nth-child(2) canvas.heat").astype(int)
    if not is_exact(opened):  # a film's maps are half as large
        assert heat.shape[:2] == (before.shape[0] // 2, before.shape[1] // 2)
        heat = heat.repeat(2, axis=0).repeat(2, axis=1)
    assert heat[FLICKERS][4:-4, 4:-4, 3].min() > 100
    assert heat[LIGHTER][4:-4, 4:-4, 3].max() <= (0 if is_exact(opened) else 8)  # differs, is still
    if is_exact(opened):
        levels = list(flicker_heat(FIRST, SECOND))[20]
        colours = np.array(opened.run("return heatColours"))
        expected = colours[np.minimum(255, np.rint(8 * levels)).astype(int)]
        strong = expected[..., 3] > 60  # canvases keep faint colours in fewer bits
        assert strong.any()
        assert np.abs(heat[..., 3] - expected[..., 3]).max() <= 1
        assert np.abs(heat - expected)[strong].max() <= 4


def test_the_flicker_map_averages_over_a_few_steps(window: Window) -> None:
    """One bright frame makes two errors in time, which last as long as the average does."""
    film = original()
    other = film.copy()
    other[15, 32:, 32:] += 16
    films = [Film("a", "", film, b"", 0), Film("b", "", other, b"", 1)]
    window.open(
        html.page("pulse", "Pulse", [], [players(films, FPS, 0)], ""), "pulse", "#flicker=14"
    )
    alphas = []
    for frame in range(14, 16 + HEAT_STEPS + 1):
        seek(window, frame)
        alphas.append(int(window.canvas(".screen:nth-child(2) canvas.heat")[40, 50, 3]))
    assert alphas[0] == 0
    assert alphas[1] > 0
    assert alphas[2] > alphas[1]  # the way back down is the second error
    assert alphas[HEAT_STEPS] > 0
    assert alphas[HEAT_STEPS + 2] == 0


def test_the_curves_follow_and_lead(opened: Window) -> None:
    seek(opened, 21)
    place = opened.run(
        """const plot = document.querySelector("svg[data-frames]");
        const plane = JSON.parse(plot.dataset.frames), cursor = plot.querySelector(".cursor");
        const { left, right, first, last } = plane;
        return [Number(cursor.getAttribute("x1")), left, right, first, last];"""
    )
    x, left, right, first, last = place
    assert first + (x - left) / (right - left) * (last - first) == pytest.approx(21, abs=0.01)
    # A click where frame 30 is drawn: the players go there.
    opened.run(
        """const plot = document.querySelector("svg[data-frames]");
        plot.scrollIntoView({block: "center"});
        const {left, right, first, last} = JSON.parse(plot.dataset.frames);
        const x = left + (30.2 - first) / (last - first) * (right - left);
        const spot = new DOMPoint(x, 60).matrixTransform(plot.getScreenCTM());
        window.spot = [spot.x, spot.y];"""
    )
    x, y = opened.run("return window.spot")
    for kind in ("mousePressed", "mouseReleased"):
        opened.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    opened.wait(SETTLE)
    assert number_in(pictures(opened)[0]) == 30
    assert opened.run('return document.querySelector(".cursor").dataset.frame') == "30"
    seek(opened, 1)  # before the curve begins
    assert opened.run('return document.querySelector(".cursor").hasAttribute("hidden")')


def test_the_curve_stands_where_the_cursor_says(page: str) -> None:
    """The line of the figure starts at frame 3 and ends with the film, in the plane it declares."""
    plane = json.loads(re.search(r"data-frames='([^']*)'", page)[1])  # type: ignore[index]
    drawn = re.search(r'<path d="(M [^"]*)"[^>]*var\(--s3\)', page)
    assert drawn is not None
    numbers = [float(x) for x in re.findall(r"[ML] ([\d.]+)", drawn[1])]

    def frame(x: float) -> float:
        share = (x - plane["left"]) / (plane["right"] - plane["left"])
        return float(plane["first"] + share * (plane["last"] - plane["first"]))

    assert frame(numbers[0]) == pytest.approx(CURVE_START, abs=0.02)
    assert frame(numbers[-1]) == pytest.approx(COUNT - 1, abs=0.02)


def test_the_keyboard_does_everything(opened: Window) -> None:
    from selenium.webdriver.common.keys import Keys

    def shown() -> int:
        opened.wait(SETTLE)
        return number_in(pictures(opened)[0])

    def pressed(selector: str) -> str:
        return str(opened.find(selector).get_attribute("aria-pressed"))

    assert opened.find(".play").get_attribute("aria-label") == "pause"  # it plays by itself
    opened.press(" ")
    assert opened.find(".play").get_attribute("aria-label") == "play"
    opened.press(Keys.HOME)
    assert shown() == 0
    opened.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert shown() == 2
    opened.press(Keys.ARROW_LEFT)
    assert shown() == 1
    opened.press(Keys.END)
    assert shown() == COUNT - 1
    opened.press("d")
    assert pressed('[data-view="difference"]') == "true"
    opened.press("w")
    assert pressed('[data-view="wipe"]') == "true"
    opened.press("w", "f")
    assert pressed('[data-view="picture"]') == "true"
    assert pressed(".flicker") == "true"
    opened.press("?")
    assert opened.run('return document.querySelector(".help").open')
    words = opened.find(".help").text
    for needed in ("play or pause", "flicker map", "wipe", "dark or light"):
        assert needed in words
    opened.press(Keys.ESCAPE)
    assert not opened.run('return document.querySelector(".help").open')
    opened.press(" ")
    assert opened.find(".play").get_attribute("aria-label") == "pause"
    assert opened.complaints() == []


def test_a_part_of_longer_videos_counts_as_they_do(window: Window) -> None:
    """Frames 100 to 139 of longer videos: players, curves and links name them by those numbers."""
    by_frame = {"psnr": [30.0] * 200, "flicker_error": [0.1] * 199}
    excerpt = {"start": 100, "frames": 40, "width": 96, "height": 64}
    data = measured() | {"frames": 200, "by_frame": by_frame, "excerpt": excerpt}
    page = measure_page(data, original(), copy_with_errors(original()))
    window.open(page, "part", "#frame=117")
    assert window.find("output").text == "frame 117 / 139"
    assert frame_of(window.canvas("canvas.picture")[8, 8, 0]) == 17
    assert window.run("return document.querySelector('.cursor').dataset.frame") == "117"
    window.press("\ue014")  # right
    assert window.find("output").text == "frame 118 / 139"
    window.run("document.dispatchEvent(new CustomEvent('seek', { detail: 10 }))")
    assert window.find("output").text == "frame 100 / 139"
    assert not window.complaints()
