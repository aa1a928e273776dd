"""explorer.html in a real browser: the 2×2 grid, clipping and the line-by-line calculation, against vitrel's numbers."""

import re

import pytest
import torch

from helpers import golden
from helpers.explorer_page import LIVE, NEEDS_BROWSER, cells, numbers, press, set_value, table
from vitrel import create_position, explain
from vitrel.grid import Grid

selenium = pytest.importorskip("selenium", reason="selenium is not installed: pip install -e '.[dev]'")
pytestmark = NEEDS_BROWSER
CASES = golden("founding_documents")["cases"]
TOKENS = ["The", "cat", "sat", "on", "mat"]
BIASES = [0.3, 0.1, 0, 0.2, 0, -0.2, 0, -0.1, -0.3]  # offsets (-1, -1), (-1, 0) ... (1, 1), query minus key


def encoding(key, grid, width, values, **options):
    made = create_position(key, grid, 1, width, dtype=torch.float64, **options)
    [parameter] = made.parameters()
    torch.nn.init.zeros_(parameter).data += torch.tensor(values, dtype=torch.float64).view_as(parameter)
    return made


def square(x, places, biases):
    """{case: [4, 4] logits} of the 2×2 grid; offsets of the biases are query minus key."""
    grid = Grid(2, 2)
    made = {
        "none": "none",
        "absolute": encoding("absolute", grid, 2, places),
        "relative": encoding("table", grid, 2, biases),
    }
    return {name: explain(x, x, x, position=position, grid=(2, 2)).biased[0].detach() for name, position in made.items()}


def shown(browser, name):
    return torch.tensor(numbers(cells(browser, name)), dtype=torch.float64).view(4, -1)


def said_targets(logits):
    """Which keys have the largest logit of each row, as the page says it."""
    rows = [(row > row.max() - 1e-9).nonzero().flatten().tolist() for row in logits]
    named = ["all alike" if len(keys) == 4 else " or ".join(map(str, keys)) for keys in rows]
    return "; ".join(f"{query} → {name}" for query, name in enumerate(named))


