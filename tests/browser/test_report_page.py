"""report.html in a real browser; skipped where chromium, its driver or selenium is missing."""

import csv
import gzip
import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch

import vitrel  # noqa: F401  registers the models with timm
from helpers import ROOT
from helpers.explorer_page import driven, until
from helpers.predictions import classified
from vitrel.data import Shapes, create_shapes
from vitrel.evaluate.checkpoint import TrainedModel, trained_model
from vitrel.evaluate.page import contents, write_html
from vitrel.evaluate.page.pictures import collect_pictures
from vitrel.evaluate.results.advice import judge
from vitrel.evaluate.results.aggregate import read_scores
from vitrel.evaluate.results.table import line_key, read_csv, read_predictions, translation_columns, write_predictions
from vitrel.evaluate.run import run_sweep
from vitrel.evaluate.sweep import Sweep
from vitrel.evaluate.tasks.base import ImageList

selenium = pytest.importorskip("selenium", reason="selenium is not installed: pip install -e '.[dev]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="no chromium with its driver on the path: apt-get install chromium chromium-driver",
    ),
]
TABLE, SWIN, EVIL = "vitrel_vit_n8_table", "vitrel_swin_n", "<img src=x onerror=alert(1)>"
CLASSES = [EVIL, "011_snapdragon", "wall_flower", "c"]
WORDS = [EVIL, "snapdragon", "wall flower", "c"]
LAPTOP, PHONE = (1280, 800), (390, 844)


def model_of(name, label, **how):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4, **how).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "table" in key or "qkv" in key:
                parameter.normal_(std=0.1 if "qkv" in key else 1.0)
    return TrainedModel(
        model=model, name=name, label=label, encoding="", img_size=(64, 64), classes=tuple(Shapes(1).classes), mean=(0.5,) * 3,
        std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic", seed=0, path=Path("last.ckpt"),
    )  # fmt: skip


def lines(columns, **values):
    about = {"task": "classification"}
    about |= {"seed": 0, "img_size": "64x64", "protocol": "scale", "budget": "", "policy": "none", "crop_pct": 1.0}
    return pd.DataFrame([about | dict(zip(values, one, strict=True)) for one in zip(*values.values(), strict=True)])[
        list(columns)
    ]


def predict(folder, n, classes):
    """Predictions for every row of a folder: right at the training size, the next class for a third of the images elsewhere."""
    rows, labels = read_csv(folder / "results.csv"), np.array([label for _, label in create_shapes("val", n)], np.int32)
    images, made = ImageList([f"a/{i}.jpg" for i in range(n)], classes), {}
    for row in rows:
        wrong = (np.arange(n) % 3 == 0) & (row["img_size"] != row["train_size"])
        own = np.where(wrong, (labels + 1) % len(classes), labels).astype(np.int32)
        made[line_key(row)] = classified(images, labels, own, top5=~wrong)
    write_predictions(made, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    frame = pd.read_csv(ROOT / "results" / "shapes_classified" / "results.csv", keep_default_na=False)
    frame["label"] = frame["label"].replace("vitrel_vit_n8_rope_mixed", EVIL)
    frame.to_csv(folder / "results.csv", index=False)
    translated = {
        "label": [SWIN] * 2,
        "translation": [0, 8],
        "n": [100] * 2,
        "top1": [90.0, 70.0],
        "top1_low": [0] * 2,
        "top1_high": [0] * 2,
    }
    lines(translation_columns("classification"), **translated).to_csv(folder / "translation.csv", index=False)
    models = [
        model_of(TABLE, TABLE, img_size=(64, 64)), model_of(SWIN, SWIN, img_size=(64, 64)), model_of("resnet10t", "convnet"),
    ]  # fmt: skip
    predict(folder, 4, CLASSES)
    sweep = Sweep("shapes", ((64, 64), (64, 96), (96, 96)), n=4)
    collect_pictures(models, sweep, folder, rows=read_csv(folder / "results.csv"))
    write_html(folder, "quickstart")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with driven() as driver:
        driver.downloads = tmp_path_factory.mktemp("downloads")
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(driver.downloads)})
        yield driver


