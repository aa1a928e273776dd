"""Verdicts and advice: each rule on rows made for it, and on published rows what a reader checks by hand."""

import math

import numpy as np
import pytest

from helpers import ROOT
from helpers.predictions import classified, predicted
from vitrel.evaluate.results.advice import judge, pixels
from vitrel.evaluate.results.aggregate import Scores, read_scores, sample_of
from vitrel.evaluate.results.table import columns_of, line_key, read_csv
from vitrel.evaluate.results.text import accuracy_tables, sizes_table
from vitrel.evaluate.tasks.base import ImageList

JARGON = ("bicubic", "geometric", "multiply-adds", "resampl", "offsets", "interval", "significan")


def row(size="64x64", top1=90.0, policy="none", label="m", **given):
    columns = {
        "task": "classification", "model": label, "label": label, "seed": 0, "img_size": size, "train_size": "64x64",
        "protocol": "scale",
        "policy": policy, "top1": top1, "top5": 100.0, "nll": 0.1, "n": 10_000, "retention": 1.0, "encoding": "absolute",
        "resampled": "nothing", "resampled_values": 0, "unseen": 0.0, "saturated": 0.0, "unchanged": True, "params": 452_068,
        "infer_samples_per_sec": 100.0, "peak_memory_mb": 50.0, "memory_kind": "cuda allocated", "gflops": 0.03,
        "batch_size": 8, "oom": 0, "tokens": 64, "crop_pct": 1.0,
    }  # fmt: skip
    return dict.fromkeys(columns_of("classification"), math.nan) | columns | given


def verdicts(rows, **how):
    return {(one["img_size"], one["policy"]): one["verdict"] for one in judge(rows, **how).rows}


def only(*rows, **how):
    [found] = judge(rows, **how).advice
    return found


def with_scores(rows, right):
    """The rows with top-1 of these masks, [n] each, and the scores of predictions that have them."""
    stored, changed = {}, []
    for one, mask in zip(rows, right, strict=True):
        n = len(mask)
        images, labels = ImageList([str(i) for i in range(n)], ["a", "b"]), np.zeros(n, np.int32)
        given = one | {"top1": 100 * float(np.mean(mask)), "n": n}
        stored[line_key(given)] = classified(images, labels, np.where(mask, 0, 1))
        changed.append(given)
    return changed, Scores(stored)


def test_safe_is_shown_loses_is_shown_and_the_rest_is_unknown():
    rows = [row(n=4000), row("96x96", 89.9, n=4000), row("128x128", 89.2, n=4000), row("192x192", 70.0, n=4000)]
    judged = judge(rows)
    assert [one["verdict"] for one in judged.rows] == ["", "safe", "cannot tell", "loses"]
    by_size = {one["img_size"]: one for one in judged.rows}
    assert math.isnan(by_size["64x64"]["difference"]) and by_size["96x96"]["difference"] == pytest.approx(-0.1)
    for one in judged.rows[1:]:
        low, high = one["difference_low"], one["difference_high"]
        expected = "safe" if low > -2 else "loses" if high < 0 else "cannot tell"
        assert one["verdict"] == expected and low < one["difference"] < high
    assert "more images" in by_size["128x128"]["more"] and by_size["96x96"]["more"] == by_size["192x192"]["more"] == ""


def test_the_margin_decides_what_is_safe():
    rows = [row(), row("96x96", 88.0)]
    assert verdicts(rows)["96x96", "none"] == "loses" and verdicts(rows, margin=5)["96x96", "none"] == "safe"
    assert verdicts([row(n=100), row("96x96", 90.5, n=100)])["96x96", "none"] == "cannot tell"  # few images are no safety
    with pytest.raises(ValueError, match="must be above 0, got 0"):
        judge(rows, margin=0)
    assert "less than 5 points" in judge(rows, margin=5).basis


def test_as_many_images_as_it_says_would_tell():
    few = [row(n=500), row("96x96", 89.0, n=500)]
    more = next(one["more"] for one in judge(few).rows if one["more"])
    number = 500 + int(more.removeprefix("about ").split(" ")[0].replace(",", ""))
    enough = [one | {"n": number} for one in few]
    assert verdicts(few)["96x96", "none"] == "cannot tell" and verdicts(enough)["96x96", "none"] != "cannot tell"
    assert verdicts([one | {"n": int(0.8 * number)} for one in few])["96x96", "none"] == "cannot tell"