def compare(browser, logits):
    for name, expected in logits.items():
        torch.testing.assert_close(
            shown(browser, name), expected, atol=6e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert browser.execute_script(LIVE, f"{name}-targets") == said_targets(expected), name
        stars = browser.execute_script(
            "return [...document.querySelectorAll(`#${arguments[0]}-cells .star`)].map(c => c.dataset.at)", name
        )
        alone = (expected > expected.amax(1, keepdim=True) - 1e-9) & (expected.std(1, keepdim=True) > 1e-9)
        assert stars == [f"{i},{j}" for i, j in alone.nonzero().tolist()]


def type_into(browser, name, at, text):
    from selenium.webdriver import Keys

    field = browser.find_element("css selector", f"[data-list={name}][data-at='{at}']")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(text)
    return field


def test_three_cases_of_the_square_in_both_signs(browser, explorer):
    explorer()
    inputs = CASES["square_absolute"]["inputs"]
    logits = {
        name: torch.tensor(CASES[case]["expected"]["logits"], dtype=torch.float64)
        for name, case in (("none", "square_content"), ("absolute", "square_absolute"), ("relative", "square_relative"))
    }
    compare(browser, logits)
    set_value(browser, "sign", "key")
    compare(browser, square(inputs["x"], inputs["pos_embed"], BIASES[::-1]))  # a key-minus-query offset is the opposite one
    set_value(browser, "show", "weights")
    torch.testing.assert_close(shown(browser, "absolute"), logits["absolute"].softmax(-1), atol=6e-5, rtol=0)


def test_typed_numbers_change_what_follows_from_them(browser, explorer):
    explorer()
    x, biases = [[1, 0], [0, 1], [1, 1], [0, 0]], list(BIASES)
    field = type_into(browser, "contents", 3, "-")
    compare(browser, square(x, CASES["square_absolute"]["inputs"]["pos_embed"], biases))  # no number yet
    field.send_keys("1.25")
    type_into(browser, "contents", 0, "1.005")  # nearly alike is not alike
    x[0][0], x[1][1] = 1.005, -1.25
    type_into(browser, "biases", 2, "2.5")  # (-1, +1)
    biases[2] = 2.5
    type_into(browser, "positions", 6, "-0.75")
    places = [[0, 0], [0, 0.5], [0.5, 0], [-0.75, 0.5]]
    compare(browser, square(x, places, biases))
    set_value(browser, "sign", "key")
    compare(browser, square(x, places, biases[::-1]))
    assert browser.execute_script(LIVE, "preset-note") == "Your own numbers."
    field = type_into(browser, "contents", 0, "1234")  # held to two digits before the point
    assert browser.execute_script("return [state.contents[0], arguments[0].value]", field) == [99, "99"]
    browser.execute_script("document.querySelector('[data-preset=\"The example\"]').click()")
    inputs = CASES["square_absolute"]["inputs"]
    compare(browser, square(inputs["x"], inputs["pos_embed"], BIASES))


def test_row_by_row_in_sentences(browser, explorer):
    from selenium.webdriver import Keys

    explorer()
    relative = torch.tensor(CASES["square_relative"]["expected"]["logits"], dtype=torch.float64)
    absolute = torch.tensor(CASES["square_absolute"]["expected"]["logits"])
    said = browser.execute_script(LIVE, "row-said")
    assert said.startswith("Patch 0, top left, looks most at patch 2, below.")
    assert "0.7071 + bias 0.1 of offset (−1, 0) = 0.8071" in said and "patches 0 and 2 would be alike" in said
    browser.execute_script("document.getElementById('row-after').focus()")
    for query in (1, 2, 3, 0):
        press(browser, Keys.ENTER)
        assert f"Query {query} of" in browser.execute_script(LIVE, "row-name")
        rows = table(browser, "row-table")
        assert numbers(row[4].removesuffix(" ★") for row in rows) == pytest.approx(relative[query].tolist(), abs=6e-5)
        assert numbers(row[5] for row in rows) == pytest.approx(relative[query].softmax(-1).tolist(), abs=6e-5)
        best = relative[query].argmax().item()
        said = browser.execute_script(LIVE, "row-said")
        assert re.search(rf"looks most at (patch {best}|patches .*{best}|itself)", said)
        best = absolute[query].argmax().item()
        assert f"With absolute position its target is {'itself' if best == query else f'patch {best}, '}" in said
    assert [row[:2] for row in table(browser, "row-table")] == [
        ["0, the query itself", "(0, 0)"],
        ["1, to the right", "(0, −1)"],
        ["2, below", "(−1, 0)"],
        ["3, below and to the right", "(−1, −1)"],
    ]
    browser.execute_script("document.querySelector('#relative-cells [tabindex=\"0\"]').focus()")
    press(browser, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_LEFT)
    pair = browser.execute_script(LIVE, "pair-said")
    assert "patch 3, bottom right; patch 1, above" in pair and "(1 − 0, 1 − 1) = (+1, 0)" in pair
    assert "(0·0 + 0·1) / √2 = 0.0000" in pair and "(0.5·0 + 0.5·1.5) / √2 = 0.5303" in pair and "0 + (−0.1) = −0.1000" in pair
    assert browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    alike = "return [...document.querySelectorAll('#relative-cells .alike')].map(c => c.dataset.at)"
    assert browser.execute_script(alike) == ["2,0"] and "query 2, key 0" in pair


def test_a_content_outweighs_a_bias(browser, explorer):
    explorer()
    browser.execute_script("document.querySelector('[data-preset=\"Content against bias\"]').click()")
    biases = [0, 0, 0, -1, 0, 0, 0, 0, 0]  # a key to the right: offset (0, -1), query minus key
    logits = square([[1, 0], [3, 0], [0, 1], [0, 0]], CASES["square_absolute"]["inputs"]["pos_embed"], biases)
    compare(browser, logits)
    assert logits["relative"][0].argmax() == 1 and logits["relative"][2].argmin() == 3
    assert f"= {logits['relative'][0, 1]:.4f}" in browser.execute_script(LIVE, "preset-note")
    assert "the content outweighs it" in browser.execute_script(LIVE, "row-said")


def test_clipping(browser, explorer):
    explorer()
    inputs = CASES["clip"]["inputs"]
    n, reach = inputs["length"], inputs["reach"]
    steps = torch.arange(n)[:, None] - torch.arange(n)
    assert numbers(cells(browser, "clip-offsets")) == steps.flatten().tolist()
    assert numbers(cells(browser, "clip-limited")) == steps.clamp(-reach, reach).flatten().tolist()
    zeros = torch.zeros(n, 1)

    def bias(values, radius, length):
        made = encoding("clipped", Grid(1, length), 1, values, radius=(0, radius))
        return (
            explain(zeros[:length], zeros[:length], zeros[:length], position=made, grid=(1, length)).biased.flatten().tolist()
        )

    assert numbers(cells(browser, "clip-biases")) == pytest.approx(bias([-0.3, -0.2, 0, 0.2, 0.3], reach, n), abs=6e-3)
    said = browser.execute_script(LIVE, "clip-said")
    assert "+3 is beyond R = 2, so it counts as +2: bias 0.3" in said and "2R + 1 = 5" in said and "2L − 1 = 13" in said
    assert browser.execute_script("return document.querySelectorAll('[data-list=clipBiases]:disabled').length") == 4
    set_value(browser, "sign", "key")
    assert numbers(cells(browser, "clip-offsets")) == (-steps).flatten().tolist()
    set_value(browser, "clip-sign", "query")
    set_value(browser, "length", 6)
    set_value(browser, "radius", 1)
    type_into(browser, "clipBiases", 3, "-0.75")
    assert numbers(cells(browser, "clip-biases")) == pytest.approx(bias([-0.75, 0, 0.2], 1, 6), abs=6e-3)


def traced(inputs, position="log_decay", **options):
    """{line: matrix} of the five tokens."""
    q, k, v = (inputs[name] for name in "qkv")
    all_steps = explain(q, k, v, position=position, **options)
    distance = (torch.arange(5.0)[:, None] - torch.arange(5.0)).abs()
    return {
        "scores": all_steps.raw, "scaled": all_steps.scaled, "distance": distance, "growth": (1 + distance).log(),
        "bias": all_steps.biased - all_steps.scaled, "logits": all_steps.biased,
        "shifted": (shifted := all_steps.biased - all_steps.biased.amax(-1, keepdim=True)), "exps": shifted.exp(),
        "weights": all_steps.weights, "output": all_steps.output, "change": all_steps.weights - all_steps.weights_without,
    }  # fmt: skip


def choose(browser, line):
    browser.execute_script("document.querySelector(`[data-line=${arguments[0]}]`).click()", line)


def matrix(browser):
    return torch.tensor(numbers(cells(browser, "trace")), dtype=torch.float64).view(5, -1)


def same(browser, expected):
    torch.testing.assert_close(matrix(browser), expected.detach().double().view(5, -1), atol=6e-5, rtol=0)


def test_every_line_of_the_calculation(browser, explorer):
    inputs, expected = CASES["five_tokens_log_decay"]["inputs"], CASES["five_tokens_log_decay"]["expected"]
    explorer()
    for name in "qkv":
        choose(browser, name)
        same(browser, torch.tensor(inputs[name]))
    for name, values in traced(inputs, decay=0.3).items():
        choose(browser, name)
        same(browser, values)
    heads = "return [...document.querySelectorAll('#trace-cells [role=rowheader]')].map(e => e.textContent)"
    assert browser.execute_script(heads) == TOKENS
    for name in ("weights", "output"):
        choose(browser, name)
        same(browser, torch.tensor(expected[name]))
    choose(browser, "shifted")
    set_value(browser, "trace-query", "2")
    browser.find_element("css selector", "#trace-cells [data-at='2,4']").click()
    assert browser.execute_script(LIVE, "trace-said") == "shifted[sat, mat] = 0.4204 − 1 = −0.5796"
    assert browser.find_element("css selector", "[data-line=shifted] .value").text == "−0.5796"


def test_the_calculation_with_other_settings(browser, explorer):
    inputs = CASES["five_tokens_log_decay"]["inputs"]
    explorer(line="weights", traceLambda=1)
    exercise = CASES["lambda_exercise"]["expected"]["weights"]
    torch.testing.assert_close(matrix(browser)[0], torch.tensor(exercise, dtype=torch.float64), atol=6e-5, rtol=0)
    set_value(browser, "trace-lambda", 0.3)
    set_value(browser, "trace-decay", "linear")
    linear = CASES["linear_decay"]["expected"]["weights"]
    torch.testing.assert_close(matrix(browser)[0], torch.tensor(linear, dtype=torch.float64), atol=6e-5, rtol=0)
    set_value(browser, "reach", 2)  # a table of nine offsets can hold any bias
    set_value(browser, "later", 2)
    bias = [-0.6 * min(d, 2) for d in (4, 3, 2, 1)] + [-0.3 * min(d, 2) for d in range(5)]
    same(browser, traced(inputs, encoding("table", Grid(1, 5), 4, bias))["weights"])
    browser.execute_script("document.querySelector('#trace details').open = true")
    type_into(browser, "k", 9, "-1.5")
    changed = {**inputs, "k": [[*row[:1], -1.5, *row[2:]] if at == 2 else row for at, row in enumerate(inputs["k"])]}
    expected = traced(changed, encoding("table", Grid(1, 5), 4, bias))
    same(browser, expected["weights"])
    choose(browser, "output")
    same(browser, expected["output"])
    browser.execute_script("document.getElementById('trace-reset').click()")
    same(browser, traced(inputs, encoding("table", Grid(1, 5), 4, bias))["output"])
