import math

import pytest

from vitrel.evaluate.claims import judge, read_claim


def rows(label, top1, img_size="128x128", policy="none", n=400, **more):
    common = {"label": label, "policy": policy, "protocol": "canvas", "train_size": "64x64", "n": n} | more
    trained = [{**common, "img_size": "64x64", "seed": seed, "top1": 95.0} for seed in range(len(top1))]
    return trained + [{**common, "img_size": img_size, "seed": seed, "top1": value} for seed, value in enumerate(top1)]


def claim(**changes):
    given = {"text": "It is better.", "better": ["a"], "than": "b", "img_size": 128, "protocol": "canvas"}
    return read_claim(given | changes)


def verdict(ours, theirs, n=400, **changes):
    (text,) = judge([claim(**changes)], rows("a", ours, n=n) + rows("b", theirs, n=n))
    return text


def test_a_claim_holds_is_not_shown_or_does_not_hold():
    assert "This holds (1 of 1 pairs; 128x128 canvas, points of top-1 against b)" in verdict([90, 92, 91], [70, 71, 72])
    assert "This is not shown (0 of 1 pairs" in verdict([90, 92, 91], [89, 91, 90])
    assert "This does not hold (0 of 1 pairs" in verdict([70, 71, 72], [90, 92, 91])
    # the same means, but seeds that disagree
    assert "This is not shown" in verdict([99, 75, 99], [71, 90, 52])


def test_the_interval_is_students_over_paired_seeds_and_at_least_that_of_the_images():
    differences = [20.0, 30.0, 28.0]
    mean = sum(differences) / 3
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
    assert f"Ahead: a {mean:+.1f} ±{4.3027 * spread / math.sqrt(3):.1f}." in verdict([80, 90, 88], [60, 60, 60], n=100_000)
    images = 1.96 * math.sqrt((80 * 20 + 60 * 40) / 400)
    assert f"Ahead: a +20.0 ±{images:.1f}." in verdict([80, 80, 80], [60, 60, 60])
    assert f"Ahead: a +20.0 ±{images:.1f}." in verdict([80], [60])  # one seed: the images alone


def test_all_or_no_hits_are_no_certainty():
    """The interval of 8 hits of 8 is not [100, 100]."""
    (text,) = judge([claim(than=99.0)], rows("a", [100.0], n=8))
    assert "This is not shown" in text and f"a +1.0 ±{196 * math.sqrt(0.9 * 0.1 / 10):.1f}" in text
    assert "This is not shown" in verdict([100.0], [75.0], n=4)
    assert "This holds" in verdict([100.0], [0.0], n=8)


def test_against_a_number_several_labels_and_policies():
    frame = rows("a", [80, 82]) + rows("a", [30, 31], policy="clip") + rows("b", [50, 51]) + rows("c", [90, 91])
    (text,) = judge([claim(better=["a", "a/clip", "c"], than=25.0)], frame)
    assert "This holds (3 of 3 pairs; 128x128 canvas, points of top-1 against 25 %)" not in text
    assert "Ahead: a +56.0" in text and "c +65.5" in text and "Intervals that hold zero: a/clip +5.5" in text
    (text,) = judge([claim(better=["a", "c"], than=["b", "c"])], frame)
    assert "(2 of 4 pairs" in text and "a +30.5" in text and "(b)" in text and "Behind: a -9.5" in text and "(c)" in text


def test_what_was_not_learned_is_left_out_and_said():
    frame = rows("a", [80, 82]) + rows("b", [50, 51])
    low = [row | {"label": "low", "top1": 30.0} for row in rows("a", [99, 99])]
    (text,) = judge([claim(better=["a", "low"], learned=90)], frame + low)
    assert "This holds (1 of 1 pairs" in text and "Left out, below 90 % at the training size: low (30.0 %)." in text
    (text,) = judge([claim(better=["low"], learned=90)], frame + low)
    assert "This is not shown (0 of 0 pairs" in text


def test_shifted_content_is_judged_from_its_own_rows():
    shifted = [row | {"img_size": "64x64", "shift": 16, "top1": top1} for label, top1 in (("a", 90), ("b", 60))
               for row in rows(label, [0])[:1]]  # fmt: skip
    unshifted = [row | {"shift": 0, "top1": 0.0} for row in shifted]
    (text,) = judge([claim(img_size=64, shift=16)], rows("a", [80]) + rows("b", [81]), [*unshifted, *shifted])
    assert "64x64 canvas, shifted by 16 px" in text and "Ahead: a +30.0" in text


def test_what_is_no_claim_is_refused_by_name():
    for given in ({}, {"text": "x"}, "a > b", claim(), {"text": "", "better": "a", "than": "b", "img_size": 8, "size": 8}):
        with pytest.raises(ValueError, match="a claim has text, better, than and img_size"):
            read_claim(given)
    with pytest.raises(ValueError, match="is not an image size"):
        claim(img_size="wide")
    with pytest.raises(ValueError, match="a claim names 'c', of which there are no rows; labels are a, b"):
        judge([claim(better="c")], rows("a", [1]) + rows("b", [1]))
    with pytest.raises(ValueError, match="no rows of a at 96x96 canvas"):
        judge([claim(img_size=96)], rows("a", [1]) + rows("b", [1]))
    with pytest.raises(ValueError, match="no rows of a/bicubic at"):
        judge([claim(better="a/bicubic")], rows("a", [1]) + rows("b", [1]))