def test_the_words_say_whether_verdicts_are_about_the_trained_model():
    assert "Verdicts are about the trained models." in judge([row(), row("96x96", 89.9)]).basis
    rows = [row(size, 90.0 + seed / 10, seed=seed) for seed in range(3) for size in ("64x64", "96x96")]
    assert "about models trained in this way" in judge(rows).basis


def test_seeds_that_disagree_are_not_safe():
    def seeds(size, *top1):
        return [row(size, value, seed=seed) for seed, value in enumerate(top1)]

    apart = [*seeds("64x64", 90, 91, 89), *seeds("128x128", 90, 72, 93)]
    assert verdicts(apart)["128x128", "none"] == "cannot tell"
    assert "seed" in next(one["more"] for one in judge(apart).rows if one["more"])
    agreed = [*seeds("64x64", 90, 91, 89), *seeds("128x128", 60, 61, 59)]
    assert verdicts(agreed)["128x128", "none"] == "loses"


def test_predictions_of_the_images_show_what_top1_alone_does_not():
    hard = np.arange(400) >= 360  # the same images are wrong at both sizes
    rows, scores = with_scores([row(), row("128x128")], [~hard, ~hard])
    assert verdicts(rows)["128x128", "none"] == "cannot tell" and verdicts(rows, scores=scores)["128x128", "none"] == "safe"
    rows, scores = with_scores([row(), row("128x128")], [np.arange(400) < 380, np.arange(400) < 372])
    assert verdicts(rows)["128x128", "none"] == "cannot tell" and verdicts(rows, scores=scores)["128x128", "none"] == "loses"


@pytest.mark.slow(seconds=5)
def test_fifteen_sizes_of_a_model_that_loses_nowhere():
    """The family of all sizes: "loses" at any size in at most 5 % of evaluations, and "safe" where 2 points are lost."""
    rng, n = np.random.default_rng(0), 300
    sizes = ["64x64", *(f"{side}x{side}" for side in range(72, 192, 8))]
    rows, alarms, wrong = [row(size) for size in sizes], 0, 0
    for _ in range(120):
        hard = rng.normal(size=n)
        for level, kind in ((0.0, "loses"), (0.16, "safe")):
            shift = np.where(np.arange(16) == 0, 0.0, level)[:, None]  # 0.16 of the noise are about 3 points
            made, scores = with_scores(rows, hard + shift + 0.5 * rng.normal(size=(16, n)) < 1.0)
            found = [one["verdict"] for one in judge(made, scores).rows[1:]]
            alarms += kind == "loses" and "loses" in found
            wrong += kind == "safe" and "safe" in found
    assert alarms <= 0.05 * 120 and wrong <= 0.05 * 120


def test_a_size_is_judged_under_its_first_policy_or_one_that_is_shown_better():
    rows = [row(), *(row("128x128", top1, name) for name, top1 in (("geometric", 70.0), ("clip", 70.5), ("bicubic", 89.9)))]
    used = [one["policy"] for one in judge(rows).rows if one["used"]]
    assert sorted(used) == ["bicubic", "none"] and "afe at 128 px (policy bicubic)" in only(*rows).text
    few = [row(n=1200), row("128x128", 89.5, "geometric", n=1200), row("128x128", 91.2, "clip", n=1200)]
    assert {one["policy"]: one["verdict"] for one in judge(few).rows if one["img_size"] != "64x64"} == {
        "geometric": "cannot tell", "clip": "safe"
    }  # fmt: skip
    assert "afe at 128 px (policy clip)" in only(*few).text  # not shown better than geometric, but safe
    used = [one["policy"] for one in judge(rows[:3]).rows if one["used"]]  # clip is half a point ahead: not shown
    assert sorted(used) == ["geometric", "none"] and "policy" not in only(*rows[:3]).text
    assert "Loses at 128 px: fine-tune it there" in only(*rows[:3]).text


def test_the_best_size_is_the_highest_and_a_smaller_one_is_within_the_margin_of_it():
    text = only(row("48x48", 89.9), row(), row("128x128", 90.2)).text
    assert text.endswith("Top-1 is highest at 128 px, 90.2 %; 48 px is within 2 points of that.")
    assert only(row("48x48", 82.0, n=100), row(n=100)).text.endswith("Top-1 is highest at 64 px, 90.0 %.")
    assert only(row("48x48", 90.0), row(), row("96x96")).text.endswith("Top-1 is highest at 48 px, 90.0 %.")


