"""Every kind of page in Chromium: quiet, offline, on a phone, dark and light."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from steadykv.capture import Selection, open_capture
from steadykv.evaluation.comparison import run_comparison
from steadykv.evaluation.tensor_comparison import compare_tensors
from steadykv.evaluation.world_capture import capture_world
from steadykv.report.bench_page import bench_page
from steadykv.report.measure_page import measure_page
from steadykv.report.pages import Report, report_page
from steadykv.report.tensor_page import TensorReport, tensor_page
from steadykv.report.tensor_plots import drawings
from steadykv.report.video import encode_mp4, enlarge
from tests.browser.results import bench_rows, measured
from tests.browser.takes import copy_with_errors, original
from tests.browser.window import Window
from tests.worlds import tiny_episodes, tiny_world

KINDS = ("compare", "demo", "tensors", "measure", "bench")
PHONE = 390


def comparison(episodes: int) -> str:
    methods = ("bf16", "kivi", "quantwm")
    result = run_comparison(tiny_world(), tiny_episodes(episodes), methods, frames=12, centroids=8,
                            resamples=100)  # fmt: skip
    videos = {method: kept[0].numpy() for method, kept in result.videos.items()}
    mp4 = {name: encode_mp4(enlarge(video, 2), 12) for name, video in videos.items()}
    command = "steadykv compare --methods bf16 kivi quantwm --frames 12"
    return report_page(Report(result.rows, videos, mp4, result.shift, 12, command))


def tensors(folder: Path) -> str:
    path = folder / "walk.safetensors"
    capture_world(tiny_world(), tiny_episodes(1), path, Selection(queries=30), frames=12)
    data = json.loads(json.dumps(compare_tensors(open_capture(path)).to_dict()))
    figures = drawings(data["rows"], data["cells"])
    return tensor_page(TensorReport(data, figures, "steadykv tensors walk.safetensors"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        "compare": comparison(2),
        "demo": comparison(1),
        "tensors": tensors(tmp_path_factory.mktemp("capture")),
        "measure": measure_page(measured(), original(), copy_with_errors(original())),
        "bench": bench_page(bench_rows(), "steadykv bench"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_quiet_and_asks_nobody(window: Window, pages: dict[str, str], kind: str) -> None:
    window.resize(1200, 900)
    window.open(pages[kind], kind)
    window.press("t", "t")
    assert window.complaints() == []
    assert window.requests() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_phone_scrolls_downwards_only(window: Window, pages: dict[str, str], kind: str) -> None:
    window.resize(PHONE, 844, is_phone=True)
    window.prefer("light")
    window.open(pages[kind], f"{kind}-phone", "#flicker=8" if kind != "tensors" else "")
    wide = window.run(
        """return [...document.querySelectorAll("main *")].filter((element) =>
          element.getBoundingClientRect().right > innerWidth + 1 &&
          !element.closest(".scroll, .figure, pre")).map((e) => e.outerHTML.slice(0, 80));"""
    )
    assert wide == []
    assert window.run("return document.documentElement.scrollWidth") == PHONE
    window.screenshot(f"{kind}-phone")


@pytest.mark.parametrize("kind", KINDS)
def test_dark_and_light_are_seen(window: Window, pages: dict[str, str], kind: str) -> None:
    """As the system asks, and the other one by the button."""
    window.resize(1200, 900)
    brightness, papers = {}, {}
    for scheme in ("dark", "light"):
        window.prefer(scheme)
        window.open(pages[kind], f"{kind}-{scheme}", "#frame=9")
        shown = window.screenshot(f"{kind}-{scheme}")
        brightness[scheme] = np.median(shown)
        papers[scheme] = window.run("return getComputedStyle(document.body).backgroundColor")
        assert shown.std() > 8  # letters and figures stand out from the paper
    assert brightness["dark"] < 60
    assert brightness["light"] > 200
    window.click(".theme")
    assert window.run("return getComputedStyle(document.body).backgroundColor") == papers["dark"]


def pasted(window: Window) -> str:
    """What the clipboard holds, by Ctrl+V."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    window.run(
        """const area = Object.assign(document.createElement("textarea"), {id: "paste"});
        document.querySelector("#paste")?.remove(); document.body.append(area); area.focus();"""
    )
    ActionChains(window.driver).key_down(Keys.CONTROL).send_keys("v").key_up(Keys.CONTROL).perform()
    return str(window.run('return document.querySelector("#paste").value'))


