"""The study on photographs: a slice of the whole grid, and that its pages are its results."""

import functools
import math
import re

import pandas as pd
import pytest

from helpers import ROOT
from tools.study import photographs as tool
from tools.study.pages import fill
from tools.study.photographs import headline, kept_beside


def test_the_page_is_what_the_results_give(monkeypatch):
    for name in ("read_rows", "_table"):  # of the same folders each time
        monkeypatch.setattr(tool, name, functools.cache(getattr(tool, name)))
    for page, tables in tool.pages().items():
        text = (ROOT / page).read_text("utf-8")
        assert fill(text, tables) == text


ROWS = ROOT / "results" / "study"
SHOWN = {("absolute", "bicubic"): "interpolated", ("rope_mixed", "none"): "turned"}


def test_figures_of_the_tables_are_those_of_the_rows():
    """Taken from the rows by pandas alone."""
    frame = pd.read_csv(ROWS / "flowers256" / "results.csv")
    frame = frame[frame["protocol"] == "scale"].set_index(["label", "seed", "img_size"])["top1"]
    means = {label: frame.loc[label, :, "128x128"].groupby("seed").first() for label in ("absolute", "rope_mixed")}
    lost = {label: means[label] - frame.loc[label, :, "64x64"] for label in means}
    place = [("128x128", "scale")]
    lines = headline(ROWS, ["flowers256"], SHOWN, [("64x64", "scale"), *place]).splitlines()
    assert "flowers256: 64 (trained)" in lines[0] and "flowers256: 128, scale" in lines[0]
    assert "interpolated | absolute bicubic" in lines[2] and "turned" in lines[3] and "nothing" in lines[3]
    for line, label in zip(lines[2:], means, strict=True):
        assert re.search(rf"\| +{means[label].mean():.1f} ±", line)
    (line,) = kept_beside(ROWS, ["flowers256"], SHOWN, place).splitlines()[2:]
    gap = lost["rope_mixed"] - lost["absolute"]
    shares = [means[label].mean() for label in means] + [(means[label] - lost[label]).mean() for label in means]
    own, images = gap.var() / 3, sum(share * (100 - share) / 540 for share in shares)  # of seeds, of independent images
    critical = (4.30265 * own + 1.95996 * images) / (own + images)  # Student's and the normal one
    mean, half = map(float, re.search(r"([+-][\d.]+) ±([\d.]+)", line).groups())
    assert mean == pytest.approx(gap.mean(), abs=0.06)
    assert half == pytest.approx(critical * math.sqrt(own + images), abs=0.15)
