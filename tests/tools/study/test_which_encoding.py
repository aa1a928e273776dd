"""The tables of docs/encodings/index.md and docs/studies/scenes.md: what they are made of, and that they are up to date."""

import functools
from pathlib import Path

import pandas as pd
import pytest

from helpers import ROOT
from tools.study import which_encoding
from tools.study.pages import fill
from tools.study.results import read_rows
from tools.study.which_encoding import cost_table, evidence_table, read_costs
from vitrel import POSITIONS
from vitrel.evaluate.verdicts import aggregate


@pytest.fixture(scope="module", autouse=True)
def aggregated_once():
    """The study has thousands of rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(which_encoding, "read_rows", lambda path: path)
        patch.setattr(which_encoding, "aggregate", functools.cache(lambda path: aggregate(read_rows(path))))
        yield


def cells(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {first.strip("`"): rest for first, *rest in lines}


@pytest.mark.slow
def test_the_pages_are_what_the_results_give():
    for page, tables in which_encoding.pages().items():
        text = (ROOT / page).read_text("utf-8")
        assert fill(text, tables) == text


@pytest.mark.slow
def test_costs_of_the_encodings_themselves():
    rows = [{"key": "table", "mode": "forward", "img_size": 224, "ratio": 1.234}]
    found = cells(cost_table(rows))
    assert list(found) == list(POSITIONS)
    assert found["table"] == [f"{12 * 6 * (27 * 27 + 3):,}", "a bias, H·N²", "1.23", "", ""]
    assert found["absolute"][:2] == [f"{384 * 197:,}", "nothing: added to the tokens"]
    assert found["rope_mixed"][:2] == [f"{12 * 384:,}", "rotated q and k"]
    assert found["shaw"][1] == "content scores, B·H·N²; values by offset"
    assert found["none"][:2] == ["0", "nothing"]


def test_evidence_is_the_mean_over_seeds():
    path = ROOT / "results" / "study_shapes" / "shapes" / "results.csv"
    frame = pd.read_csv(path)
    found = cells(evidence_table(path, "64x96"))
    own = frame[(frame["label"] == "rope_mixed") & (frame["img_size"] == "64x96")]
    for column, protocol in ((2, "canvas"), (3, "scale")):
        assert found["rope_mixed"][column].split(" ")[0] == f"{own[own['protocol'] == protocol]['top1'].mean():.1f}"
    first = [float(row[2].split(" ")[0]) for row in found.values()]
    assert first == sorted(first, reverse=True)
    with pytest.raises(ValueError, match="has no rows at 32x32; it has 128x128"):
        evidence_table(path, "32x32")


def test_places_are_filled_and_named():
    text = "a\n<!-- x -->\nold\n<!-- /x -->\nb"
    once = fill(text, [("x", "| new |")])
    assert once == "a\n<!-- x -->\n\n| new |\n\n<!-- /x -->\nb"
    assert fill(once, [("x", "| new |")]) == once
    with pytest.raises(ValueError, match="lacks the marks of table 'y'"):
        fill(text, [("y", "")])
    with pytest.raises(FileNotFoundError, match="--measure writes it"):
        read_costs(Path("nowhere/costs.csv"))
