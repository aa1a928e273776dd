"""Rows aggregated over seeds, and as curves."""

import numpy as np
import pytest

from helpers.predictions import classified
from vitrel.evaluate.results.aggregate import Scores, aggregate, curve_summary, curves, with_curves
from vitrel.evaluate.results.table import line_key
from vitrel.evaluate.results.text import curves_table
from vitrel.evaluate.tasks.base import ImageList

pytestmark = pytest.mark.usefixtures("brief_evaluations")


def test_one_seed_keeps_wilson_and_several_vary(rows):
    one = aggregate(rows)
    assert {row["interval"] for row in one} == {"12 images"}
    assert [row["low"] for row in one] == pytest.approx([row["top1_low"] for row in one], abs=1e-3)
    others = [dict(row, seed=seed, top1=50.0 + 30 * seed - 30, n=120_000) for row in rows for seed in range(3)]
    three = aggregate(others)
    assert len(three) == len(one) and {row["seeds"] for row in three} == {3}
    assert {row["interval"] for row in three} == {"3 seeds and 120,000 images"}
    # standard deviation 30, t 4.3027, 3 seeds: 74.5 points to either side, which Wilson's form keeps within 0 and 100
    assert all(0 < row["low"] < 15 and 85 < row["high"] < 100 for row in three)


def test_seeds_that_agree_by_chance_do_not_make_an_interval_of_nothing(rows):
    three = aggregate([dict(row, seed=seed) for row in rows for seed in range(3)])
    for several, one in zip(three, aggregate(rows), strict=True):
        assert several["low"] <= one["low"] and several["high"] >= one["high"]


def test_predictions_say_what_seeds_have_in_common(rows):
    """Seeds that err on the same images tell no more than one; seeds that err on different ones tell more."""
    same = [row | {"seed": seed, "top1": 75.0, "n": 400} for row in rows[:1] for seed in range(3)]
    hard = {"together": [np.arange(400) < 100] * 3, "apart": [np.roll(np.arange(400) < 100, 130 * seed) for seed in range(3)]}
    width = {"means": (lambda one: one["high"] - one["low"])(aggregate(same)[0])}
    for name, wrong in hard.items():
        images, labels = ImageList([str(i) for i in range(400)], ["a", "b"]), np.zeros(400, np.int32)
        made = [classified(images, labels, one) for one in wrong]
        one = aggregate(same, Scores({line_key(row): given for row, given in zip(same, made, strict=True)}))[0]
        width[name] = one["high"] - one["low"]
    assert width["apart"] < 0.7 * width["together"] and width["together"] == pytest.approx(width["means"], rel=0.02)


def test_aggregation_is_ordered_by_model_protocol_policy_and_area(rows):
    table = aggregate(rows)
    assert list(dict.fromkeys(row["label"] for row in table)) == ["vitrel_vit_n8_table", "vitrel_vit_n8_absolute"]
    place = ("vitrel_vit_n8_absolute", "bicubic", "scale")
    first = [row["img_size"] for row in table if (row["label"], row["policy"], row["protocol"]) == place]
    assert first == ["24x24", "32x48", "48x48"]


def test_every_policy_has_a_curve_with_the_sizes_at_which_it_does_not_matter(rows):
    table = aggregate(rows)
    scale = [row for row in table if row["protocol"] == "scale"]
    found = {(label, policy): {row["img_size"] for row in part} for label, policy, part in curves(scale)}
    whole = {"24x24", "32x32", "32x48", "48x48"}
    assert found == {
        ("vitrel_vit_n8_table", "bicubic"): whole,
        ("vitrel_vit_n8_table", "clip"): whole,
        ("vitrel_vit_n8_table", "geometric"): whole,
        ("vitrel_vit_n8_absolute", "bicubic"): whole,
    }


def curve(**top1):
    return [{"task": "classification", "img_size": name.strip("_"), "top1": value} for name, value in top1.items()]


def test_the_area_is_a_mean_over_octaves():
    # 50 to 70 over one octave, 70 to 80 over half of one
    found = curve_summary(curve(_32x32=50.0, _64x64=70.0, _64x128=80.0))
    assert found == {"best_size": "64x128", "top1_area": pytest.approx((60 + 75 / 2) / 1.5, abs=1e-4)}
    # sizes of one area count once, in whatever order they come
    assert curve_summary(curve(_64x128=80.0, _128x64=60.0, _64x64=50.0))["top1_area"] == pytest.approx(60.0)
    assert curve_summary(curve(_64x64=90.0, _96x96=90.0, _48x48=90.0))["best_size"] == "48x48"  # the smallest of equals
    one = curve_summary(curve(_64x64=50.0))
    assert one["best_size"] == "64x64" and one["top1_area"] != one["top1_area"]


def test_windows_have_curves_where_a_fixed_one_is_the_same(windowed):
    found = {policy: [row["policy"] for row in part] for _, policy, part in curves(aggregate(windowed))}
    assert {policy: sorted(names) for policy, names in found.items()} == {
        "fixed": ["fixed", "fixed", "none"],
        "divisor+keep": ["divisor+keep", "fixed", "none"],
        "rescale+keep": ["none", "rescale+keep", "rescale+keep"],
        "rescale+renormalize": ["fixed", "none", "rescale+renormalize"],
    }


def test_rows_have_the_best_size_and_area_of_their_own_curve(windowed):
    found = with_curves(windowed)
    by_policy = {(row["img_size"], row["policy"]): row for row in found}
    assert by_policy["32x32", "none"]["best_size"] == ""  # belongs to all
    alone = with_curves([row for row in found if row["policy"] in ("none", "fixed")])
    assert {row["best_size"] for row in alone} == {"32x32"}  # of one curve
    assert by_policy["40x40", "rescale+keep"]["best_size"] == "40x40" == by_policy["64x64", "rescale+keep"]["best_size"]
    assert by_policy["40x40", "fixed"]["top1_area"] == 0
    table = aggregate(found)
    text = curves_table(table)
    assert "mean top-1 over log2 size" in text and text.count("rescale+keep") == 1


def test_a_policy_beside_the_model_as_it_is_has_a_curve_of_its_own(rows):
    at = {"32x32": ["none"], "48x48": ["none", "log_n"], "24x24": ["none", "log_n"]}
    both = [dict(rows[0], img_size=size, policy=policy) for size in at for policy in at[size]]
    found = {policy: [(row["img_size"], row["policy"]) for row in part] for _, policy, part in curves(both)}
    assert found["none"] == [(size, "none") for size in at]
    assert found["log_n"] == [("32x32", "none"), ("48x48", "log_n"), ("24x24", "log_n")]