def test_models_are_compared_first_at_every_size():
    levels = {"a": (90.0, 90.0, 80.0), "b": (90.1, 80.0, 90.0), "c": (50.0, 50.0, 50.0)}
    rows = [row(size, top1, label=label) for label, all_top1 in levels.items()
            for size, top1 in zip(("64x64", "96x96", "128x128"), all_top1, strict=True)]  # fmt: skip
    a, b, c = (one.sentences[0] for one in judge(rows).advice)
    assert a == "Better than every other at 96 px; b is better at 128 px, by 10.0 points."
    assert b.startswith("Better than every other at 128 px; a is better at 96 px")
    assert "is better at" in c and "better than" not in c
    assert (
        judge(rows).headline
        == "a is the best at 96 px; b is the best at 128 px; no model is shown to be better than a and b at 64 px."
    )
    pair = judge([one for one in rows if one["label"] != "c"]).advice
    assert pair[0].sentences[0].startswith("Better than the other at 96 px; b is better at 128 px")
    few = judge([one | {"n": 20} for one in rows if one["label"] != "c"]).advice
    assert few[0].sentences[0] == "The other is not shown to be better at any size."


def test_a_model_that_is_behind_at_every_size_is_told_that_the_other_is_better():
    levels = {"good": (90.0, 89.9, 90.1), "poor": (65.0, 65.2, 64.8)}
    rows = [row(size, top1, label=label) for label, all_top1 in levels.items()
            for size, top1 in zip(("64x64", "96x96", "128x128"), all_top1, strict=True)]  # fmt: skip
    judged = judge(rows)
    assert judged.headline == "good is the best at every size."
    good, poor = (one.sentences[0] for one in judged.advice)
    assert good == "Better than the other at every size."
    assert poor == "good is better at every size, by 24.7 to 25.3 points." and len(judged.advice[1].sentences) <= 3
    assert judge(rows[:3]).headline == ""


@pytest.mark.slow(seconds=4)
def test_equal_models_are_seldom_told_apart():
    """Four equal models at six sizes: a family of 36 comparisons."""
    rng, names, sizes = np.random.default_rng(1), "abcd", ["64x64", *(f"{side}x{side}" for side in (48, 80, 96, 112, 128))]
    rows = [row(size, label=label) for label in names for size in sizes]
    claimed = 0
    for _ in range(100):
        made, scores = with_scores(rows, rng.normal(size=200) + 0.5 * rng.normal(size=(24, 200)) < 1.0)
        claimed += any(" is better at " in one.text for one in judge(made, scores).advice)
    assert claimed <= 5


def test_a_common_seed_of_several_says_nothing_about_models_trained_in_this_way():
    rows = [row(top1=90.0 + seed, seed=seed) for seed in range(3)] + [row(label="n", top1=50.0)]
    assert [len(one.sentences) for one in judge(rows).advice] == [2, 2]  # without a comparison


@pytest.mark.parametrize("name", ["shapes_classified", "study/flowers256"])
def test_three_sentences_without_jargon(name):
    folder = ROOT / "results" / name
    rows = read_csv(folder / "results.csv")
    for one in judge(rows, read_scores(folder)).advice:
        assert 1 <= len(one.sentences) <= 3 and all(text.endswith(".") for text in one.sentences)
        assert len(one.text) < 600 and not any(word in one.text.replace("policy bicubic", "") for word in JARGON), one.text


def test_without_the_training_size_or_with_it_alone():
    alone = only(row())
    assert alone.text == "Only its training size, 64 px, was evaluated. Top-1 is 90.0 %."
    missing = judge([row("96x96"), row("128x128", 50.0)])
    assert {one["verdict"] for one in missing.rows} == {""}
    assert "Evaluate it at its training size, 64 px, too" in missing.advice[0].text


def test_a_model_that_learned_nothing_is_sent_to_training():
    found = only(row(top1=25.5, majority=25.0), row("128x128", 25.4, majority=25.0))
    assert len(found.sentences) == 1 and found.text.startswith("Train it first: its top-1 of 25.5 % at 64 px is not shown")
    assert "Train it first" not in only(row(top1=30.0, majority=25.0)).text


def test_the_advice_is_about_the_first_protocol_and_the_rows_about_all():
    rows = [row(protocol=name, size=size, top1=90.0 if size == "64x64" or name == "scale" else 50.0)
            for name in ("canvas", "scale") for size in ("64x64", "128x128")]  # fmt: skip
    judged = judge(rows[2:] + rows[:2])
    assert judged.advice[0].protocol == "scale" and "Safe at 128 px" in judged.advice[0].text
    assert "in the scale protocol" in judged.basis
    assert {(one["protocol"], one["verdict"]) for one in judged.rows} == {
        ("scale", ""), ("scale", "safe"), ("canvas", ""), ("canvas", "loses"),
    }  # fmt: skip
    assert judge(rows).advice[0].protocol == "canvas"


