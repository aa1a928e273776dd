"""docs/founding_documents.md holds vitrel's own trace of the five tokens, and is not made from a wrong one."""

import copy
import json
import re

import pytest

from helpers import golden, script

founding = script("tests/golden/founding_documents.py")
DOCUMENTS = golden("founding_documents")
EXPECTED = DOCUMENTS["cases"]["five_tokens_log_decay"]["expected"]


def test_the_trace_on_the_page_has_the_golden_numbers():
    text = founding.PAGE.read_text()
    assert founding.trace(DOCUMENTS) in text, "run tests/golden/make.py"
    blocks = re.findall(r"\nquery .*(?:\n  .*)+", text)
    assert len(blocks) == len(EXPECTED["weights"]) == 5
    for block, weights, output in zip(blocks, EXPECTED["weights"], EXPECTED["output"], strict=True):
        rows = [line.split() for line in block.split("\n") if "(0, " in line]
        assert [row[-2] for row in rows] == [f"{weight:.4f}" for weight in weights]
        assert "output" + " " * 12 + "  ".join(f"{value:.4f}" for value in output) in block


@pytest.mark.parametrize(
    ("case", "path"),
    [
        ("five_tokens_log_decay", ("weights", 3, 1)),
        ("five_tokens_log_decay", ("output", 0, 2)),
        ("five_tokens_no_decay", ("output_rows", "4", 0)),
    ],
)
def test_a_trace_that_differs_is_refused(case, path):
    changed = copy.deepcopy(DOCUMENTS)
    *outer, last = path
    values = changed["cases"][case]["expected"]
    for step in outer:
        values = values[step]
    values[last] += 2e-4
    with pytest.raises(ValueError, match=r"vitrel.explain differs from the stored numbers of the five tokens in"):
        founding.trace(changed)


def test_the_page_leads_to_every_example():
    """Each example stands in the table of contents with a link to its heading."""
    text = founding.PAGE.read_text()
    headings = set(re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
    assert founding.ABOUT.keys() == DOCUMENTS["cases"].keys()
    contents = text.split("<!-- contents -->")[1].split("<!-- /contents -->")[0]
    assert all(f"| {founding.link(name)} |" in contents for name in DOCUMENTS["cases"])
    assert json.dumps(DOCUMENTS["cases"]["five_tokens_log_decay"]["inputs"]["tokens"]) in text