def look(browser, path, size=LAPTOP, scheme="light"):
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(path.as_uri())
    until(browser, "document.documentElement.dataset.ready === 'yes'")


@pytest.fixture(scope="module")
def page(browser, folder):
    """page(script, ...): runs it in the page, which all tests share, on a laptop; afterwards the console has to be empty."""
    browser.get_log("browser"), browser.get_log("performance")
    look(browser, folder / "report.html")
    yield lambda script, *given: browser.execute_script(script, *given)
    assert browser.get_log("browser") == []


def table_of(folder, label=None, protocol=None):
    """The rows of a folder's page, or of one model in one protocol."""
    table = judge(read_csv(folder / "results.csv"), read_scores(folder)).rows
    return [row for row in table if (label is None or row["label"] == label) and (protocol in (None, row["protocol"]))]


def points_of(folder, curve, protocol):
    """The points of a curve in a protocol."""
    points = contents(read_csv(folder / "results.csv"), folder, "")["figures"]["points"]
    return [one for one in points if (one["curve"], one["protocol"]) == (curve, protocol)]


def set_value(page, name, value, event="change"):
    page(f"const e = document.getElementById('{name}'); e.value = arguments[0]; e.dispatchEvent(new Event('{event}'));", value)


def downloaded(browser, button):
    for old in browser.downloads.iterdir():
        old.unlink()
    browser.execute_script("document.querySelector(arguments[0]).click()", button)
    end = time.monotonic() + 30
    while not (found := [p for p in browser.downloads.iterdir() if p.suffix in (".csv", ".png") and p.stat().st_size]):
        assert time.monotonic() < end, "no file was downloaded"
        time.sleep(0.1)
    return found[0]


def test_names_are_text(page):
    assert page("return [...document.querySelectorAll('.by-size th')].some(th => th.textContent === arguments[0])", EVIL)
    assert page("return [...document.querySelectorAll('img')].every(img => img.src.startsWith('data:image/webp'))")


def test_curves_are_drawn_with_their_intervals_and_follow_the_metric(page, browser, folder):
    drawn = "document.querySelectorAll('#curves-0 .mark-{} path').length"
    shown = {one["curve"]: one for one in contents(read_csv(folder / "results.csv"), folder, "")["figures"]["points"]}
    rows = [one for name in shown for one in points_of(folder, name, "scale")]
    assert page(f"return {drawn.format('symbol.role-mark')}") == len(rows)  # as a point each
    said = page("return [...document.querySelectorAll('#curves-0 .mark-symbol.role-mark path')].map(p => p.ariaLabel)")
    one = next(one for one in rows if one["curve"] == SWIN)
    assert any(f"model: {SWIN}" in text and f"95 % from: {one['top1_low']}" in text for text in said)
    title = "return document.querySelector('#curves-0 svg').getAttribute('aria-label')"
    assert page(title) == "top-1 (%) against image size, scale protocol"
    set_value(page, "metric", "infer_samples_per_sec")
    until(browser, "document.querySelector('#curves-0 svg')?.getAttribute('aria-label')?.startsWith('throughput')")
    assert page(f"return {drawn.format('symbol.role-mark')}") == len(rows)


def test_a_click_in_the_legend_chooses_a_curve(page, browser):
    from selenium.webdriver import ActionChains

    faint = "[...document.querySelectorAll('#curves-0 .mark-symbol.role-mark path')].filter(p => p.getAttribute('opacity') < 1)"
    assert page(f"return {faint}.length") == 0
    entry = "#curves-0 .role-legend-entry text"
    label = next(one for one in browser.find_elements("css selector", entry) if one.text == SWIN)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", label)
    ActionChains(browser).move_to_element(label).click().perform()
    until(browser, f"{faint}.length > 0")
    assert not any(f"model: {SWIN};" in text for text in page(f"return {faint}.map(p => p.ariaLabel)"))


