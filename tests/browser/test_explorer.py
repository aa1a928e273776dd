"""explorer.html in a real browser: its numbers against the golden ones and vitrel's own."""

import json
import math
import re

import pytest
import torch

from helpers import golden
from helpers.explorer_page import LIVE, NEEDS_BROWSER, cells, numbers, set_value, table
from vitrel.grid import Grid
from vitrel.ops import attention
from vitrel.position import create_position

selenium = pytest.importorskip("selenium", reason="selenium is not installed: pip install -e '.[dev]'")
pytestmark = NEEDS_BROWSER
CASES = golden("founding_documents")["cases"]
WHY = """
const field = document.getElementById('offset');
return arguments[0].map((offset) => {
  field.value = offset;
  field.dispatchEvent(new Event('input'));
  return document.getElementById('why').textContent;
});
"""
WAVES = {"q": (0.1, 1.5), "k": (0.7, 1.5), "v": (1.3, 1.0)}


def outputs(browser):
    return {name: numbers(values) for name, *values in table(browser, "output")}


def test_the_five_tokens_as_the_page_opens(browser, explorer):
    expected = CASES["five_tokens_log_decay"]["expected"]
    plain = CASES["five_tokens_no_decay"]["expected"]["output_rows"]
    explorer()
    for query in range(5):
        set_value(browser, "query", str(query))
        assert numbers(cells(browser, "biased")) == pytest.approx(expected["weights"][query], abs=6e-5)
        assert outputs(browser)["biased"] == pytest.approx(expected["output"][query], abs=6e-5)
        if str(query) in plain:
            assert outputs(browser)["standard"] == pytest.approx(plain[str(query)], abs=6e-5)
        biased, standard = numbers(cells(browser, "biased")), numbers(cells(browser, "standard"))
        difference = [a - b for a, b in zip(biased, standard, strict=True)]
        assert numbers(cells(browser, "difference")) == pytest.approx(difference, abs=1.1e-4)
    row = numbers(table(browser, "steps")[0][1:])  # the last query, its first key
    assert row[:4] == pytest.approx([4, 1, 0.5, -0.3 * math.log(5)], abs=6e-5)
    assert row[4] == pytest.approx(0.5 - 0.3 * math.log(5), abs=6e-5)
    assert row[6] == pytest.approx(expected["weights"][4][0], abs=6e-5)


def wave(name, n):
    phase, amplitude = WAVES[name]
    values = [round(amplitude * math.sin(0.37 * (m + 1) ** 2 + phase), 4) for m in range(4 * n)]
    return torch.tensor(values, dtype=torch.float64).view(1, 1, n, 4)


def position(decay, strength, grid):
    if decay == "log":
        return create_position("log_decay", grid, 1, 4, decay=strength, dtype=torch.float64)
    encoding = create_position("alibi", grid, 1, 4, learnable=True, dtype=torch.float64)
    torch.nn.init.constant_(encoding.slopes, strength)
    return encoding


@pytest.mark.parametrize(
    ("h", "w", "decay", "strength", "query"),
    [(3, 4, "linear", 0.45, 11), (5, 2, "log", 2.5, 3)],
)
def test_other_grids_as_vitrel_computes_them(browser, explorer, h, w, decay, strength, query):
    grid = Grid(h, w)
    terms = position(decay, strength, grid)(grid)
    bias = terms.tables[0].bias[0][grid.index()].double()  # [N, N]
    q, k, v = (wave(name, h * w) for name in "qkv")
    output = attention(q, k, v, terms, grid, backend="reference")[0, 0, query]
    weights = torch.softmax(q[0, 0] @ k[0, 0].mT / 2 + bias, -1)[query]
    explorer(h=h, w=w, decay=decay, query=query, **{"lambda": strength})
    made = browser.execute_script(
        "const {h, w, decay, lambda} = state;"
        "return tokens(h * w, i => tokens(h * w, j => biasAt(offsetOf(i, j, w), decay, lambda)))"
    )
    torch.testing.assert_close(torch.tensor(made, dtype=torch.float64), bias, atol=2e-7, rtol=0)
    labels = "return [...document.querySelectorAll('#bias-cells [role=gridcell]')].map(c => c.ariaLabel.split(': bias ')[1])"
    assert numbers(browser.execute_script(labels)) == pytest.approx(bias.flatten().tolist(), abs=6e-5)
    shown = [text for text in cells(browser, "bias") if text]
    assert len(shown) == (h * w) ** 2 and numbers(shown) == pytest.approx(bias.flatten().tolist(), abs=6e-3)
    assert numbers(cells(browser, "biased")) == pytest.approx(weights.tolist(), abs=6e-5)
    assert outputs(browser)["biased"] == pytest.approx(output.tolist(), abs=6e-5)
    vectors = [[json.loads(part.replace("−", "-")) for part in row[1:]] for row in table(browser, "vectors")]
    assert vectors == [[part[0, 0, token].tolist() for part in (q, k, v)] for token in range(h * w)]


