"""explorer.html in a real browser: keyboard, pointer, address, screens, colors."""

import json
import math

import pytest

from helpers.explorer_page import LAPTOP, LIVE, NEEDS_BROWSER, PHONE, cells, look, numbers, press, set_value, until

selenium = pytest.importorskip("selenium", reason="selenium is not installed: pip install -e '.[dev]'")
pytestmark = NEEDS_BROWSER
# every text whose color stands out less than 4.5 from what lies behind it: contrast, color, background, text
CONTRAST = """
const parts = (color) => (color.match(/[0-9.]+/g) || [0, 0, 0, 0]).map(Number);
const light = (color) => parts(color).slice(0, 3).map((v) => v / 255)
  .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if (parts(color)[3] !== 0) return color;
  }
  return 'rgb(255, 255, 255)';
};
const texts = [...document.body.querySelectorAll('*')].filter((e) => !e.closest('script, style, noscript') && !e.disabled
  && [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
return [texts.length, texts.map((e) => {
  const style = getComputedStyle(e), color = e.closest('svg') ? style.fill : style.color, back = behind(e);
  const [low, high] = [light(color), light(back)].sort((a, b) => a - b);
  return [(high + 0.05) / (low + 0.05), color, back, e.textContent.trim().slice(0, 30)];
}).filter(([contrast]) => contrast < 4.5)];
"""


def test_the_calculation_of_a_cell_in_words(browser, explorer):
    from selenium.webdriver import ActionChains, Keys

    explorer(h=3, w=4, query=6, key=0, **{"lambda": 0.5})
    first = browser.execute_script(LIVE, "calculation")
    assert "token 6, row 1, column 2" in first and "token 0, row 0, column 0" in first
    assert "(1 − 0, 2 − 0) = (1, 2): the key is 1 up and 2 to the left" in first and "√(1² + 2²) = √5 = 2.2361" in first
    assert "−0.5 · ln(3.2361) = −0.5 · 1.1744 = −0.5872" in first and "e^bias = 0.5559" in first
    browser.execute_script("document.querySelector('#bias-cells [tabindex=\"0\"]').focus()")
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    moved = browser.execute_script(LIVE, "calculation")
    assert "token 7, row 1, column 3" in moved and "token 1, row 0, column 1" in moved
    focused = "const e = document.activeElement; return [e.dataset.at, e.tabIndex, e.ariaSelected, e.ariaLabel]"
    label = "query (1, 3), key (0, 1): bias −0.5872"
    assert browser.execute_script(focused) == ["7,1", 0, "true", label]
    assert browser.execute_script("return document.querySelectorAll('#bias-cells [tabindex=\"0\"]').length") == 1
    press(browser, Keys.HOME, Keys.ARROW_LEFT)
    assert browser.execute_script(focused)[0] == "7,0"
    press(browser, Keys.END, *[Keys.ARROW_DOWN] * 6)
    assert browser.execute_script(focused)[0] == "11,11"
    assert "the query itself" in browser.execute_script(LIVE, "calculation")
    assert browser.execute_script("return document.getElementById('query').value") == "11"
    cell = browser.find_element("css selector", "#bias-cells [data-at='8,3']")
    ActionChains(browser).move_to_element(cell).perform()
    assert "the key is 2 up and 3 to the right" in browser.execute_script(LIVE, "calculation")
    ActionChains(browser).move_to_element(browser.find_element("id", "summary")).perform()
    assert "the query itself" in browser.execute_script(LIVE, "calculation")  # pointing chooses nothing
    cell.click()
    assert "the key is 2 up and 3 to the right" in browser.execute_script(LIVE, "calculation")
    assert browser.execute_script("return [state.query, state.key]") == [8, 3]


