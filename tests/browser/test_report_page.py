"""report.html in a real browser; skipped where chromium, its driver or selenium is missing."""

import csv
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
from vitrel.data import Shapes, create_shapes
from vitrel.evaluate.advice import judge
from vitrel.evaluate.images import ImageList
from vitrel.evaluate.metrics import Predicted, read_predictions, write_predictions
from vitrel.evaluate.models import Trained, trained_model
from vitrel.evaluate.report.html import contents, write_html
from vitrel.evaluate.report.pictures import collect_pictures
from vitrel.evaluate.results import TRANSLATION, line_key, read_csv, read_scores
from vitrel.evaluate.run import run_sweep
from vitrel.evaluate.settings import Sweep

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
SWIN_CURVE = f"{SWIN}, fixed"  # the policy of its rows at new sizes
LAPTOP, PHONE = (1280, 800), (390, 844)


def model_of(name, label, **how):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4, **how).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "table" in key or "qkv" in key:
                parameter.normal_(std=0.1 if "qkv" in key else 1.0)
    return Trained(
        model=model, name=name, label=label, encoding="", img_size=(64, 64), classes=tuple(Shapes(1).classes), mean=(0.5,) * 3,
        std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic", seed=0, path=Path("last.ckpt"),
    )  # fmt: skip


