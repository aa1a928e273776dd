"""The tour: the README's script that takes one model of every family through training, features, pruning, files and export."""

import re

import pytest

from helpers import ROOT

MARKED = re.compile(r"<!-- tour -->\n```python\n(.*?)```\n<!-- /tour -->", re.DOTALL)


def tour():
    """The block between the README's markers."""
    return MARKED.search((ROOT / "README.md").read_text()).group(1)


@pytest.mark.slow
def test_the_tour_runs():
    """It asserts as it goes: equal logits after the folder and the exported program, and the shapes of every feature."""
    exec(compile(tour(), "the tour", "exec"), {})


def test_the_tour_is_short_and_names_every_family():
    text = tour()
    assert text.count("\n") <= 40
    for name in ("vit_n8_absolute", "vit_n8_table", "vit_n8_rope_mixed", "swin_n", "swinv2_n"):
        assert f'"{name}"' in text
    assert "96, 96" in text and "224, 320" in text
    assert re.findall(r"vitrel\.\w+", text) == []  # importing it is all: the rest is timm's and torch's own
