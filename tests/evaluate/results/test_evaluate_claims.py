"""Claims: judged by the rows, with the method of all comparisons."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.predictions import classified
from vitrel.evaluate.results.aggregate import Scores
from vitrel.evaluate.results.claims import judge_claims, read_claim
from vitrel.evaluate.results.statistics import estimate_of_means, wilson
from vitrel.evaluate.results.table import line_key
from vitrel.evaluate.tasks.base import ImageList


def claim_rows(label, top1, img_size="128x128", policy="none", n=400, **more):
    common = {"label": label, "policy": policy, "protocol": "canvas", "train_size": "64x64", "n": n} | more
    common["task"] = "classification"
    trained = [{**common, "img_size": "64x64", "seed": seed, "top1": 95.0} for seed in range(len(top1))]
    return trained + [{**common, "img_size": img_size, "seed": seed, "top1": value} for seed, value in enumerate(top1)]


def claim(**changes):
    given = {"text": "It is better.", "better": ["a"], "than": "b", "img_size": 128, "protocol": "canvas"}
    return read_claim(given | changes)


def claim_verdict(ours, theirs, n=400, **changes):
    (text,) = judge_claims([claim(**changes)], claim_rows("a", ours, n=n) + claim_rows("b", theirs, n=n))
    return text


def test_a_claim_holds_is_not_shown_or_does_not_hold():
    assert "This holds (1 of 1 pairs; 128x128 canvas, points of top-1 against b)" in claim_verdict([90, 92, 91], [70, 71, 72])
    assert "This is not shown (0 of 1 pairs" in claim_verdict([90, 92, 91], [89, 91, 90])
    assert "This does not hold (0 of 1 pairs" in claim_verdict([70, 71, 72], [90, 92, 91])
    # the same means, but seeds that disagree
    assert "This is not shown" in claim_verdict([99, 75, 99], [71, 90, 52])


def test_the_interval_is_over_seeds_and_images():
    found = estimate_of_means([[80, 90, 88]], [[60, 60, 60]], 400)
    text = claim_verdict([80, 90, 88], [60, 60, 60])
    assert f"({found.low():+.1f} to {found.high():+.1f})" in text and "a +26.0 (" in text
    spread = lambda *given: estimate_of_means(*given, 400).half()  # noqa: E731
    assert spread([[80, 90, 88]], [[60, 60, 60]]) > spread([[86, 86, 86]], [[60, 60, 60]]) > 5


def test_one_seed_is_about_the_trained_models():
    assert "This holds for these trained models (1 of 1 pairs" in claim_verdict([80], [60])
    assert "trained models" not in claim_verdict([80, 81], [60, 61])
    mixed = claim_rows("a", [80, 81]) + claim_rows("b", [60])
    assert "for these trained models" in judge_claims([claim()], mixed)[0]  # one seed in common


def test_one_of_many_pairs_behind_by_chance_is_no_refutation():
    """A pair that is just behind at 95 %, among ten that are not: listed as behind, and the claim is not shown."""
    frame = [row for at in range(10) for row in claim_rows(f"m{at}", [80.0])] + claim_rows("b", [80.0])
    behind = claim_rows("low", [73.5])
    labels = [f"m{at}" for at in range(10)]
    (text,) = judge_claims([claim(better=[*labels, "low"])], frame + behind)
    assert "This is not shown" in text and "Behind: low -6.5" in text
    (text,) = judge_claims([claim(better="low")], frame + behind)
    assert "This does not hold" in text


def test_models_are_paired_image_by_image_where_there_are_predictions():
    """80 and 73 of 100 images: not shown for independent samples, but b is right on no image on which a is wrong."""
    images, labels = ImageList([f"{i}.png" for i in range(100)], ["x", "y"]), np.zeros(100, np.int32)
    rows = [
        row | {"budget": "", "crop_pct": 1.0}
        for label, top1 in (("a", 80.0), ("b", 73.0))
        for row in claim_rows(label, [top1], n=100)
    ]
    predicted = {line_key(row): classified(images, labels, np.arange(100) >= row["top1"]) for row in rows}
    (text,) = judge_claims([claim()], rows)
    assert "This is not shown" in text
    (text,) = judge_claims([claim()], rows, scores=Scores(predicted))
    assert "This holds" in text and "Ahead: a +7.0 (" in text
    among = {
        key: replace(one, arrays=one.arrays | {"among": (one.arrays["predicted"] == 0) ^ ("a" in key)})
        for key, one in predicted.items()
    }
    (text,) = judge_claims([claim(metric="top1_among")], rows, scores=Scores(among))
    assert "This does not hold" in text and "points of top-1 among the data's classes" in text and "a -53.0" in text
    with pytest.raises(ValueError, match="metric is one of top1, top1_among"):
        claim(metric="top2")
    translated = [row | {"translation": 16} for row in rows]
    (text,) = judge_claims([claim(translation=16)], rows, translated, Scores(predicted))
    assert "This is not shown" in text  # the predictions are of images that are not translated


def test_all_or_no_hits_are_no_certainty():
    """The interval of 8 hits of 8 is not [100, 100]."""
    (text,) = judge_claims([claim(than=99.0)], claim_rows("a", [100.0], n=8))
    assert "This is not shown" in text and f"a +1.0 ({wilson(1.0, 8)[0] - 99:+.1f} to +1.0)" in text
    assert "This is not shown" in claim_verdict([100.0], [75.0], n=4)
    assert "This holds" in claim_verdict([100.0], [0.0], n=8)


def test_against_a_number_several_labels_and_policies():
    frame = (
        claim_rows("a", [80, 82])
        + claim_rows("a", [28, 29], policy="clip")
        + claim_rows("b", [50, 51])
        + claim_rows("c", [90, 91])
    )
    (text,) = judge_claims([claim(better=["a", "a/clip", "c"], than=25.0)], frame)
    assert "This is not shown (2 of 3 pairs; 128x128 canvas, points of top-1 against 25 %)" in text
    assert "Ahead: a +56.0" in text and "c +65.5" in text and "Not shown: a/clip +3.5" in text
    (text,) = judge_claims([claim(better=["a", "c"], than=["b", "c"])], frame)
    assert "(2 of 4 pairs" in text and "a +30.5" in text and "(b)" in text and "Behind: a -9.5" in text and "(c)" in text


def test_a_policy_that_changes_nothing_at_a_size_is_judged_there():
    """Rows at 128 px have the policy "none", since there is a policy at 256 px alone."""
    frame = claim_rows("a", [80, 82]) + claim_rows("b", [50, 51]) + claim_rows("a", [70, 71], "256x256", "clip")[2:]
    (text,) = judge_claims([claim(better=["a/clip"])], frame)
    assert "This holds (1 of 1 pairs; 128x128 canvas" in text and "Ahead: a/clip +30.5" in text
    with pytest.raises(ValueError, match=r"there are no rows of a/bicubic at 128x128 canvas"):
        judge_claims([claim(better=["a/bicubic"])], frame)


def test_what_was_not_learned_is_left_out_and_said():
    frame = claim_rows("a", [80, 82]) + claim_rows("b", [50, 51])
    low = [row | {"label": "low", "top1": 30.0} for row in claim_rows("a", [99, 99])]
    (text,) = judge_claims([claim(better=["a", "low"], learned=90)], frame + low)
    assert "This holds (1 of 1 pairs" in text and "Left out, below 90 % at the training size: low (30.0 %)." in text
    (text,) = judge_claims([claim(better=["low"], learned=90)], frame + low)
    assert "This is not shown (0 of 0 pairs" in text


def test_translated_content_is_judged_from_its_own_rows():
    translated = [row | {"img_size": "64x64", "translation": 16, "top1": top1} for label, top1 in (("a", 90), ("b", 60))
               for row in claim_rows(label, [0])[:1]]  # fmt: skip
    as_they_are = [row | {"translation": 0, "top1": 0.0} for row in translated]
    (text,) = judge_claims(
        [claim(img_size=64, translation=16)], claim_rows("a", [80]) + claim_rows("b", [81]), [*as_they_are, *translated]
    )
    assert "64x64 canvas, translated by 16 px" in text and "Ahead: a +30.0" in text


def test_what_is_no_claim_is_refused_by_name():
    for given in ({}, {"text": "x"}, "a > b", claim(), {"text": "", "better": "a", "than": "b", "img_size": 8, "size": 8}):
        with pytest.raises(ValueError, match="a claim has text, better, than and img_size"):
            read_claim(given)
    with pytest.raises(ValueError, match="is not an image size"):
        claim(img_size="wide")
    with pytest.raises(ValueError, match=r"a claim names 'c', which has no rows .* labels are a, b"):
        judge_claims([claim(better="c")], claim_rows("a", [1]) + claim_rows("b", [1]))
    with pytest.raises(ValueError, match="no rows of a at 96x96 canvas"):
        judge_claims([claim(img_size=96)], claim_rows("a", [1]) + claim_rows("b", [1]))
    with pytest.raises(ValueError, match="no rows of a/bicubic at"):
        judge_claims([claim(better="a/bicubic")], claim_rows("a", [1]) + claim_rows("b", [1]))