def copy(window: Window, selector: str) -> str:
    """Press a copy button, wait until it says so, and paste."""
    from selenium.webdriver.support.ui import WebDriverWait

    window.click(selector)
    WebDriverWait(window.driver, 5).until(lambda _: window.find(selector).text == "Copied")
    return pasted(window)


def test_a_table_is_copied_as_markdown_and_csv(window: Window, pages: dict[str, str]) -> None:
    window.resize(1200, 900)
    window.open(pages["compare"], "copies", "#frame=9")
    cells = window.run(
        """return [...document.querySelector("table").rows].map((row) =>
          [...row.cells].map((cell) => cell.firstChild.textContent.trim()));"""
    )
    markdown = copy(window, ".scroll + .copies .copy:nth-child(1)")
    lines = [line.strip("| ").split(" | ") for line in markdown.splitlines()]
    assert markdown.splitlines()[1] == "|---|" + "---:|" * (len(lines[0]) - 1)
    assert {len(line) for line in [lines[0], *lines[2:]]} == {len(cells[0])}
    table = list(csv.reader(io.StringIO(copy(window, ".scroll + .copies .copy:nth-child(2)"))))
    assert table == [lines[0], *lines[2:]]
    assert [row[0] for row in table] == ["cache", "BF16", "KIVI", "QuantWM", "noise floor"]
    for row, shown in zip(table, cells, strict=True):
        for text, cell in zip(row[1:], shown[1:], strict=True):
            assert text.startswith(cell)
    assert table[0][1] == "bits (per number)"
    command = copy(window, "pre + .copies .copy")
    assert command == "steadykv compare --methods bf16 kivi quantwm --frames 12"


def test_arrows_lead_from_the_asking_patch_to_the_selected_ones(
    window: Window, pages: dict[str, str]
) -> None:
    """Each begins in the middle of the first box and ends at the edge of its own, at any width."""
    measure = """
    const middle = (box) => [box.left + box.width / 2, box.top + box.height / 2, box.width];
    const boxes = [...document.querySelectorAll(".look rect:first-of-type")]
      .map((rect) => middle(rect.getBoundingClientRect()));
    const own = document.querySelector(".look").getBoundingClientRect();
    return [boxes, [...document.querySelectorAll(".arrows g")].map((group) =>
      ["path:nth-child(2)", ".head"].map((s) => {
        const path = group.querySelector(s), { x, y } = path.getPointAtLength(0);
        return [x + own.left, y + own.top];
      }))];
    """
    for width in (1200, PHONE):
        window.resize(width, 900)
        window.open(pages["compare"], "arrows")
        window.wait("requestAnimationFrame(() => requestAnimationFrame(() => done()))")
        boxes, arrows = window.run(measure)
        assert len(arrows) == len(boxes) - 1 == 3
        for (start, tip), (x, y, size) in zip(arrows, boxes[1:], strict=True):
            assert np.hypot(start[0] - boxes[0][0], start[1] - boxes[0][1]) < 2
            assert np.hypot(tip[0] - x, tip[1] - y) == pytest.approx(size / 2 + 2, abs=2)
    # A click on a picture shows its frame in the players.
    frame = window.run('return Number(document.querySelector(".look figure").dataset.frame)')
    window.click(".look figure svg")
    assert window.run('return Number(document.querySelector(".timeline input").value)') == frame
