"""The tables and the page of a report, made of rows; what a browser makes of it is in tests/browser."""

import re

import numpy as np
import pytest

from helpers.rows import row, rows_of
from vitrel.common.tables import markdown
from vitrel.evaluate.pictures import Picture, Section
from vitrel.evaluate.plots import against_cost
from vitrel.evaluate.report import class_tables, costs, first_screen, other_grids, resampled_text, write
from vitrel.evaluate.statistics import wilson
from vitrel.evaluate.verdicts import judge

FOUR = {"swin": (90, 89.9, 90.1), "shaw": (80, 79.9, 80.1), "rope_mixed": (79, 60, 50), "absolute": (78, 70, 60)}


def test_the_first_screen_is_one_table_and_a_sentence_a_model():
    text = first_screen(judge(rows_of(FOUR)))
    assert text.startswith("Top-1 in percent, ± half its 95 % interval; scale protocol, 10,000 images, one seed:\n\n| model ")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 6 and [len(line) for line in lines] == [len(lines[0])] * 6
    assert "**90.0** ±0.6 trained" in lines[2] and "**" not in "".join(lines[3:])  # only the better one is bold
    assert "79.9 ±0.8 safe" in lines[3] and "60.0 ±1.0 loses" in lines[4]
    assert len([line for line in text.splitlines() if line.startswith("- ")]) == 4
    assert "shown to lose" not in text  # the legend is in table.md and on the page


def test_nothing_is_bold_within_the_noise():
    assert "**" not in first_screen(judge(rows_of(FOUR, n=20)))


def test_other_protocols_policies_and_moved_content_have_a_table_each():
    rows = [*rows_of({"a": (90, 80)}), *rows_of({"a": (90, 70)}, protocol="canvas"), row("96x96", 79.0, "clip", label="a")]
    rows += [row(top1=70.0, label="a", translation=by) for by in (8, 16)]
    grids = other_grids(judge(rows))
    assert [*grids] == [
        "Top-1 under every policy, scale protocol",
        "Top-1, canvas protocol",
        "Top-1 with the content moved down and right",
    ]
    moved = grids["Top-1 with the content moved down and right"]
    assert moved.columns == ["8 px", "16 px"] and [name for name, _ in moved.lines] == ["a at 64 px"]
    policies = grids["Top-1 under every policy, scale protocol"]
    assert policies.columns == ["96 px"] and [name for name, _ in policies.lines] == ["a, clip", "a, none"]


def test_costs_stand_once_for_protocols_that_cost_the_same():
    rows = rows_of({"a": (90, 80)}, resampled="table bicubic", resampled_values=2700, infer_samples_per_sec=None)
    rows += [one | {"protocol": name, "gflops": one["gflops"] * by, "key": f"{name}{at}"}
             for name, by in (("canvas", 1), ("sliding", 4)) for at, one in enumerate(rows)]  # fmt: skip
    head, lines = costs(judge(rows))
    assert head == ["model", "size", "protocol", "tokens", "GFLOPs", "unseen offsets, %", "values resampled"]
    assert lines[0] == ["a", "64 px", "scale, canvas", "64", "0.041", "0", "2,700 of 0.45 million (table bicubic)"]
    assert len(lines) == 4 and lines[1][2] == "sliding"
    assert resampled_text(row()) == "none" and resampled_text(row(resampled="table clip")) == "none (table clip)"


def test_classes_have_intervals():
    rows = rows_of({"a": (80, 60)}, seed=0) + rows_of({"a": (80, 60)}, seed=1)
    counts = {one["key"]: (np.array([10, 0]), np.array([8 - 2 * (one["img_size"] != "64x64"), 0])) for one in rows}
    head, lines = class_tables(judge(rows), counts, ["cat", "dog"])["a"]
    assert head == ["class", "64 px", "96 px"]
    low, high = wilson(0.8, 10)
    assert lines[0] == ["cat", f"80 ({low:.0f}–{high:.0f})", f"60 ({wilson(0.6, 10)[0]:.0f}–{wilson(0.6, 10)[1]:.0f})"]
    assert lines[1] == ["dog", "", ""]  # no image
    images, right = np.full(30, 10), np.full(30, 9)
    images[[7, 8]], right[[7, 8]] = (1, 1000), (1, 900)  # of the losses the shares count, not the ends of intervals
    less = right.copy()
    less[[8, 20]] = 500, 3
    many = {one["key"]: (images, right if one["img_size"] == "64x64" else less) for one in rows}
    _, some = class_tables(judge(rows), many, [f"c{at}" for at in range(30)])["a"]
    assert len(some) == 12 and [line[0] for line in some[:2]] == ["c20", "c8"]  # those that lose most


def test_pixels_of_a_class_vary_over_images():
    """Twenty images that are all alike tell as much as one that are not: intervals are not those of pixels."""
    rows = rows_of({"a": (80, 80)})
    whole, alike = np.full((20, 1), 1000), np.full((20, 1), 800)
    apart = np.where(np.arange(20)[:, None] % 5 == 0, 0, 1000)
    texts = [class_tables(judge(rows), {one["key"]: (whole, right) for one in rows}, ["sky"])["a"][1][0][1]
             for right in (alike, apart)]  # fmt: skip
    ends = [[int(end) for end in re.findall(r"\d+", text)] for text in texts]
    assert ends[0][0] == ends[1][0] == 80 and ends[1][2] - ends[1][1] > 1.3 * (ends[0][2] - ends[0][1]) > 5


@pytest.mark.slow
def test_the_page_has_each_thing_once_and_no_script(tmp_path):
    rows = rows_of(FOUR) + rows_of(FOUR, protocol="canvas")
    picture = Picture("data:image/webp;base64,AAAA", 10, 10, "the image at 64 px", "64 px")
    pictures = [Section("Inputs", "One image.", {"all": {"scale": [picture, None]}}, {"sky": "rgb(1, 2, 3)"})]
    settings = {"same": {"device": "cpu", "images": "a" * 64}, "models": {"swin|0": {"mean": [0.5]}}, "n": 100}
    settings |= {"title": "Four <models>", "data": "folder", "unused": 0, "command": ["vitrel evaluate a"], "classes": ["cat"]}
    page = write(tmp_path, judge(rows), {}, settings, pictures).read_text("utf-8")
    assert "<script" not in page and "Four &lt;models&gt;" in page and "http" not in page.replace("http://www.w3.org", "")
    assert page.count("<strong>Bold</strong>") == page.count("Use swin at any size") == 1
    assert page.count('<table class="grid">') == 2  # a protocol each
    assert page.count('<span class="value best">') == 3
    for text in ("vitrel evaluate a", "aaaaaaaaaaaa", "device: cpu", "the image at 64 px", "rgb(1, 2, 3)", "<svg"):
        assert text in page
    table = (tmp_path / "table.md").read_text("utf-8")
    assert table.startswith("# Four <models>\n") and first_screen(judge(rows)).rstrip() in table
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"accuracy_scale.png", "accuracy_canvas.png", "cost.png"}
    (legend,) = against_cost(judge(rows)).legends
    assert {text.get_text() for text in legend.get_texts()} == {*FOUR}


def test_tables_align_numbers_and_escape():
    lines = markdown(["name", "value"], [["a|b", "1,234"], ["c", "-"]]).splitlines()
    assert lines == ["| name | value |", "| ---- | ----: |", "| a\\|b | 1,234 |", "| c    |     - |"]