def runs(browser):
    """Offset -> bucket as the strip shows it."""
    script = "return [...document.querySelectorAll('#strip [data-bucket]')].map(r => Object.values(r.dataset).map(Number))"
    return {o: bucket for bucket, first, last in browser.execute_script(script) for o in range(first, last + 1)}


def test_the_golden_buckets(browser, explorer):
    expected = CASES["t5_buckets"]["expected"]
    exact, last = expected["exact_up_to"], expected["last"]
    explorer()
    strip = runs(browser)
    assert sorted(strip) == list(range(min(strip), max(strip) + 1)) and min(strip) < -128 and max(strip) > 128
    ranges = [[d, d, d] for d in range(exact + 1)] + expected["ranges"] + [[last["from"], max(strip), last["bucket"]]]
    golden_buckets = {d: bucket for low, high, bucket in ranges for d in range(low, high + 1)}
    golden_buckets |= {-d: bucket + expected["negative_adds"] for d, bucket in golden_buckets.items() if d}
    assert strip == golden_buckets
    rows = table(browser, "list")
    texts = [f"{low} to {high}" if high > low else str(low) for low, high, _ in ranges[:-1]] + [f"{last['from']} and more"]
    assert [row[0] for row in rows] == texts
    assert [row[1:] for row in rows[:2]] == [["0", "unused", "exact"], ["1", "17", "exact"]]
    assert rows[-1][1:] == ["15", "31", "logarithmic"] and [row[3] for row in rows].count("exact") == exact + 1
    edges = "return [...document.querySelectorAll('#strip [data-edge]')].map(e => Number(e.dataset.edge))"
    assert browser.execute_script(edges) == [exact + 0.5, -exact - 0.5]


@pytest.mark.parametrize(
    ("buckets", "reach", "both"),
    # a rounded logarithm is wrong for 14 to 243, a rounded power for 18 to 128; for 32 to 8 all boundaries of the logarithmic
    # part are the same
    [(14, 243, True), (18, 128, True), (32, 8, True), (2, 7, False)],
)
def test_buckets_as_vitrel_counts_them(browser, explorer, buckets, reach, both):
    explorer(buckets=buckets, max=reach, both=str(both).lower(), rows=4, columns=5)
    grid = Grid(4, 5)
    encoding = create_position("t5", grid, 1, 4, num_buckets=buckets, max_distance=reach, bidirectional=both)
    strip = runs(browser)
    far = max(strip)
    assert min(strip) == -far and far > reach
    line = Grid(1, far + 1)
    expected = dict(zip(line.offsets("w").tolist(), encoding.bucket("w", line).tolist(), strict=True))
    assert strip == expected
    pairs = encoding.bucket("h", grid)[:, None] * buckets + encoding.bucket("w", grid)
    assert numbers(cells(browser, "lattice")) == pairs.flatten().tolist()
    for text, bucket, *_ in table(browser, "list"):
        held = [offset for offset, at in expected.items() if at == int(bucket) and offset >= 0]
        if text == "no distance":
            assert not held
        elif text.endswith(" and more"):
            assert held == list(range(int(text.split()[0]), far + 1))
        else:
            assert [held[0], held[-1]] == [int(part) for part in (text.split(" to ") * 2)[:2]]
    offsets = (0, 1, reach - 1, reach, far, -1, -reach)
    for offset, said in zip(offsets, browser.execute_script(WHY, offsets), strict=True):
        assert said.startswith(f"Offset {offset:+}:".replace("-", "−").replace("+0", "0"))
        assert int(re.findall(r"bucket[,:]? (\d+)", said, re.I)[-1]) == expected[offset], said


def test_why_a_distance_falls_into_its_bucket(browser, explorer):
    explorer()
    said = browser.execute_script(LIVE, "why")
    assert said.startswith("Offset −20: the key is 20 to the right or below. Distance 20 is not below 8: ")
    assert "8 + ⌊ln(20/8) / ln(128/8) · 8⌋ = 8 + ⌊2.6439⌋ = 10. Bucket 10 holds 16 to 22." in said
    assert said.endswith("The offset is negative, which adds 16: bucket 26.")
    set_value(browser, "offset", "5")
    assert "Distance 5 is below 8, so it has a bucket of its own: bucket 5." in browser.execute_script(LIVE, "why")
    set_value(browser, "offset", "130")
    assert "⌊8.0447⌋, but no more than the last bucket, 15, which holds 91 and more." in browser.execute_script(LIVE, "why")
    explorer(buckets=10, max=78, offset=23)  # 1.99998, which four digits would show as 2
    assert "⌊1.999978⌋ = 3. Bucket 3 holds" in browser.execute_script(LIVE, "why")
    explorer(buckets=64, max=3)
    assert browser.execute_script("return [state.max, document.getElementById('max').min]") == [16, "16"]
