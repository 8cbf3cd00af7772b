"""A browser window: opens pages as files, and says what they asked for, printed and show."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

READY = "return !document.querySelector('.theatre:not(.playing-by-script)')"


class Window:
    """driver: Selenium's. folder: for pages. pictures: for screenshots."""

    def __init__(self, driver: Any, folder: Path, pictures: Path) -> None:
        self.driver, self.folder, self.pictures = driver, folder, pictures

    def open(self, page: str, name: str, anchor: str = "") -> None:
        """Write a page to a file and open it; players, where there are any, are ready then."""
        path = self.folder / f"{name}.html"
        path.write_text(page, encoding="utf-8")
        self.driver.get("about:blank")
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(f"{path.as_uri()}{anchor}")
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 30, poll_frequency=0.05).until(lambda _: self.run(READY))

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str) -> Any:
        """What a script hands to `done`."""
        return self.driver.execute_async_script(f"const done = arguments[0];\n{script}")

    def find(self, selector: str) -> Any:
        """The first element."""
        return self.driver.find_element("css selector", selector)

    def click(self, selector: str) -> None:
        """A real click, with the element in sight."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus."""
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.driver, duration=0).send_keys(key).perform()

    def command(self, name: str, **arguments: Any) -> Any:
        """A command of the browser's own protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def resize(self, width: int, height: int, is_phone: bool = False) -> None:
        """The size of the page's view, and whether it is a phone's."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height,
                     deviceScaleFactor=1, mobile=is_phone)  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """ "dark" or "light", as the system asks."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def requests(self) -> list[str]:
        """Everything the page asked the network for since it was opened."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if not url.startswith(("data:", "file:", "about:", "blob:")):
                    found.append(url)
        return found

    def complaints(self) -> list[str]:
        """Errors and warnings of the console since the page was opened."""
        log = self.driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, name: str) -> NDArray[np.uint8]:
        """The whole page, also kept as a PNG file."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        data = base64.b64decode(found["data"])
        self.pictures.mkdir(parents=True, exist_ok=True)
        (self.pictures / f"{name}.png").write_bytes(data)
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))

    def canvas(self, selector: str) -> NDArray[np.uint8]:
        """RGBA of a canvas, [H, W, 4]."""
        data, width, height = self.run(
            """const c = document.querySelector(arguments[0]);
            const scratch = document.createElement("canvas");
            Object.assign(scratch, { width: c.width, height: c.height });
            const context = scratch.getContext("2d", { willReadFrequently: true });
            context.drawImage(c, 0, 0);
            const d = context.getImageData(0, 0, c.width, c.height).data;
            let text = ""; for (const byte of d) text += String.fromCharCode(byte);
            return [btoa(text), c.width, c.height];""",
            selector,
        )
        pixels = np.frombuffer(base64.b64decode(data), dtype=np.uint8)
        return pixels.reshape(height, width, 4)