def test_the_comparison_comes_first_then_advice_and_verdicts(page, folder):
    judged = judge(read_csv(folder / "results.csv"), read_scores(folder))
    assert page("return document.querySelector('#advice h2').nextElementSibling.textContent") == judged.headline
    advice = page("return [...document.querySelectorAll('#advice-list li')].map(li => li.textContent)")
    assert advice == [f"{one.label}: {one.text}" for one in judged.advice]
    assert page("return document.getElementById('basis').textContent") == judged.basis
    page("document.querySelector('#advice details').open = true")
    rows = page("return [...document.querySelectorAll('#sizes tbody tr')].map(r => [...r.cells].map(c => c.textContent))")
    assert [(row[1], row[2]) for row in rows] == [(row["protocol"], row["img_size"]) for row in judged.by_size]
    assert [row[5].split(":")[0] for row in rows] == [row["verdict"] or "training size" for row in judged.by_size]
    assert all(row[0] == given["label"] for row, given in zip(rows, judged.by_size, strict=True) if row[8] == "nothing")
    cells = page(
        f"return [...document.querySelectorAll('.by-size tr')].find(r => r.textContent.startsWith('{SWIN}')).textContent"
    )
    one = next(row["top1"] for row in table_of(folder, SWIN, "scale") if row["img_size"] == "128x128")
    assert f"{one:.1f} ±" in cells


def test_the_first_screen_has_no_jargon(page):
    text = page(
        "const first = 'header, #advice h2, #headline, #advice-list, #basis';"
        "return [...document.querySelectorAll(first)].map(e => e.innerText).join(' ')"
    )
    for word in ("bicubic", "multiply-adds", "resampl", "geometric", "Holm", "logit"):
        assert word not in text.replace("(policy bicubic)", ""), word


def test_protocols_are_explained_with_what_the_model_saw(page):
    assert page("return [...document.querySelectorAll('#protocols dt')].map(t => t.textContent)") == ["scale", "canvas"]
    shown = page("return [...document.querySelectorAll('#seen img')].map(i => [i.alt, i.naturalWidth, i.naturalHeight])")
    assert [(width, height) for _, width, height in shown] == [(64, 64), (96, 64), (96, 96)] * 2
    assert "64x96, canvas" in shown[4][0]


def test_speed_has_one_point_per_row(page, folder):
    said = page("return [...document.querySelectorAll('#speed-chart .mark-symbol.role-mark path')].map(p => p.ariaLabel)")
    assert sum(f"model: {SWIN};" in text for text in said) == len(table_of(folder, SWIN, "scale"))


def test_images_that_change_with_size(page):
    raw = page("return [...document.querySelectorAll('#changes span[title]')].map(e => [e.textContent, e.title])")
    pairs = {(text.removeprefix("✓ ").removeprefix("✗ "), title) for text, title in raw if "/" not in title}
    assert pairs and pairs <= {*zip(WORDS, CLASSES, strict=True)}
    changed = page("return [...document.querySelectorAll('#changed tbody tr')].map(r => r.textContent)")
    assert len(changed) == 2 and all("✓" in text and "✗" in text for text in changed)
    assert page("return document.querySelectorAll('#changed img').length") == 2
    assert "2 of 4 images (50.0 %)" in page("return document.getElementById('changed-note').textContent")


def grid(name):
    return f"document.getElementById('{name}').grid"


def test_maps_of_position_follow_the_size_on_one_scale(page):
    assert page("return document.getElementById('lattice-size').value") == "64x64"
    scale = "return document.getElementById('lattice-bar').textContent"
    top, first = page(scale), page(f"return {grid('lattice-0')}")
    assert len(first) == 15
    set_value(page, "lattice-size", "96x96")
    geometric = page(f"return {grid('lattice-0')}")
    assert len(geometric) == 23 and page(scale) == top  # all layers and sizes share it
    assert "The outline encloses the offsets at 64x64" in page("return document.getElementById('lattice-note').textContent")
    set_value(page, "lattice-policy", "clip")
    assert page(f"return {grid('lattice-0')}") != geometric
    set_value(page, "lattice-layer", "2")
    assert page(scale) == top and page("return document.getElementById('lattice-size').value") == "96x96"