def lines(columns, **values):
    about = {"seed": 0, "img_size": "64x64", "protocol": "scale", "budget": "", "policy": "none", "crop_pct": 1.0}
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
        made[line_key(row)] = Predicted(images, labels, own, np.ones(n, np.float32), ~wrong)
    write_predictions(made, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    frame = pd.read_csv(ROOT / "results" / "quickstart" / "results.csv", keep_default_na=False)
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
    lines(TRANSLATION, **translated).to_csv(folder / "translation.csv", index=False)
    models = [
        model_of(TABLE, TABLE, img_size=(64, 64)), model_of(SWIN, SWIN, img_size=(64, 64)), model_of("resnet10t", "convnet"),
    ]  # fmt: skip
    predict(folder, 4, CLASSES)
    sweep = Sweep("shapes", ((64, 64), (64, 96), (96, 96)), n=4)
    collect_pictures(models, sweep, folder, rows=read_csv(folder / "results.csv"))
    (folder / "claims.md").write_text(f"- **{EVIL} wins.** This is not shown.\n- **Second.** This holds.\n", "utf-8")
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


@pytest.fixture
def page(browser, folder):
    """page(script, ...): runs it in the page, opened anew on a laptop; afterwards the console has to be empty."""
    browser.get_log("browser"), browser.get_log("performance")
    look(browser, folder / "report.html")
    yield lambda script, *given: browser.execute_script(script, *given)
    assert browser.get_log("browser") == []


def table_of(folder, label=None, protocol=None):
    """The rows of a folder's page, or of one model in one protocol."""
    table = judge(read_csv(folder / "results.csv"), read_scores(folder)).rows
    return [row for row in table if (label is None or row["label"] == label) and (protocol in (None, row["protocol"]))]


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


def test_claims_are_listed_as_text(page):
    items = page("return [...document.querySelectorAll('#claim-list li')].map(li => li.textContent)")
    assert items == [f"{EVIL} wins. This is not shown.", "Second. This holds."]
    assert page("return document.querySelectorAll('#claim-list img').length") == 0


def test_curves_are_drawn_with_intervals_and_follow_the_metric(page, folder):
    plot = "document.getElementById('curves-scale')"
    square = [row for row in table_of(folder, SWIN, "scale") if row["img_size"] != "64x96"]
    square.sort(key=lambda row: int(row["img_size"].split("x")[0]))
    trace = page(f"return {plot}.data.find(t => t.name === '{SWIN_CURVE}' && t.meta.kind === 'square')")
    assert trace["y"] == [row["top1"] for row in square]
    assert trace["error_y"]["array"] == pytest.approx([row["high"] - row["top1"] for row in square], abs=1e-6)
    assert all(
        word in trace["hovertext"][0]
        for word in (f"n = {square[0]['n']}", "1 seed", "policy: fixed", "resampled: nothing", "95 %", "top-1 (%)")
    )
    wide = page(f"return {plot}.data.find(t => t.name === '{SWIN_CURVE}' && t.meta.kind === 'wide')")
    assert wide["mode"] == "markers" and wide["marker"]["symbol"].endswith("-open")
    assert page(f"return {plot}.querySelectorAll('.scatterlayer .trace').length") == page(f"return {plot}.data.length")
    assert page(f"return {plot}.layout.shapes.map(s => s.x0)") == [64]
    set_value(page, "metric", "infer_samples_per_sec")
    again = page(f"return {plot}.data.find(t => t.name === '{SWIN_CURVE}' && t.meta.kind === 'square').y")
    assert again == pytest.approx([row["infer_samples_per_sec"] for row in square])
    assert page(f"return {plot}.layout.yaxis.type") == "log"
    page("document.querySelector('#protocol-choice input[value=canvas]').click()")
    assert page("return document.getElementById('curves-canvas').closest('figure').hidden")


def test_the_legend_filters_and_chooses(page):
    plot = "document.getElementById('curves-scale')"
    curve = f"{TABLE}, geometric = clip = bicubic"  # the synthetic predictions of the three are equal
    set_value(page, "curve-filter", "table clip", "input")
    names = page("return [...document.querySelectorAll('#legend li')].map(li => li.textContent)")
    assert len(names) == 1 and names[0].endswith(curve)
    page("document.querySelector('#legend input').click()")
    assert page(f"return {plot}.data.filter(t => t.name === '{curve}').every(t => !t.error_y)")  # grey
    page("document.getElementById('others').click()")
    assert page(f"return {plot}.data.filter(t => t.name === '{curve}').length") == 0
    set_value(page, "curve-set", "unresized")
    shown = set(page(f"return {plot}.data.map(t => t.name)"))
    assert {SWIN_CURVE, EVIL} <= shown and curve not in shown


def test_names_are_text(page):
    assert page("return [...document.querySelectorAll('#by-size td')].some(td => td.textContent === arguments[0])", EVIL)
    assert page("return [...document.querySelectorAll('img')].every(img => img.src.startsWith('data:image/webp'))")


def test_every_model_has_its_advice_and_every_size_its_verdict(page, folder):
    judged = judge(read_csv(folder / "results.csv"), read_scores(folder))
    advice = page("return [...document.querySelectorAll('#advice-list li')].map(li => li.textContent)")
    assert advice == [f"{one.label}: {one.text}" for one in judged.advice]
    assert page("return document.getElementById('basis').textContent") == judged.basis
    rows = page("return [...document.querySelectorAll('#sizes tbody tr')].map(r => [...r.cells].map(c => c.textContent))")
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (row["label"], row["protocol"], row["img_size"]) for row in judged.by_size
    ]
    assert [row[6].split(":")[0] for row in rows] == [row["verdict"] or "training size" for row in judged.by_size]
    cells = page(
        f"return [...document.querySelectorAll('#by-size tr')].find(r => r.textContent.startsWith('{SWIN}')).textContent"
    )
    one = next(row["top1"] for row in table_of(folder, SWIN, "scale") if row["img_size"] == "128x128")
    assert f"{one:.1f} ±" in cells and "nothing resampled" in cells
    kinds = page("return [...document.querySelectorAll('.badge')].map(b => b.className)")
    assert set(kinds) == {"badge neutral"}  # interpolation is no alarm
    warned = [row for row in contents(read_csv(folder / "results.csv"), folder, "")["rows"] if row["warning"]]
    assert len(page("return [...document.querySelectorAll('#by-size .warn')]")) == len(warned)


