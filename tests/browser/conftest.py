"""Chromium, headless, driven by Selenium; one for all tests of a worker."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.window import Window

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--autoplay-policy=no-user-gesture-required",
    "--window-size=1200,900",
)


def missing() -> str:
    """What these tests lack on this machine, "" where they can run."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if importlib.util.find_spec("selenium") is None:
        lacking.append("selenium")
    return ", ".join(lacking)


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    """Skips where there is no browser, unless STEADYKV_BROWSER=1 promises one."""
    if lacking := missing():
        reason = f"no {lacking}: apt-get install chromium chromium-driver, pip install selenium"
        if os.environ.get("STEADYKV_BROWSER") == "1":
            pytest.fail(f"STEADYKV_BROWSER=1, but {reason}")
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    folder = tmp_path_factory.mktemp("browser")
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(executable_path=shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as driver:
        driver.set_script_timeout(60)
        driver.set_page_load_timeout(60)
        pictures = os.environ.get("STEADYKV_SCREENSHOTS")
        yield Window(driver, folder, Path(pictures) if pictures else folder)