def test_a_click_and_the_arrow_keys_move_the_query(browser, page):
    from selenium.webdriver import ActionChains, Keys

    shown, note = f"return {grid('view-with')}", "return document.getElementById('attention-note').textContent"
    before = page(shown)
    assert "Query: row 4, column 4 of 8 × 8" in page(note)
    place = browser.find_element("css selector", "#view-image")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", place)
    width, height = place.size["width"], place.size["height"]
    ActionChains(browser).move_to_element_with_offset(place, round(-width * 7 / 16), round(-height * 5 / 16)).click().perform()
    until(browser, "document.getElementById('attention-note').textContent.includes('row 1, column 0 of')")
    clicked = page(shown)
    assert clicked != before
    browser.execute_script("document.getElementById('view-with').focus()")
    ActionChains(browser).send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    until(browser, "document.getElementById('attention-note').textContent.includes('row 2, column 2 of')")
    assert page(shown) != clicked
    with_it, without, difference = (np.array(page(f"return {grid('view-' + n)}")) for n in ("with", "without", "difference"))
    assert difference == pytest.approx(with_it - without) and abs(difference).max() > 0.01


def test_windows_and_models_that_cannot_be_seen(page):
    set_value(page, "attention-model", "1")
    cells = [value for row in page(f"return {grid('view-with')}") for value in row]
    assert any(value is None for value in cells) and sum(value or 0 for value in cells) == pytest.approx(1, abs=0.05)
    for section in ("attention", "lattice"):
        assert len(page(f"return [...document.getElementById('{section}-model').options].map(o => o.text)")) == 2
        text = page(f"return document.getElementById('{section}-others').textContent")
        assert "no attention that can be seen in resnet10t" in text


def test_the_table_sorts_filters_and_is_downloaded(page, browser, folder):
    column = "return [...document.querySelectorAll('#table tbody tr')].map(r => Number(r.cells[arguments[0]].dataset.value))"
    keys = page("return [...document.querySelectorAll('#table th button')].map(b => b.textContent)")
    at, rows = keys.index("top-1 %"), len(table_of(folder))
    button = f"document.querySelectorAll('#table th button')[{at}]"
    for down in (False, True):
        page(f"{button}.click()")
        values = page(column, at)
        assert len(values) == rows and values == sorted(values, reverse=down)
    assert page(f"return {button}.closest('th').ariaSort") == "descending"
    shown = "return [...document.querySelectorAll('#table th')].filter(h => h.offsetParent).length"
    few = page(shown)
    page("document.getElementById('all-columns').click()")
    assert page(shown) > few
    set_value(page, "row-filter", "swin 64x96", "input")
    assert page("return document.getElementById('row-count').textContent").startswith(f"2 of {rows} rows")
    lines = list(csv.DictReader(downloaded(browser, "#rows-csv").open(encoding="utf-8")))
    assert [line["model"] for line in lines] == [SWIN] * 2 and {line["size"] for line in lines} == {"64x96"}


def test_classes_and_translated_content(page, browser, folder):
    set_value(page, "class-curve", SWIN)
    # every third image is wrong at other sizes
    labels = next(iter(read_predictions(folder).rows.values())).arrays["labels"]
    counts, lost = (np.bincount(some, minlength=len(CLASSES)) for some in (labels, labels[::3]))
    lose = sum(int(wrong) > 0 for wrong, n in zip(lost, counts, strict=True) if n)
    until(
        browser, f"document.getElementById('class-note').textContent.startsWith('{lose} of {(counts > 0).sum()} classes lose')"
    )
    until(browser, f"document.querySelectorAll('#class-chart .mark-rect.role-mark path').length === {lose}")
    said = page("return [...document.querySelectorAll('#translation-chart .mark-symbol.role-mark path')].map(p => p.ariaLabel)")
    assert sorted(re.search(r"px\): (\d+); top-1 \(%\): (\d+)", text).groups() for text in said) == [("0", "90"), ("8", "70")]


def test_names_captions_and_ids(page):
    assert page("const ids = [...document.querySelectorAll('[id]')].map(e => e.id); return ids.length - new Set(ids).size") == 0
    plots = page(
        "return [...document.querySelectorAll('svg')].filter(s => !s.ariaHidden).map(s => s.getAttribute('aria-label'))"
    )
    assert len(plots) >= 4 and all(plots)
    assert (
        page("return [...document.querySelectorAll('table')].filter(t => t.offsetParent && !t.caption?.textContent).length")
        == 0
    )


