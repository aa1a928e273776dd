"""Tables and claims: true to the rows they are made from."""

import math
from dataclasses import replace

import numpy as np
import pytest

from helpers import ROOT
from vitrel.evaluate.images import ImageList
from vitrel.evaluate.metrics import Predicted, Predictions, paired_interval
from vitrel.evaluate.report import accuracy_tables, details_table, judge, markdown, read_claim, table_page
from vitrel.evaluate.report.answers import paired_difference
from vitrel.evaluate.results import aggregate, curves, line_key, read_csv


def test_a_rescaled_window_is_told_in_the_table(windowed):
    given = [dict(row, resized="table clip", resized_params=0) if "rescale" in row["policy"] else row for row in windowed]
    text = accuracy_tables(aggregate(given))
    cells = [[cell.strip() for cell in line.split("|")[2:4]] for line in text.splitlines() if "|" in line]
    assert ["rescale+keep", "none (table clip)"] in cells and ["divisor+keep", "none"] in cells and ["fixed", "none"] in cells


def test_crops_are_protocols_of_their_own(rows):
    both = [
        dict(row, crop_pct=crop, top1=row["top1"] / 2 if crop < 1 else row["top1"]) for row in rows for crop in (1.0, 0.875)
    ]
    table = aggregate(both)
    assert table["protocol"].unique().tolist()[:2] == ["scale, crop 0.875", "scale, crop 1"] and (table["seeds"] == 1).all()
    assert "Top-1 in percent, canvas, crop 0.875 protocol:" in accuracy_tables(table)
    assert set(aggregate(rows)["protocol"]) == {"scale", "canvas"}


@pytest.mark.parametrize("name", ["quickstart", "imagenette96", "shapes_encodings"])
def test_published_results_are_still_read_and_still_said(name):
    folder = ROOT / "results" / name
    found, text = read_csv(folder / "results.csv"), (folder / "table.md").read_text("utf-8")
    assert table_page(found, name) == text


def test_a_policy_that_matters_at_some_sizes_belongs_to_all_its_combinations(rows):
    at = {
        "24x24": ["keep", "renormalise"],
        "48x48": ["clip+keep", "clip+renormalise", "geometric+keep", "geometric+renormalise"],
    }
    mixed = [rows[0]] + [dict(rows[0], img_size=size, policy=policy) for size in at for policy in at[size]]
    found = {policy: [*part["policy"]] for _, policy, part in curves(aggregate(mixed))}
    assert {policy: sorted(names) for policy, names in found.items()} == {
        policy: sorted([policy, policy.split("+")[1], "none"]) for policy in at["48x48"]
    }
    text = accuracy_tables(aggregate(mixed))
    assert all(f"| {policy} " in text for policy in at["48x48"])


def test_markdown_pads_and_aligns_numbers_right():
    assert markdown(["name", "n"], [["a|b", "1"], ["c", "1,000"]]) == (
        "| name |     n |\n| ---- | ----: |\n| a\\|b |     1 |\n| c    | 1,000 |\n"
    )


def test_tables_show_what_was_resampled_and_the_interval(rows):
    table = aggregate(rows)
    text = accuracy_tables(table)
    assert "Top-1 in percent, scale protocol:" in text and "Top-1 in percent, canvas protocol:" in text
    assert "| none (table clip) " in text and f"| {4 * 3 * 49} of " in text and " (table geometric) " in text
    assert "Trained at 32x32. ± is half the width of the 95 % interval (Wilson over 12 images)." in text
    header = [cell.strip() for cell in text.splitlines()[2].split("|")]
    assert header[1:-1] == ["model", "policy", "values resampled at other sizes", "24x24", "32x32", "32x48", "48x48"]
    lines = details_table(table).splitlines()
    assert len(lines) == 2 + len(table) and len({line.count("|") for line in lines}) == 1
    assert " NO " in details_table(table.assign(unchanged=False))


def claim_rows(label, top1, img_size="128x128", policy="none", n=400, **more):
    common = {"label": label, "policy": policy, "protocol": "canvas", "train_size": "64x64", "n": n} | more
    trained = [{**common, "img_size": "64x64", "seed": seed, "top1": 95.0} for seed in range(len(top1))]
    return trained + [{**common, "img_size": img_size, "seed": seed, "top1": value} for seed, value in enumerate(top1)]


def claim(**changes):
    given = {"text": "It is better.", "better": ["a"], "than": "b", "img_size": 128, "protocol": "canvas"}
    return read_claim(given | changes)


def claim_verdict(ours, theirs, n=400, **changes):
    (text,) = judge([claim(**changes)], claim_rows("a", ours, n=n) + claim_rows("b", theirs, n=n))
    return text


def test_a_claim_holds_is_not_shown_or_does_not_hold():
    assert "This holds (1 of 1 pairs; 128x128 canvas, points of top-1 against b)" in claim_verdict([90, 92, 91], [70, 71, 72])
    assert "This is not shown (0 of 1 pairs" in claim_verdict([90, 92, 91], [89, 91, 90])
    assert "This does not hold (0 of 1 pairs" in claim_verdict([70, 71, 72], [90, 92, 91])
    # the same means, but seeds that disagree
    assert "This is not shown" in claim_verdict([99, 75, 99], [71, 90, 52])