def test_protocols_are_explained_with_what_the_model_saw(page):
    assert page("return [...document.querySelectorAll('#protocol-list dt')].map(t => t.textContent)") == ["scale", "canvas"]
    shown = page("return [...document.querySelectorAll('#seen img')].map(i => [i.alt, i.naturalWidth, i.naturalHeight])")
    assert [(width, height) for _, width, height in shown] == [(64, 64), (96, 64), (96, 96)] * 2
    assert "64x96, canvas" in shown[4][0]


def test_throughput_has_one_point_per_row(page, folder):
    table = table_of(folder, SWIN, "scale")
    trace = page(f"return document.getElementById('throughput-plot').data.find(t => t.name === '{SWIN_CURVE}')")
    drawn = sorted(zip(trace["x"], trace["y"], trace["text"], strict=True))
    sizes = [re.sub(r"^(\d+)x\1$", r"\1", row["img_size"]) for row in table]
    expected = sorted((row["infer_samples_per_sec"], row["top1"], size) for row, size in zip(table, sizes, strict=True))
    assert [(y, text) for _, y, text in drawn] == [(y, text) for _, y, text in expected]
    assert [x for x, _, _ in drawn] == pytest.approx([x for x, _, _ in expected])


def test_mistakes_and_images_that_change_with_size(page):
    rows = page("return [...document.querySelectorAll('#confusions tbody tr')].map(r => [...r.cells].map(c => c.textContent))")
    wrong = [label for at, (_, label) in enumerate(create_shapes("val", 4)) if at % 3 == 0]
    assert {(row[0], row[1]) for row in rows[:-1]} == {(WORDS[label], WORDS[(label + 1) % 4]) for label in wrong}
    assert rows[-1][0] == "all mistakes" and rows[-1][-1] == "2 (50 %)"
    raw = page("return [...document.querySelectorAll('#mistakes span[title]')].map(e => [e.textContent, e.title])")
    assert raw and {tuple(pair) for pair in raw} <= {*zip(WORDS, CLASSES, strict=True)}
    changed = page("return [...document.querySelectorAll('#changed tbody tr')].map(r => r.textContent)")
    assert len(changed) == 2 and all("✓" in text and "✗" in text for text in changed)
    assert page("return document.querySelectorAll('#changed img').length") == 2
    assert "2 of 4 images (50.0 %)" in page("return document.getElementById('changed-note').textContent")


def test_the_slider_changes_the_heat_map(page):
    plot, state = "document.getElementById('lattice-plot')", "return document.getElementById('lattice-at').value"
    assert page(state) == "64x64 px" and len(page(f"return {plot}.data[0].z")) == 15
    top = page(f"return {plot}.data[0].zmax")
    assert page(f"return {plot}.layout.shapes.length") == 0 and page(
        f"return {plot}.querySelectorAll('.heatmaplayer image').length"
    )
    set_value(page, "lattice-size", "2", "input")
    assert page(state) == "96x96 px" and len(page(f"return {plot}.data[0].z")) == 23
    assert page(f"return {plot}.data[0].zmax") == top and page(f"return {plot}.data[0].zmin") == -top
    heads = page(f"return {plot}.data.length")
    outline = page(f"return {plot}.layout.shapes.map(s => [s.x0, s.x1, s.y0, s.y1])")
    assert outline == [[-7.5, 7.5, -7.5, 7.5]] * heads
    geometric = page(f"return {plot}.data[0].z")
    set_value(page, "lattice-policy", "clip")
    assert page(state) == "96x96 px" and page(f"return {plot}.data[0].z") != geometric
    set_value(page, "lattice-model", "1")  # windows: nothing changes with the size
    before = page(f"return {plot}.data[0].z")
    set_value(page, "lattice-size", "0", "input")
    assert page(f"return {plot}.data[0].z") == before


