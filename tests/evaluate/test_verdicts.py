"""Verdicts: each rule on rows made for it, and every number as before on published and on simulated rows."""

import json
import math

import numpy as np
import pytest

from helpers import ROOT, each
from helpers.rows import published, row, rows_of, with_scores
from vitrel.evaluate.verdicts import aggregate, contrast, judge, sample_of, with_retention

BEFORE = json.loads((ROOT / "tests/evaluate/judged_before.json").read_text())


def verdicts(rows, **how):
    return {(one["img_size"], one["policy"]): one["verdict"] for one in judge(rows, **how).rows}


def simulated():
    """Three models of two or three seeds at four sizes, under policies, in two protocols."""
    rng, n, rows, masks = np.random.default_rng(7), 400, [], []
    hard = rng.normal(size=n)
    sizes = {"64x64": ["none"], "96x96": ["geometric", "clip"], "128x128": ["geometric", "clip"], "64x96": ["none"]}
    for number, label in enumerate("abc"):
        for seed in range(3 if label != "c" else 2):
            for size, policy in ((size, policy) for size, policies in sizes.items() for policy in policies):
                for protocol in ("scale", "canvas"):
                    level = 1.0 - 0.25 * number - 0.008 * (int(size.split("x")[0]) - 64) * (policy != "clip")
                    masks.append(hard + 0.03 * rng.normal() + 0.3 * rng.normal(size=n) < level)
                    rows.append(row(size, policy=policy, label=label, seed=seed, protocol=protocol))
    return with_scores(rows, masks)


@each("name", ["shapes_classified", "simulated"])
def test_every_number_is_as_it_was(name):
    """Intervals, differences and verdicts that an earlier implementation found for the same rows."""
    rows, scores = simulated() if name == "simulated" else (published(ROOT / "results" / name / "results.csv"), {})
    expected = BEFORE[name]
    found = judge(rows, scores).rows
    assert len(found) == len(expected["judged"])
    for one, before in zip(found, expected["judged"], strict=True):
        for column, value in zip(BEFORE["columns"], before, strict=True):
            now = None if one[column] != one[column] else one[column]
            assert now == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value), (one["key"], column)


def test_safe_is_shown_loses_is_shown_and_the_rest_is_unknown():
    judged = judge([row(n=4000), row("96x96", 89.9, n=4000), row("128x128", 89.2, n=4000), row("192x192", 70.0, n=4000)])
    assert [one["verdict"] for one in judged.rows] == ["", "safe", "cannot tell", "loses"]
    by_size = {one["img_size"]: one for one in judged.rows}
    assert math.isnan(by_size["64x64"]["difference"]) and by_size["96x96"]["difference"] == pytest.approx(-0.1)
    for one in judged.rows[1:]:
        low, high = one["difference_low"], one["difference_high"]
        expected = "safe" if low > -2 else "loses" if high < 0 else "cannot tell"
        assert one["verdict"] == expected and low < one["difference"] < high


def test_the_margin_decides_what_is_safe():
    rows = [row(), row("96x96", 88.0)]
    assert verdicts(rows)["96x96", "none"] == "loses" and verdicts(rows, margin=5)["96x96", "none"] == "safe"
    assert verdicts([row(n=100), row("96x96", 90.5, n=100)])["96x96", "none"] == "cannot tell"  # few images are no safety
    with pytest.raises(ValueError, match="must be above 0, got 0"):
        judge(rows, margin=0)
    with pytest.raises(ValueError, match="no rows to judge"):
        judge([])


@pytest.mark.slow
def test_fifteen_sizes_of_a_model_that_loses_nowhere():
    """The family of all sizes: "loses" at any size in at most 5 % of evaluations, and "safe" where 2 points are lost."""
    rng, n = np.random.default_rng(0), 300
    sizes = ["64x64", *(f"{side}x{side}" for side in range(72, 192, 8))]
    rows, alarms, wrong = [row(size) for size in sizes], 0, 0
    for _ in range(40):
        hard = rng.normal(size=n)
        for level, kind in ((0.0, "loses"), (0.16, "safe")):
            shift = np.where(np.arange(16) == 0, 0.0, level)[:, None]  # 0.16 of the noise are about 3 points
            made, scores = with_scores(rows, hard + shift + 0.5 * rng.normal(size=(16, n)) < 1.0)
            judged = judge(made, scores)
            alarms += kind == "loses" and any(one["verdict"] == "loses" or one["gains"] for one in judged.rows)
            wrong += kind == "safe" and "safe" in [one["verdict"] for one in judged.rows]
    assert alarms <= 0.1 * 40 and wrong <= 0.05 * 40  # "loses" and gains are at 2.5 % each


@pytest.mark.slow
def test_equal_models_are_seldom_told_apart():
    """Four equal models at six sizes: a family of 36 comparisons."""
    rng, names, sizes = np.random.default_rng(1), "abcd", ["64x64", *(f"{side}x{side}" for side in (48, 80, 96, 112, 128))]
    rows = [row(size, label=label) for label in names for size in sizes]
    claimed = 0
    for _ in range(40):
        made, scores = with_scores(rows, rng.normal(size=200) + 0.5 * rng.normal(size=(24, 200)) < 1.0)
        claimed += any(model.behind or model.ahead for model in judge(made, scores).models.values())
    assert claimed <= 2


