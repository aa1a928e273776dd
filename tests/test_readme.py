"""README: the numbers in its comments are true, its pictures and links exist. tests/docs runs its code."""

import re

import pytest
import timm

import vitrel
from helpers import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def test_numbers_in_comments():
    vit = timm.create_model("vitrel_vit_s16_table", device="meta")
    assert vit.resampled((384, 384)) == {"table geometric": 52488} and "52488" in README
    assert vit.unseen((384, 384)) == pytest.approx(0.67, abs=0.005) and "0.67" in README


def test_every_encoding_is_in_the_table():
    table = README.split("## Encodings")[1].split("\n## ")[0]
    for key in vitrel.POSITIONS:
        assert f"`{key}`" in table, key
    assert f"{len(vitrel.POSITIONS) - 1} position encodings" in re.sub(r"\s+", " ", README)  # without `none`


def test_its_pictures_and_links_exist():
    targets = re.findall(r"""(?:\]\(|src=")(?!http)([^)"#]+)(#[^)"]+)?[)"]""", README)
    assert len(targets) > 20
    for target, anchor in targets:
        assert (ROOT / target).exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", (ROOT / target).read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor[1:] in slugs, f"{target}{anchor}"
