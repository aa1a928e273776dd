"""Helpers of the tests of explorer.html: drive a browser, read and change the page.

`PYTHONPATH=.:tests python tests/helpers/explorer_page.py` writes docs/images/explorer.png, a picture of its first section.
"""

import base64
import io
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from helpers import ROOT
from tools.explorer.make import write_explorer

NEEDS_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="no chromium with its driver on the path: apt-get install chromium chromium-driver",
    ),
]
LAPTOP, PHONE = (1280, 800), (360, 740)
LIVE = "return document.getElementById(arguments[0]).textContent"


@contextmanager
def driven():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def look(browser, path, size=LAPTOP, scheme="light", **set_to):
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},  # animations would move what is clicked
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get("about:blank")  # else an address that differs in its fragment only would not be reloaded
    browser.get(path.as_uri() + ("#" + "&".join(f"{name}={value}" for name, value in set_to.items()) if set_to else ""))
    until(browser, "document.documentElement.dataset.ready === 'yes'")


def until(browser, condition, seconds=30):
    end = time.monotonic() + seconds
    while not browser.execute_script(f"return Boolean({condition})"):
        assert time.monotonic() < end, f"never came true: {condition}; console: {browser.get_log('browser')}"
        time.sleep(0.05)


def numbers(texts):
    return [float(text.replace("−", "-")) for text in texts]


def cells(browser, name):
    """Return the texts of a grid of cells, row by row."""
    return browser.execute_script(
        "return [...document.querySelectorAll(`#${arguments[0]}-cells [role=gridcell]`)].map(c => c.textContent)", name
    )


def table(browser, name):
    rows = "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map(r => [...r.cells].map(c => c.textContent))"
    return browser.execute_script(rows, name)


def set_value(browser, name, value):
    script = "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input'))"
    browser.execute_script(script, name, value)


def press(browser, *keys):
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def screenshot():
    """Write docs/images/explorer.png at a laptop's window size."""
    from PIL import Image

    with TemporaryDirectory() as folder, driven() as browser:
        look(browser, write_explorer(Path(folder) / "explorer.html"), storyKey=1)
        height = browser.execute_script("return document.getElementById('clipping').offsetTop")
        clip = {"x": 0, "y": 0, "width": LAPTOP[0], "height": height, "scale": 1}
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    image.quantize(256).save(ROOT / "docs" / "images" / "explorer.png", optimize=True)


if __name__ == "__main__":
    screenshot()