def test_a_click_and_the_arrow_keys_move_the_query(browser, page):
    from selenium.webdriver import ActionChains, Keys

    shown = "return document.getElementById('attention-with').data[0].z"
    note = "return document.getElementById('attention-note').textContent"
    before = page(shown)
    assert "Query: row 4, column 4 of 8 × 8" in page(note)
    place = browser.find_element("css selector", "#attention-image .nsewdrag")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", place)
    width, height = place.size["width"], place.size["height"]
    ActionChains(browser).move_to_element_with_offset(place, round(-width * 7 / 16), round(-height * 5 / 16)).click().perform()
    until(browser, "document.getElementById('attention-note').textContent.includes('row 1, column 0 of')")
    clicked = page(shown)
    assert clicked != before
    browser.execute_script("document.getElementById('attention-with').focus()")
    ActionChains(browser).send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    until(browser, "document.getElementById('attention-note').textContent.includes('row 2, column 2 of')")
    assert page(shown) != clicked
    maps = [
        page(f"return document.getElementById('attention-{n}').data[0].z.flat()") for n in ("with", "without", "difference")
    ]
    assert maps[2] == pytest.approx([a - b for a, b in zip(*maps[:2], strict=True)]) and max(map(abs, maps[2])) > 0.01
    total = page("const m = mapsNow().with; return m.grid.flat().reduce((a, b) => a + b, 0) + m.prefix")
    assert total == pytest.approx(1, abs=0.05)


def test_windows_and_models_that_cannot_be_seen(page):
    set_value(page, "attention-model", "1")
    grid = page("return document.getElementById('attention-with').data[0].z.flat()")
    assert any(value is None for value in grid) and sum(value or 0 for value in grid) == pytest.approx(1, abs=0.05)
    for section in ("attention", "lattice"):
        assert len(page(f"return [...document.getElementById('{section}-model').options].map(o => o.text)")) == 2
        text = page(f"return document.getElementById('{section}-others').textContent")
        assert "no attention that can be seen in resnet10t" in text


def test_the_table_sorts_and_filters(page, folder):
    column = "return [...document.querySelectorAll('#table tbody tr')].map(r => Number(r.cells[arguments[0]].textContent))"
    keys = page("return [...document.querySelectorAll('#table th button')].map(b => b.dataset.key)")
    at, rows = keys.index("top1"), len(table_of(folder))
    for down in (False, True):
        page("document.querySelector('#table button[data-key=top1]').click()")
        values = page(column, at)
        assert len(values) == rows and values == sorted(values, reverse=down)
    state = page("return document.querySelector('#table button[data-key=top1]').closest('th').ariaSort")
    assert state == "descending" and page("return document.activeElement.dataset.key") == "top1"
    set_value(page, "row-filter", "swin 64x96", "input")
    assert page("return document.getElementById('row-count').textContent").startswith(f"2 of {rows} rows")
    page("document.getElementById('all-columns').click()")
    assert len(page("return [...document.querySelectorAll('#table th')].map(h => h.textContent)")) > len(keys)


def test_classes_and_translated_content(page, folder):
    set_value(page, "class-curve", str(page(f"return DATA.curves.findIndex(c => c.label === '{SWIN}')")))
    # every third image is wrong at other sizes
    labels = read_predictions(folder).labels
    counts, lost = (np.bincount(some, minlength=len(CLASSES)) for some in (labels, labels[::3]))
    changes = sorted(-100 * int(wrong) / int(n) for wrong, n in zip(lost, counts, strict=True) if n)
    assert page("return document.getElementById('class-plot').data[0].x") == pytest.approx(
        [change for change in changes if change]
    )
    said = page("return document.getElementById('class-note').textContent")
    assert said.startswith(f"{sum(change < 0 for change in changes)} of {len(changes)} classes lose")
    (trace,) = page("return document.getElementById('translation-plot').data.map(t => [t.x, t.y])")
    assert trace == [[0, 8], [90, 70]]


