"""The README's Python runs as it stands there, and the numbers in its comments are true."""

import re

import pytest
import timm
import torch

from helpers import ROOT
from vitrel import POSITIONS

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.slow
def test_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where they write their files
    names = {"torch": torch}
    try:
        for block in BLOCKS:
            exec(block, {} if "local-dir:" in block else names)  # the tour stands alone, and asserts as it goes
    finally:
        POSITIONS.pop("linear_decay", None)  # which the last example adds
    vit = timm.create_model("vitrel_vit_s16_table", device="meta")
    assert vit.resized((384, 384)) == {"table geometric": 52488}
    assert vit.unseen((384, 384)) == pytest.approx(0.67, abs=0.005)
    assert vit.resize_policies == ("geometric", "clip", "bicubic")


def test_its_pictures_and_links_exist():
    for target in re.findall(r"""(?:\]\(|src=")(?!http)([^)"#]+)[)"]""", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