def test_rows_with_crops_find_their_predictions():
    """The protocol of a judged row has the crop in its name; its predictions are still those of the row."""
    hard = np.arange(200) >= 180
    rows = [row(size, crop_pct=crop) for crop in (1.0, 0.9) for size in ("64x64", "96x96")]
    made, scores = with_scores(rows, [~hard] * 4)
    assert [one["verdict"] for one in judge(made, scores).rows] == ["", "safe"] * 2


def test_samples_pair_seeds():
    rows = [row(top1=80.0 + seed, seed=seed) for seed in (0, 1)]
    assert sample_of(rows).of_seeds(["1"]).means == (81.0,)


def test_sizes_in_words():
    assert pixels("48x48", "64x96") == "48 and 64x96 px" and pixels("96x96") == "96 px"


def test_predictions_helper_and_labels_keep_their_order():
    rows = [row(label=label) for label in ("b", "a")]
    assert [found.label for found in judge(rows).advice] == ["b", "a"]
    made = [predicted(["a", "b"], [45, 41], 50), predicted(["a", "b"], [45, 45], 50)]
    scores = Scores({line_key(one): given for one, given in zip(rows, made, strict=True)})
    assert scores.of(rows, "top1").shape == (2, 100) and scores.of([row("96x96")], "top1") is None


def test_four_models_on_classified_scenes_as_a_reader_checks_it():
    judged = judge(read_csv(ROOT / "results" / "shapes_classified" / "results.csv"))
    found = {one.label.removeprefix("vitrel_"): one.text for one in judged.advice}
    assert "Safe at every other size" in found["vit_n8_absolute"] and "highest at 96 px" in found["vit_n8_absolute"]
    assert "Loses at every other size: fine-tune it there" in found["vit_n8_rope_mixed"]
    assert "vitrel_vit_n8_absolute is better at" in found["vit_n8_rope_mixed"]
    used = {(one["label"], one["img_size"]): one["policy"] for one in judged.rows if one["used"] and one["protocol"] == "scale"}
    # at 96 px bicubic has 99.2 %, geometric 91.5
    assert used["vitrel_vit_n8_table", "96x96"] == used["vitrel_vit_n8_table", "128x128"] == "bicubic"


def test_of_equal_models_the_first_is_named():
    """Whatever the order in which Python has them in a set."""
    labels = [f"m{index}" for index in range(8)]
    rows = [row(size, 90.0, label=label) for label in labels for size in ("64x64", "96x96")]
    rows += [row(size, 50.0, label="low") for size in ("64x64", "96x96")]
    assert "m0 is better at every size, by 40.0 points." in judge(rows).advice[-1].text


def test_a_position_encoding_that_does_nothing_is_said_first():
    rows = [row(n=4000), row("96x96", 89.9, n=4000)]
    assert "does nothing" not in only(*rows).text
    assert only(*(one | {"position_share": 0.5} for one in rows)).sentences == only(*rows).sentences
    found = only(*(one | {"position_share": 0.004} for one in rows))
    assert (
        "does nothing" in found.sentences[0] and "0.4 %" in found.sentences[0] and found.sentences[1:] == only(*rows).sentences
    )
    judged = judge([one | {"position_share": 0.004, "resampled": "table clip", "resampled_values": 8100} for one in rows])
    assert "8,100" not in sizes_table(judged) and "8,100" not in accuracy_tables(judged.rows)


def test_a_difference_that_every_seed_shows_is_said_among_many_comparisons():
    """Three seeds alone have 2 degrees of freedom, which no difference passes in a family of 126; the models
    together have 12.
    """
    labels, sizes = "abcdefg", ("48x48", "64x64", "80x80", "96x96", "112x112", "128x128")
    noise = np.random.default_rng(0).normal(size=(len(labels), len(sizes), 3))
    rows = [
        row(size, 60.0 + noise[m, k, seed] + 28 * (label != "g"), label=label, seed=seed, n=1000)
        for m, label in enumerate(labels) for k, size in enumerate(sizes) for seed in range(3)
    ]  # fmt: skip
    *_, poor = judge(rows).advice
    assert "better at every size" in poor.sentences[0]
