"""report.html in a browser: opens on a laptop and on a phone without errors, and nothing reaches beyond the window."""

import numpy as np
import pytest

from helpers.explorer_page import NEEDS_BROWSER
from helpers.rows import rows_of
from vitrel.evaluate.pictures import Picture, Section
from vitrel.evaluate.report import write
from vitrel.evaluate.verdicts import judge

pytestmark = NEEDS_BROWSER
PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
SIZES = ["192x256", "96x128", "128x96", "96x256", "256x96", "144x192", "384x512", "64x64"]
NAMES = ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", "swin", "rope_mixed", "a model with a long name in words")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of four models at eight sizes in two protocols, with classes and pictures."""
    levels = {name: (90, 88, 85, 80, 75, 70, 60, 50) for name in NAMES}
    rows = [one for protocol in ("scale", "canvas") for one in rows_of(levels, SIZES, train_size=SIZES[1], protocol=protocol)]
    by_class = {one["key"]: (np.full(40, 10), np.full(40, 8)) for one in rows}
    cells = [Picture(PIXEL, 150, 110, f"the image at {size}", size) for size in SIZES]
    colors = {f"class {at}": "red" for at in range(40)}
    wide = Picture(PIXEL, 760, 200, "attention", "")
    sections = [Section("Inputs", "One image.", {"all": dict.fromkeys(("scale", "canvas"), cells)}, colors),
                Section("Where a patch attends", "", {name: {"64 px, first layer": [wide]} for name in levels})]  # fmt: skip
    settings = {"classes": [f"n0{at}_class_of_data" for at in range(40)], "data": f"/a/long/{'path/' * 20}", "n": 100}
    settings |= {"command": [f"vitrel evaluate {' '.join(NAMES)} --size {' '.join(SIZES)}"], "device": "cpu"}
    return write(tmp_path_factory.mktemp("report"), judge(rows), by_class, settings, sections)


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_opens_without_errors_and_within_the_window(browser, page, width):
    browser.get_log("browser")
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    beyond = """return [...document.querySelectorAll('body *')].filter(one => !one.closest('.scroll, svg') &&
        one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 100))"""
    assert browser.execute_script(beyond) == []
    assert browser.execute_script("return [...document.images].every(one => one.complete && one.naturalWidth && one.alt)")
    smallest = """return Math.min(...[...document.querySelectorAll('svg text')].map(one =>
        parseFloat(getComputedStyle(one).fontSize) * Math.hypot(one.getScreenCTM().a, one.getScreenCTM().b)))"""
    assert browser.execute_script(smallest) >= 6.5  # pixels
    text = browser.execute_script("return document.body.innerText")
    assert text.count("Costs") == 1 and "undefined" not in text and "None" not in text and "nan" not in text.lower().split()