def test_downloads_hold_the_numbers(browser, page, folder):
    table = table_of(folder)
    path = downloaded(browser, "#panels figure button[aria-label^=CSV]")
    lines = list(csv.DictReader(path.open(encoding="utf-8")))
    assert EVIL in {line["label"] for line in lines}
    own = [line for line in lines if line["label"] == SWIN]
    expected = table_of(folder, SWIN, "scale")
    assert [float(line["top1"]) for line in own] == [row["top1"] for row in expected]
    assert [float(line["low"]) for line in own] == pytest.approx([row["low"] for row in expected])
    assert len(list(csv.reader(downloaded(browser, "#rows-csv").open(encoding="utf-8")))) == len(table) + 1
    heat = list(csv.DictReader(downloaded(browser, "#lattice button[aria-label^=CSV]").open(encoding="utf-8")))
    assert len(heat) == 15 * 15 * page("return document.getElementById('lattice-plot').data.length")
    assert downloaded(browser, "#lattice button[aria-label^=PNG]").read_bytes().startswith(b"\x89PNG")


def test_a_figure_without_data_has_nothing_to_download(page):
    """Its buttons are off; pressed by a script all the same, they raise nothing (the console stays empty)."""
    set_value(page, "curve-set", "none")
    page("document.getElementById('others').click()")
    off = "return [...document.querySelectorAll('#panels figcaption button')].map(b => b.disabled)"
    assert set(page(off)) == {True}
    page("document.querySelectorAll('figcaption button').forEach(b => { if (b.disabled) b.click(); })")
    set_value(page, "curve-set", "all")
    assert set(page(off)) == {False}


def empty_parts(browser):
    """Ids of shown figures without anything drawn, of empty tables and sections, and of canvases."""
    return browser.execute_script(
        "const shown = e => e.offsetParent !== null;"
        "const plots = [...document.querySelectorAll('.plot')].filter(shown).filter(p => !p.data?.length"
        " || p.data.every(t => (t.z ? t.z.flat().every(v => v === null) : !t.x?.length)) || p.clientHeight < 40);"
        "const tables = [...document.querySelectorAll('table')].filter(shown).filter(t => !t.querySelector('td'));"
        "const sections = [...document.querySelectorAll('main section')].filter(shown).filter(s => s.textContent.length < 80);"
        "return [...plots, ...tables, ...sections, ...document.querySelectorAll('canvas')].map(e => e.id || e.outerHTML);"
    )


def network_requests(browser):
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [one["params"]["request"]["url"] for one in sent if one["method"] == "Network.requestWillBeSent"]
    return [url for url in requested if not url.startswith(("data:", "blob:", "file:"))]