def test_on_paper_everything_is_light_and_unfolded(browser, page):
    page("document.getElementById('theme').value = 'dark'; document.getElementById('theme').dispatchEvent(new Event('change'))")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page("dispatchEvent(new Event('beforeprint'))")
    assert page("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page("return [...document.querySelectorAll('.controls, nav')].every(e => e.offsetParent === null)")
    assert page("return [...document.querySelectorAll('details:not(.vega-embed details)')].every(d => d.open)")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    page("document.getElementById('theme').value = ''; document.getElementById('theme').dispatchEvent(new Event('change'))")


def empty_parts(browser):
    """Ids of shown charts and maps without anything drawn, and of empty tables and sections."""
    return browser.execute_script(
        "const shown = e => e.offsetParent !== null;"
        "const charts = [...document.querySelectorAll('.chart')].filter(shown)"
        ".filter(c => !c.querySelector('.role-mark path'));"
        "const maps = [...document.querySelectorAll('canvas')].filter(shown).filter(c => !c.grid || c.clientHeight < 20);"
        "const tables = [...document.querySelectorAll('table')].filter(shown).filter(t => !t.querySelector('td'));"
        "const sections = [...document.querySelectorAll('main section')].filter(shown).filter(s => s.textContent.length < 80);"
        "return [...charts, ...maps, ...tables, ...sections].map(e => e.id || e.outerHTML);"
    )


def network_requests(browser):
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [one["params"]["request"]["url"] for one in sent if one["method"] == "Network.requestWillBeSent"]
    return [url for url in requested if not url.startswith(("data:", "blob:", "file:"))]


FAMILIES = {
    "vit_tiny_patch16_224": dict(img_size=64, depth=2, embed_dim=48, num_heads=3),
    "maxvit_rmlp_pico_rw_256": dict(img_size=64, embed_dim=(32,) * 4, depths=(1,) * 4),
    "vitrel_swin_n": dict(img_size=64),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Reports of an evaluation of small random models of many families, each alone, and of all together."""
    folder = tmp_path_factory.mktemp("families")
    for name, how in FAMILIES.items():
        torch.manual_seed(0)
        side = how["img_size"]
        model = trained_model(timm.create_model(name, num_classes=4, **how).eval(), name, img_size=(side, side))
        sweep = Sweep("shapes", ((side * 3 // 2,) * 2,), n=3, attention_n=0, border_leak=False, device="cpu", report=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vitrel.evaluate.page.plot_all", lambda *given: [])
            patch.setattr("vitrel.evaluate.policies.gflops", lambda model, size: 1.0)
            run_sweep([model], sweep, folder / name, name)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_no_panel_is_empty_for_any_model(browser, families, name):
    browser.get_log("browser"), browser.get_log("performance")
    look(browser, families / name / "report.html")
    assert empty_parts(browser) == [] and browser.get_log("browser") == [] and network_requests(browser) == []
    shown = set(browser.execute_script("return [...document.querySelectorAll('main section:not([hidden])')].map(s => s.id)"))
    assert ("similarity" in shown) == (name == "vit_tiny_patch16_224")  # whose embedding is added to tokens
    acts = name == "vitrel_swin_n"
    assert ("lattices" in shown) == acts and ("attention" in shown) == (name != "maxvit_rmlp_pico_rw_256")
    views = "return [...document.querySelectorAll('#attention-figures figure')].filter(f => f.offsetParent).length"
    assert browser.execute_script(views) == (4 if acts else 2 if "attention" in shown else 0)
    left_out = browser.execute_script("return document.getElementById('left-out').textContent")
    assert ("no attention that can be seen" in left_out) == (name == "maxvit_rmlp_pico_rw_256")


def test_a_click_moves_the_patch_that_embeddings_are_compared_with(browser, families):
    look(browser, families / "vit_tiny_patch16_224" / "report.html")
    grids = "return [...document.querySelectorAll('#similarity-figures canvas')].map(c => c.grid)"
    before = browser.execute_script(grids)
    assert [(len(z), len(z[0])) for z in before] == [(4, 4), (6, 6)] and before[0][2][2] == 1
    browser.execute_script(
        "const c = document.getElementById('similarity-0'), r = c.getBoundingClientRect();"
        "c.dispatchEvent(new MouseEvent('click', { clientX: r.left + 0.4 * r.width, clientY: r.top + 0.1 * r.height }))"
    )
    assert browser.execute_script(grids)[0][0][1] == 1


@pytest.mark.parametrize(("size", "scheme"), [(LAPTOP, "light"), (PHONE, "dark")], ids=["laptop", "phone"])
def test_it_fits_every_screen_and_both_schemes(browser, folder, size, scheme):
    browser.get_log("browser"), browser.get_log("performance")
    look(browser, folder / "report.html", size, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(22, 24, 27)'"
    assert browser.execute_script(f"return {dark}") == (scheme == "dark")
    axis = "return document.querySelector('#curves-0 .role-axis-label text').getAttribute('fill')"
    assert browser.execute_script(axis) == ("#e6e6e6" if scheme == "dark" else "#1a1a1a")
    tables = "return [...document.querySelectorAll('.by-size th')].every(th => th.offsetParent)"
    assert browser.execute_script(tables)  # a narrow screen scrolls them and drops no column
    other = "light" if scheme == "dark" else "dark"
    browser.execute_script(
        f"const t = document.getElementById('theme'); t.value = '{other}'; t.dispatchEvent(new Event('change'))"
    )
    assert browser.execute_script(f"return {dark}") == (other == "dark")
    assert browser.get_log("browser") == []
    assert network_requests(browser) == []


def test_all_controls_have_names_and_are_reached_by_tab(browser, folder):
    from selenium.webdriver import ActionChains, Keys

    look(browser, folder / "report.html")
    page = browser.execute_script
    nameless = page(
        "return [...document.querySelectorAll('select, input, button, [tabindex]')]"
        ".filter(e => !(e.labels?.length || e.textContent.trim() || e.ariaLabel)).map(e => e.outerHTML)"
    )
    assert nameless == []
    ActionChains(browser).send_keys(Keys.TAB).perform()
    assert page("return document.activeElement.className") == "skip"
    ActionChains(browser).send_keys(Keys.TAB).perform()
    assert page("return document.activeElement.id") == "theme"
    assert page("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_layer_in_which_position_is_negligible_is_gray(browser, folder, tmp_path):
    """By its share of the logits, whatever the logits are."""
    for path in folder.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    stored = json.loads(gzip.decompress((folder / "pictures.json.gz").read_bytes()))
    assert stored["models"][0]["shares"][0] > 0.01
    stored["models"][0]["shares"][0] = 0.009
    (tmp_path / "pictures.json.gz").write_bytes(gzip.compress(json.dumps(stored).encode()))
    look(browser, write_html(tmp_path))
    captions = "return [...document.querySelectorAll('#lattice figcaption')].map(c => c.textContent)"
    pixel = "return [...document.getElementById('lattice-0').getContext('2d').getImageData(1, 1, 1, 1).data]"
    assert all("negligible" in text for text in browser.execute_script(captions))
    assert browser.execute_script(pixel) == [158, 158, 158, 255]
    assert "0.9 % of the logits" in browser.execute_script("return document.getElementById('lattice-note').textContent")
    set_value(browser.execute_script, "lattice-layer", "1")
    assert not any("negligible" in text for text in browser.execute_script(captions))


def test_a_folder_with_results_alone(browser, tmp_path):
    shutil.copy(ROOT / "results" / "shapes_classified" / "results.csv", tmp_path)
    browser.get_log("browser")
    look(browser, write_html(tmp_path))
    hidden = browser.execute_script("return [...document.querySelectorAll('section[hidden]')].map(s => s.id)")
    assert hidden == ["changes", "classes", "lattices", "similarity", "attention", "translation"]
    said = browser.execute_script("return document.getElementById('left-out').textContent")
    assert all(name in said for name in ("pictures.json.gz", "predictions.npz", "translation.csv"))
    assert browser.get_log("browser") == []
