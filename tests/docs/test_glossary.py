"""The glossary holds each word once, and what it leaves to generated pages is explained there."""

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from vitrel.evaluate.results import table
from vitrel.position import POSITIONS, PositionEncoding
from vitrel.position.terms import Composition

GLOSSARY = (Path(__file__).parents[2] / "docs" / "concepts" / "glossary.md").read_text("utf-8")


def words():
    """The words of the table, one for each row or several joined by commas."""
    rows = [line.split("|")[1].strip() for line in GLOSSARY.splitlines() if line.startswith("| ")]
    return [word for row in rows if row != "word" for word in row.split(", ")]


def test_each_word_stands_once():
    found = Counter(words())
    assert len(found) > 20 and [word for word, times in found.items() if times > 1] == []
    assert "policy" in found and "resampled" in found


@pytest.mark.parametrize("key", POSITIONS)
def test_every_option_of_an_encoding_is_explained(key):
    """In the docstring, of which the encoding's page is made."""
    parameters = inspect.signature(POSITIONS[key]).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("device", "dtype")]
    explained = f"{inspect.getdoc(POSITIONS[key])}\n{inspect.getdoc(PositionEncoding)}"
    assert [name for name in options if not re.search(rf"^\s*{name}: \S", explained, re.M)] == []


def test_every_column_is_explained_in_words_of_today():
    for name, text in table.COLUMNS.items():
        assert len(text.split()) > 1 or name in text, name
        assert not re.search(r"\b(rules?|scaling|resize policy)\b", f"{name} {text}"), name


def test_policies_are_named_as_they_are():
    """Each encoding's policies stand on the page about sizes, and no composition has policies of its own."""
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "new_size.md").read_text("utf-8")
    names = {policy for encoding in POSITIONS.values() for policy in encoding.policies}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == [] and Composition.policies == ()