def test_sliders_and_choices_by_keyboard(browser, explorer):
    from selenium.webdriver import Keys

    explorer()
    browser.execute_script("document.getElementById('lambda').focus()")
    press(browser, Keys.ARROW_RIGHT)
    assert browser.execute_script("return [state.lambda, document.querySelector('output[for=lambda]').value]") == [0.35, "0.35"]
    assert cells(browser, "bias")[1] == "−0.24"
    press(browser, Keys.END)
    assert numbers(cells(browser, "bias"))[1] == pytest.approx(-3 * math.log(2), abs=6e-3)
    browser.execute_script("document.getElementById('h').focus()")
    press(browser, Keys.ARROW_UP)
    assert len(cells(browser, "bias")) == 100 and len(cells(browser, "standard")) == 10
    assert browser.execute_script("return document.getElementById('grid').value") == ""
    set_value(browser, "grid", "4 × 4")
    assert browser.execute_script("return [state.h, state.w, document.getElementById('h').value]") == [4, 4, "4"]
    set_value(browser, "decay", "none")
    assert set(numbers(cells(browser, "bias"))) == {0}
    assert browser.execute_script("return document.getElementById('lambda').disabled")


def test_the_address_keeps_what_is_set(browser, explorer):
    explorer()
    set_value(browser, "w", "6")
    set_value(browser, "decay", "linear")
    browser.execute_script("document.getElementById('both').click()")
    until(browser, "location.hash.includes('decay=linear') && location.hash.includes('both=false')")
    browser.execute_script("document.querySelector('nav a[href=\"#buckets\"]').click()")
    until(browser, "location.hash.includes('w=6')")  # a link to a section does not lose it
    browser.refresh()
    until(browser, "document.documentElement.dataset.ready === 'yes'")
    assert browser.execute_script("return [state.w, state.decay, state.both]") == [6, "linear", False]
    assert browser.execute_script("return [...document.querySelectorAll('#w, #decay')].map(e => e.value)") == ["6", "linear"]
    set_value(browser, "sign", "key")
    browser.execute_script("change({contents: [1, 0, -2.5, 1, 1, 1, 0, 0], line: 'bias'})")
    until(browser, "location.hash.includes('line=bias')")
    browser.refresh()
    until(browser, "document.documentElement.dataset.ready === 'yes'")
    kept = browser.execute_script("return [state.sign, state.line, state.contents[2], state.biases.length]")
    assert kept == ["key", "bias", -2.5, 9]
    wrong = {
        "contents": "1,2",
        "biases": "1,,1,1,1,1,1,1,1",
        "positions": "0,0,0,0,0,0,0,1e9",
        "sign": "y",
        "line": "__proto__",
        "h": 99,
        "w": "x",
        "decay": "toString",
        "query": 700,
        "lambda": -1,
        "buckets": 7,
        "max": 0,
        "span": 3,
        "y": 1,
    }
    explorer(**wrong)
    kept = browser.execute_script("return [state.h, state.w, state.decay, state.query, state.lambda, state.buckets, state.max]")
    assert kept == [6, 5, "log", 29, 0, 6, 1] and browser.execute_script("return state.span") == 0
    kept = browser.execute_script("return [state.contents[1], state.biases[0], state.positions[7], state.sign, state.line]")
    assert kept == [0, 0.3, 99, "query", "scores"]


@pytest.mark.parametrize(("size", "scheme"), [(LAPTOP, "light"), (PHONE, "dark")], ids=["laptop", "phone"])
def test_it_fits_every_screen_and_both_schemes(browser, explorer_path, size, scheme):
    """In the scheme of the system, then in the other, chosen on the page."""
    browser.get_log("browser"), browser.get_log("performance")
    for set_to in ({}, {"h": 6, "w": 6, "rows": 8, "columns": 8}):
        look(browser, explorer_path, size, scheme, **set_to)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
        browser.execute_script("document.querySelector('details').open = true")
        count, faint = browser.execute_script(CONTRAST)
        assert count > 150 and faint == []
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(22, 24, 27)'"
    assert browser.execute_script(f"return {dark}") == (scheme == "dark")
    other = "light" if scheme == "dark" else "dark"
    browser.execute_script(
        f"const t = document.getElementById('theme'); t.value = '{other}'; t.dispatchEvent(new Event('change'))"
    )
    assert browser.execute_script(f"return {dark}") == (other == "dark")
    assert browser.execute_script(CONTRAST)[1] == []
    assert browser.get_log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [one["params"]["request"]["url"] for one in sent if one["method"] == "Network.requestWillBeSent"]
    assert [url for url in requested if not url.startswith(("data:", "file:", "about:"))] == []
    assert sum(url.startswith("file:") for url in requested) == 2  # the page itself, twice