def test_a_size_is_judged_under_its_first_policy_and_one_that_is_shown_better_is_named():
    rows = [row(), *(row("128x128", top1, name) for name, top1 in (("geometric", 70.0), ("clip", 70.5), ("bicubic", 89.9)))]
    judged = judge(rows)
    assert [one["policy"] for one in judged.rows if one["used"]] == ["geometric", "none"]
    assert {size: one["policy"] for size, one in judged.models["m"].better.items()} == {"128x128": "bicubic"}
    assert judge(rows[:3]).models["m"].better == {}  # clip is half a point ahead: not shown


def test_models_are_compared_at_every_size():
    judged = judge(rows_of({"a": (90.0, 90.0, 80.0), "b": (90.1, 80.0, 90.0), "c": (50.0, 50.0, 50.0)}))
    a, b, c = judged.models.values()
    assert a.ahead == {"96x96": pytest.approx(10)} and a.behind == {"128x128": ("b", pytest.approx(10))}
    assert a.level == b.level == ["64x64"] and a.others == ["b", "c"]
    assert c.behind == {"64x64": ("b", pytest.approx(40.1)), "96x96": ("a", 40.0), "128x128": ("b", 40.0)}
    labels = [f"m{index}" for index in range(8)]
    equal = judge(rows_of(dict.fromkeys(labels, (90, 90, 90)) | {"low": (50, 50, 50)})).models["low"]
    assert {other for other, _ in equal.behind.values()} == {"m0"}  # of equal ones the first, whatever their order in a set


def test_a_common_seed_of_several_says_nothing_about_models_trained_in_this_way():
    rows = [row(top1=90.0 + seed, seed=seed) for seed in range(3)] + [row(label="n", top1=50.0)]
    assert not any(model.others for model in judge(rows).models.values())


def test_a_size_that_is_better_than_the_training_size_is_a_gain():
    judged = judge(rows_of({"m": (80.0, 85.0, 80.1)}))
    assert [one["img_size"] for one in judged.rows if one["gains"]] == ["96x96"]


def test_another_protocol_counts_where_it_costs_the_same():
    rows = rows_of({"m": (90.0, 60.0)}, ("64x64", "48x48")) + rows_of(
        {"m": (90.0, 80.0)}, ("64x64", "48x48"), protocol="canvas"
    )
    [(size, better)] = judge(rows).models["m"].better.items()
    assert (size, better["protocol"], better["top1"]) == ("48x48", "canvas", 80.0)
    rows[-1]["gflops"] *= 4
    assert judge(rows).models["m"].better == {}


def test_the_first_protocol_with_a_training_size_is_that_of_the_sentences():
    of = {"protocol": "native", "train_size": "196t"}
    native = [row("224x224", 90, budget=196, **of), row("256x256", 80, budget=256, **of)]
    scale = [row("224x224", 85, train_size="196t"), row("256x256", 84, train_size="196t")]
    model = judge(scale + native).models["m"]
    assert model.protocol == "native" and [one["verdict"] for one in model.used.values()] == ["", "loses"]
    assert judge(scale).models["m"].protocol == "scale" and {one["verdict"] for one in judge(scale).rows} == {""}


def test_of_several_training_sizes_the_nearest_is_the_reference():
    rows = rows_of({"m": (90.0, 80.0, 79.9)}, train_size="64x64 96x96")
    assert [one["verdict"] for one in judge(rows).rows] == ["", "", "safe"]  # as good as at 96 px
    assert [one["retention"] for one in with_retention(rows)] == [1.0, 1.0, pytest.approx(79.9 / 80, abs=1e-4)]
    assert with_retention([row(top1=90), row(top1=80, translation=4)])[1]["retention"] == 1.0  # by a row as far moved


def test_budgets_and_moved_content_have_names_of_their_own():
    budgets = [row("224x224", protocol="native", budget=budget, train_size="196t") for budget in (196, 200)]
    assert [one["protocol"] for one in aggregate(budgets)] == ["native, 196 tokens", "native, 200 tokens"]
    moved = [row(), row("96x96"), row(top1=70.0, translation=8), row(top1=60.0, translation=16)]
    judged = judge(moved)
    assert len(judged.rows) == 2 and [one["translation"] for one in judged.moved] == [8, 16]


def test_rows_over_seeds_have_the_mean_and_an_interval_over_seeds_and_images():
    one, three = aggregate([row(n=100)])[0], aggregate([row(top1=90 + seed, seed=seed, n=100) for seed in (-1, 0, 1)])[0]
    assert three["top1"] == 90.0 and three["seeds"] == 3 and len(three["keys"]) == 3 and three["label"] == "m"
    assert three["low"] < one["low"] < 90 < one["high"] < three["high"]  # the seeds may have the images' errors in common


def test_samples_are_paired_by_seed():
    rows = [row(top1=80.0 + seed, seed=seed) for seed in (0, 1)]
    assert sample_of(rows).means == {"0": 80.0, "1": 81.0}
    assert contrast([sample_of(rows)], [sample_of(rows[1:])]).mean == 0.0  # over the seed that both have
    with pytest.raises(ValueError, match="no seed in common between m at 64x64"):
        contrast([sample_of(rows)], [sample_of([row(seed=5)])])
