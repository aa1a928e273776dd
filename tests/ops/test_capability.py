"""The capability table chooses for every call of a grid what was recorded, and every refusal has a reason."""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from helpers.choices import calls
from vitrel.ops import BACKENDS, dispatch
from vitrel.ops.capability import TABLE, WORDS, refusal
from vitrel.ops.dispatch import by_rule

RECORDED = json.loads((Path(__file__).parent / "choices.json").read_text())


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="recorded without the interpreter")
@pytest.mark.skipif("triton" in BACKENDS and not WORDS["triton-installed"](None), reason="recorded with Triton")
@pytest.mark.slow(seconds=8)
def test_choices_are_those_recorded():
    """A letter for each call: the backend of "auto" without a profile, and all that serve it, eager and in a graph."""
    letters = {text: letter for letter, text in RECORDED["choices"].items()}
    found = defaultdict(str)
    for where, _, call in calls():
        for compiled in (False, True):
            call = call._replace(compiled=compiled)
            serving = sorted(name for name in TABLE if not refusal(name, call))
            found[where] += letters.get(f"{by_rule(call)}: {' '.join(serving)}", "?")
    assert found == RECORDED["calls"]


def test_the_table_has_a_row_for_each_backend_and_words_that_exist():
    assert set(TABLE) == set(BACKENDS) == set(dispatch.BACKENDS)
    for name, row in TABLE.items():
        words = [word for condition, _ in (*row.unsupported, *row.preferred) for word in condition.split() if word != "not"]
        assert set(words) <= set(WORDS), name
    used = {word for row in TABLE.values() for text, _ in (*row.unsupported, *row.preferred) for word in text.split()}
    assert set(WORDS) <= used