def test_the_interval_is_students_over_paired_seeds_and_at_least_that_of_the_images():
    differences = [20.0, 30.0, 28.0]
    mean = sum(differences) / 3
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
    assert f"Ahead: a {mean:+.1f} ±{4.3027 * spread / math.sqrt(3):.1f}." in claim_verdict(
        [80, 90, 88], [60, 60, 60], n=100_000
    )
    images = 1.96 * math.sqrt((80 * 20 + 60 * 40) / 400)
    assert f"Ahead: a +20.0 ±{images:.1f}." in claim_verdict([80, 80, 80], [60, 60, 60])
    assert f"Ahead: a +20.0 ±{images:.1f}." in claim_verdict([80], [60])  # one seed: the images alone


def test_models_are_paired_image_by_image_where_there_are_predictions():
    """80 and 75 of 100 images: not shown for independent samples, but b is right on no image on which a is wrong."""
    images, labels = ImageList([f"{i}.png" for i in range(100)], ["x", "y"]), np.zeros(100, np.int32)
    rows = [
        row | {"budget": "", "crop_pct": 1.0}
        for label, top1 in (("a", 80.0), ("b", 75.0))
        for row in claim_rows(label, [top1], n=100)
    ]
    predicted = {
        line_key(row): Predicted(images, labels, (np.arange(100) >= row["top1"]).astype(np.int32), labels * 0.5, labels == 0)
        for row in rows
    }
    compared = paired_difference(Predictions(images.names, labels, images.classes, predicted))
    (text,) = judge([claim()], rows)
    assert "This is not shown" in text
    (text,) = judge([claim()], rows, difference=compared)
    low, high = paired_interval(100, 5, 0)
    assert "This holds" in text and f"Ahead: a +5.0 ({low:+.1f} to {high:+.1f})." in text
    among = {key: replace(one, among=(one.predicted == 0) ^ ("a" in key)) for key, one in predicted.items()}
    compared = paired_difference(Predictions(images.names, labels, images.classes, among))
    (text,) = judge([claim(metric="top1_among")], rows, difference=compared)
    assert "This does not hold" in text and "points of top-1 among the data's classes" in text and "a -55.0" in text
    with pytest.raises(ValueError, match="metric is one of top1, top1_among"):
        claim(metric="top2")
    translated = [row | {"translation": 16} for row in rows]
    (text,) = judge([claim(translation=16)], rows, translated, compared)
    assert "This is not shown" in text  # the predictions are of images that are not translated


def test_all_or_no_hits_are_no_certainty():
    """The interval of 8 hits of 8 is not [100, 100]."""
    (text,) = judge([claim(than=99.0)], claim_rows("a", [100.0], n=8))
    assert "This is not shown" in text and f"a +1.0 ±{196 * math.sqrt(0.9 * 0.1 / 10):.1f}" in text
    assert "This is not shown" in claim_verdict([100.0], [75.0], n=4)
    assert "This holds" in claim_verdict([100.0], [0.0], n=8)


def test_against_a_number_several_labels_and_policies():
    frame = (
        claim_rows("a", [80, 82])
        + claim_rows("a", [30, 31], policy="clip")
        + claim_rows("b", [50, 51])
        + claim_rows("c", [90, 91])
    )
    (text,) = judge([claim(better=["a", "a/clip", "c"], than=25.0)], frame)
    assert "This holds (3 of 3 pairs; 128x128 canvas, points of top-1 against 25 %)" not in text
    assert "Ahead: a +56.0" in text and "c +65.5" in text and "No significant difference: a/clip +5.5" in text
    (text,) = judge([claim(better=["a", "c"], than=["b", "c"])], frame)
    assert "(2 of 4 pairs" in text and "a +30.5" in text and "(b)" in text and "Behind: a -9.5" in text and "(c)" in text


def test_a_policy_that_changes_nothing_at_a_size_is_judged_there():
    """Rows at 128 px have the policy "none", since there is a policy at 256 px alone."""
    frame = claim_rows("a", [80, 82]) + claim_rows("b", [50, 51]) + claim_rows("a", [70, 71], "256x256", "clip")[2:]
    (text,) = judge([claim(better=["a/clip"])], frame)
    assert "This holds (1 of 1 pairs; 128x128 canvas" in text and "Ahead: a/clip +30.5" in text
    with pytest.raises(ValueError, match=r"there are no rows of a/bicubic at 128x128 canvas"):
        judge([claim(better=["a/bicubic"])], frame)


def test_what_was_not_learned_is_left_out_and_said():
    frame = claim_rows("a", [80, 82]) + claim_rows("b", [50, 51])
    low = [row | {"label": "low", "top1": 30.0} for row in claim_rows("a", [99, 99])]
    (text,) = judge([claim(better=["a", "low"], learned=90)], frame + low)
    assert "This holds (1 of 1 pairs" in text and "Left out, below 90 % at the training size: low (30.0 %)." in text
    (text,) = judge([claim(better=["low"], learned=90)], frame + low)
    assert "This is not shown (0 of 0 pairs" in text


def test_translated_content_is_judged_from_its_own_rows():
    translated = [row | {"img_size": "64x64", "translation": 16, "top1": top1} for label, top1 in (("a", 90), ("b", 60))
               for row in claim_rows(label, [0])[:1]]  # fmt: skip
    as_they_are = [row | {"translation": 0, "top1": 0.0} for row in translated]
    (text,) = judge(
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
        judge([claim(better="c")], claim_rows("a", [1]) + claim_rows("b", [1]))
    with pytest.raises(ValueError, match="no rows of a at 96x96 canvas"):
        judge([claim(img_size=96)], claim_rows("a", [1]) + claim_rows("b", [1]))
    with pytest.raises(ValueError, match="no rows of a/bicubic at"):
        judge([claim(better="a/bicubic")], claim_rows("a", [1]) + claim_rows("b", [1]))