SMALL = dict(img_size=56, depth=2, embed_dim=48, num_heads=3)  # of 14 px patches; of the others 64 px
WINDOWED = dict(img_size=64, window_size=4, depths=(1, 1), num_heads=(2, 2), embed_dim=16)
FAMILIES = {
    "vit_tiny_patch16_224": SMALL | {"img_size": 64},
    "vit_small_patch14_reg4_dinov2": SMALL,
    "eva02_tiny_patch14_224": SMALL,
    "vit_small_patch16_rope_mixed_224": SMALL | {"img_size": 64},
    "swin_tiny_patch4_window7_224": WINDOWED,
    "maxvit_rmlp_pico_rw_256": dict(img_size=64, embed_dim=(32,) * 4, depths=(1,) * 4),
    "vitrel_vit_n8_table": dict(img_size=64),
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
        sweep = Sweep("shapes", ((side * 3 // 2,) * 2,), n=3, attention_n=0, border_leak=False, device="cpu")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vitrel.evaluate.report.html.plot_all", lambda *given: [])
            patch.setattr("vitrel.evaluate.models.gflops", lambda model, size: 1.0)
            run_sweep([model], sweep, folder / name, name, report=True)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_no_panel_is_empty_for_any_model(browser, families, name):
    browser.get_log("browser"), browser.get_log("performance")
    look(browser, families / name / "report.html")
    assert empty_parts(browser) == [] and browser.get_log("browser") == [] and network_requests(browser) == []
    shown = set(browser.execute_script("return [...document.querySelectorAll('main section:not([hidden])')].map(s => s.id)"))
    added = {"vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "eva02_tiny_patch14_224"}  # to tokens
    assert ("similarity" in shown) == (name in added)
    acts = name not in {"vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "maxvit_rmlp_pico_rw_256"}
    assert ("lattices" in shown) == acts and ("attention" in shown) == (name != "maxvit_rmlp_pico_rw_256")
    views = "return [...document.querySelectorAll('#attention-panels figure')].filter(f => f.offsetParent).length"
    assert browser.execute_script(views) == (4 if acts else 2 if "attention" in shown else 0)
    left_out = browser.execute_script("return document.getElementById('left-out').textContent")
    assert ("no attention that can be seen" in left_out) == (name == "maxvit_rmlp_pico_rw_256")


def test_a_click_moves_the_patch_that_embeddings_are_compared_with(browser, families):
    look(browser, families / "vit_tiny_patch16_224" / "report.html")
    shown = "return document.getElementById('similarity-plot').data.map(t => t.z)"
    before = browser.execute_script(shown)
    assert [(len(z), len(z[0])) for z in before] == [(4, 4), (6, 6)] and before[0][2][2] == 1
    browser.execute_script("moveSimilarity(0.1, 0.4)")
    assert browser.execute_script(shown)[0][0][1] == 1


def test_on_paper_everything_is_light_and_unfolded(browser, page):
    page("document.getElementById('theme').value = 'dark'; document.getElementById('theme').dispatchEvent(new Event('change'))")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page("dispatchEvent(new Event('beforeprint'))")
    assert page("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page("return [...document.querySelectorAll('.controls, nav')].every(e => e.offsetParent === null)")
    assert page("return [...document.querySelectorAll('details')].every(d => d.open)")
    assert page("return [...document.querySelectorAll('.plot')].every(p => p.clientWidth <= 700)")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    page("dispatchEvent(new Event('afterprint'))")
    assert page("return document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_it_fits_every_screen_and_both_schemes(browser, folder, size, scheme):
    browser.get_log("browser"), browser.get_log("performance")
    look(browser, folder / "report.html", size, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(22, 24, 27)'"
    assert browser.execute_script(f"return {dark}") == (scheme == "dark")
    assert browser.execute_script("return document.getElementById('curves-scale').layout.paper_bgcolor") == (
        "#16181b" if scheme == "dark" else "#ffffff"
    )
    other = "light" if scheme == "dark" else "dark"
    browser.execute_script(
        f"const t = document.getElementById('theme'); t.value = '{other}'; t.dispatchEvent(new Event('change'))"
    )
    assert browser.execute_script(f"return {dark}") == (other == "dark")
    assert browser.get_log("browser") == []
    assert network_requests(browser) == []


def test_all_controls_have_names_and_are_reached_by_tab(browser, page):
    from selenium.webdriver import ActionChains, Keys

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


def test_a_folder_with_results_alone(browser, tmp_path):
    shutil.copy(ROOT / "results" / "quickstart" / "results.csv", tmp_path)
    browser.get_log("browser")
    look(browser, write_html(tmp_path))
    hidden = browser.execute_script("return [...document.querySelectorAll('section[hidden]')].map(s => s.id)")
    assert hidden == ["claims", "mistakes", "classes", "lattices", "similarity", "attention", "translation"]
    said = browser.execute_script("return document.getElementById('left-out').textContent")
    assert all(name in said for name in ("pictures.json.gz", "predictions.npz", "translation.csv"))
    assert browser.get_log("browser") == []
