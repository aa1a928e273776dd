"""Tables, verdicts and claims: true to the rows they are made from."""

import math

import pytest

from helpers import ROOT
from vitrel.evaluate.report import accuracy_tables, details_table, judge, markdown, read_claim, verdicts
from vitrel.evaluate.results import COLUMNS, aggregate, curves, read_csv


def test_a_rescaled_window_is_told_in_the_table(windowed):
    given = [dict(row, resized="table clip", resized_params=0) if "rescale" in row["policy"] else row for row in windowed]
    text = accuracy_tables(aggregate(given))
    assert (
        "| window rescaled, table clip: 0 of " in text and "| nothing (divisor+keep) " in text and "| nothing (fixed) " in text
    )


def test_crops_are_protocols_of_their_own(rows):
    both = [
        dict(row, crop_pct=crop, top1=row["top1"] / 2 if crop < 1 else row["top1"]) for row in rows for crop in (1.0, 0.875)
    ]
    table = aggregate(both)
    assert table["protocol"].unique().tolist()[:2] == ["scale, crop 0.875", "scale, crop 1"] and (table["seeds"] == 1).all()
    assert "Top-1 in percent, canvas, crop 0.875 protocol:" in accuracy_tables(table)
    assert "(scale, crop 0.875)" in verdicts(both)[0]
    assert set(aggregate(rows)["protocol"]) == {"scale", "canvas"}


@pytest.mark.parametrize("name", ["quickstart", "imagenette96", "shapes_encodings"])
def test_published_results_are_still_read_and_still_said(name):
    folder = ROOT / "results" / name
    found, text = read_csv(folder / "results.csv"), (folder / "table.md").read_text("utf-8")
    for sentence in verdicts(found):
        assert f"- {sentence}\n" in text
    assert accuracy_tables(aggregate(found)) in text


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
    assert all(f"nothing ({policy})" in text for policy in at["48x48"])


def test_markdown_pads_and_aligns_numbers_right():
    assert markdown(["name", "n"], [["a|b", "1"], ["c", "1,000"]]) == (
        "| name |     n |\n| ---- | ----: |\n| a\\|b |     1 |\n| c    | 1,000 |\n"
    )


def test_tables_show_what_was_resampled_and_the_interval(rows):
    table = aggregate(rows)
    text = accuracy_tables(table)
    assert "Top-1 in percent, scale protocol:" in text and "Top-1 in percent, canvas protocol:" in text
    assert "table clip: 0 of " in text and f"table geometric: {4 * 3 * 49} of " in text
    assert "Trained at 32x32. ± is half the width of the 95 % interval (Wilson over 12 images)." in text
    header = [cell.strip() for cell in text.splitlines()[2].split("|")]
    assert header[1:-1] == ["model", "resampled at a new size", "24x24", "32x32", "32x48", "48x48"]
    lines = details_table(table).splitlines()
    assert len(lines) == 2 + len(table) and len({line.count("|") for line in lines}) == 1
    assert " NO " in details_table(table.assign(unchanged=False))


TOP1 = {"48x48": 80.0, "64x64": 97.1, "64x96": 88.0, "128x128": 61.0}


def row(label="m", size="64x64", protocol="scale", **given):
    columns = {
        "model": label, "label": label, "seed": 0, "img_size": size, "train_size": "64x64", "protocol": protocol,
        "policy": "none", "top1": TOP1[size], "top1_low": TOP1[size] - 1, "top1_high": TOP1[size] + 1, "top5": 100.0,
        "nll": 0.1, "n": 500, "retention": 1.0, "resized": "nothing", "resized_params": 0, "unseen": 0.0, "saturated": 0.0,
        "unchanged": True, "params": 452_068, "infer_samples_per_sec": 100.0, "peak_memory_mb": 1.0, "batch_size": 8, "oom": 0,
        "tokens": 64,
    }  # fmt: skip
    return dict.fromkeys(COLUMNS, "") | columns | given


def absolute(size, **given):
    return row(size=size, policy="bicubic", resized="absolute bicubic", resized_params=6144, **given)


def table(size, policy, unseen, **given):
    values, edge = (0, unseen) if policy == "clip" else (2700, 0.0)
    given = {"resized": f"table {policy}", "resized_params": values, "unseen": unseen, "saturated": edge} | given
    return row(size=size, policy=policy, **given)


def test_interpolated_everywhere_but_at_the_training_size():
    rows = [row(), absolute("48x48"), absolute("128x128")]
    assert verdicts(rows) == [
        "m: 6,144 of 452,068 parameters interpolated (absolute bicubic) at every size but 64x64 (state dict bit-identical); "
        "top-1 97.1 % at 64x64 -> 80.0 % at 48x48 and 61.0 % at 128x128 (scale) (n = 500)."
    ]


def test_nothing_touched_in_two_protocols():
    rows = [row(size=size, protocol=name) for name in ("scale", "canvas") for size in ("64x64", "128x128")]
    assert verdicts(rows) == [
        "m: nothing interpolated, re-created or touched at any of 2 sizes (state dict bit-identical); "
        "top-1 97.1 % at 64x64 -> 61.0 % at 128x128 (scale); 97.1 % at 64x64 -> 61.0 % at 128x128 (canvas) (n = 500)."
    ]


def test_a_single_size_is_not_called_several():
    assert verdicts([row()]) == [
        "m: nothing interpolated, re-created or touched at 64x64 (state dict bit-identical); "
        "top-1 97.1 % at 64x64 (scale) (n = 500)."
    ]


def test_clip_interpolates_nothing_and_says_what_was_never_trained():
    rows = [row(), row(size="48x48"), table("64x96", "clip", 0.35), table("128x128", "clip", 0.67)]
    assert verdicts(rows) == [
        "m: nothing interpolated at any of 4 sizes (state dict bit-identical), up to 67 % of the offsets (at 128x128) were "
        "never trained and read the edge value; "
        "top-1 97.1 % at 64x64 -> 80.0 % at 48x48 and 61.0 % at 128x128 (scale) (n = 500)."
    ]


def test_several_policies_side_by_side():
    rows = [row(), row(size="48x48")]
    for policy, top1 in (("geometric", 40.0), ("clip", 33.0), ("bicubic", 41.0)):
        rows.append(table("128x128", policy, 0.67, top1=top1))
    assert verdicts(rows) == [
        "m: the resize policy decides at 128x128 (state dict bit-identical): bicubic or geometric: 2,700 of 452,068 parameters "
        "interpolated; clip: nothing interpolated, 67 % of the offsets (at 128x128) were never trained and read the edge "
        "value; top-1 97.1 % at 64x64 -> 80.0 % at 48x48 and bicubic 41.0 %, clip 33.0 %, geometric 40.0 % at 128x128 (scale) "
        "(n = 500)."
    ]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"encoding": "rope_mixed"}, ", evaluated at offsets never trained (12 % of them, at 128x128); top-1"),
        (
            {"encoding": "t5", "saturated": 0.12},
            ", 12 % of the offsets (at 128x128) were never trained and read the far bucket;",
        ),
        (
            {"encoding": "shaw", "saturated": 0.12},
            ", 12 % of the offsets (at 128x128) were never trained and read the edge value;",
        ),
        ({"encoding": "t5", "saturated": 0.05}, ", 12 % of the offsets (at 128x128) were never trained and 5 % read the far b"),
        ({"encoding": "rope_axial+clipped", "saturated": 0.12}, " and read the edge value, where the rotation is evaluated;"),
    ],
)
def test_untrained_offsets_are_told_even_where_nothing_is_resized(columns, text):
    [sentence] = verdicts([row(), row(size="128x128", unseen=0.12, **columns)])
    assert sentence.startswith("m: nothing interpolated, re-created or touched at any of 2 sizes (state dict bit-identical), ")
    assert text in sentence


def test_up_to_is_said_only_of_shares_that_differ():
    rows = [row(), row(size="64x96", unseen=0.3), row(size="128x128", unseen=0.7)]
    assert ", evaluated at offsets never trained (up to 70 % of them, at 128x128); top-1" in verdicts(rows)[0]


def test_a_rotation_is_told_beside_an_interpolated_embedding_but_not_beside_a_stretched_table():
    both = absolute("128x128", unseen=0.5, encoding="absolute+rope_mixed")
    assert (
        "interpolated (absolute bicubic) at 128x128 (state dict bit-identical), evaluated at offsets never trained (50 % of "
    ) in verdicts([row(), both])[0]
    assert "never trained" not in verdicts([row(), table("128x128", "bicubic", 0.5)])[0]


def test_a_rule_that_resamples_nothing_is_named():
    rows = [row(), row(size="128x128", resized="rope_axial ntk", unseen=0.7)]
    assert verdicts(rows)[0].startswith(
        "m: nothing interpolated at any of 2 sizes (state dict bit-identical), read by rope_axial ntk at 128x128, evaluated at "
        "offsets never trained (70 % of them, at 128x128); top-1"
    )


def test_policies_that_resample_nothing_stand_side_by_side():
    rows = [row(encoding="cpb")]
    rows += [row(size=size, policy="keep", unseen=unseen) for size, unseen in (("48x48", 0.0), ("128x128", 0.7))]
    rows += [row(size=size, policy="renormalise", resized="cpb renormalise", top1=50.0) for size in ("48x48", "128x128")]
    assert verdicts(rows) == [
        "m: the resize policy decides at every size but 64x64 (state dict bit-identical): keep: nothing interpolated, "
        "evaluated at offsets never trained (70 % of them, at 128x128); renormalise: nothing interpolated; top-1 97.1 % at "
        "64x64 -> keep 80.0 %, renormalise 50.0 % at 48x48 and keep 61.0 %, renormalise 50.0 % at 128x128 (scale) (n = 500)."
    ]


def test_policies_of_two_kinds_are_told_by_their_combinations():
    rows = [row(), row(size="48x48", policy="keep"), row(size="48x48", policy="renormalise", resized="cpb renormalise")]
    for first in ("clip", "geometric"):
        rows.append(table("128x128", first, 0.7) | {"policy": f"{first}+keep"})
        both = {"policy": f"{first}+renormalise", "resized": f"table {first} + cpb renormalise"}
        rows.append(table("128x128", first, 0.7) | both)
    sentence = verdicts(rows)[0]
    assert sentence.startswith(
        "m: the resize policy decides at every size but 64x64 (state dict bit-identical): clip+keep or clip+renormalise: "
        "nothing interpolated, 70 % of the offsets (at 128x128) were never trained and read the edge value; "
        "geometric+keep or geometric+renormalise: 0 to 2,700 of 452,068 parameters interpolated; "
    )
    assert "keep 80.0 %, renormalise 80.0 % at 48x48 and clip+keep 61.0 %, clip+renormalise 61.0 %, geom" in sentence


def test_a_composition_that_clips_and_interpolates_tells_both():
    mixed = absolute("128x128", unseen=0.5, saturated=0.5)
    mixed |= {"resized": "absolute bicubic + table clip", "policy": "clip"}
    assert (
        "6,144 of 452,068 parameters interpolated (absolute bicubic + table clip) at 128x128 (state dict bit-identical), "
        "50 % of the offsets (at 128x128) were never trained and read the edge value;"
    ) in verdicts([row(), mixed])[0]


def test_a_changed_state_dict_is_never_called_untouched():
    [sentence] = verdicts([row(), row(size="128x128", unchanged=False)])
    assert "THE STATE DICT CHANGED at 128x128" in sentence
    assert "bit-identical" not in sentence and "touched" not in sentence


def test_the_range_is_given_where_the_number_of_values_varies():
    rows = [row(), table("48x48", "bicubic", 0), table("128x128", "bicubic", 0) | {"resized_params": 10_000}]
    assert "2,700 to 10,000 of 452,068 parameters interpolated (table bicubic) at every size but 64x64" in verdicts(rows)[0]


@pytest.mark.parametrize("seeds", [1, 3])
def test_seeds_are_averaged_and_labels_kept_in_order(seeds):
    rows = [
        row(label, size, seed=seed, top1=TOP1[size] - seed)
        for label in ("b", "a") for seed in range(seeds) for size in ("64x64", "128x128")
    ]  # fmt: skip
    first, second = verdicts(rows)
    assert first.startswith("b: ") and second.startswith("a: ")
    if seeds == 3:
        assert "top-1 96.1 % at 64x64 -> 60.0 % at 128x128 (scale) (mean of 3 seeds, n = 500 each)." in first


def test_policies_of_windows_are_told_apart():
    rows = [row(), row(size="128x128", policy="fixed"), row(size="128x128", policy="divisor", top1=62.0)]
    rows.append(table("128x128", "geometric", 0.4) | {"policy": "rescale+geometric", "top1": 70.0})
    assert verdicts(rows) == [
        "m: the policy of windows decides at 128x128 (state dict bit-identical): divisor or fixed: nothing interpolated; "
        "rescale+geometric: 2,700 of 452,068 parameters interpolated; "
        "top-1 97.1 % at 64x64 -> divisor 62.0 %, fixed 61.0 %, rescale+geometric 70.0 % at 128x128 (scale) (n = 500)."
    ]
    assert verdicts(rows[:2])[0].startswith("m: nothing interpolated, re-created or touched at any of 2 sizes")


def test_a_model_of_another_library_is_told_by_what_was_changed():
    given = {"encoding": "timm", "unseen": float("nan"), "saturated": float("nan"), "backend": "timm"}
    changed = {"resized": "pos_embed bicubic", "resized_params": 3072, "unchanged": False}
    assert verdicts([row(**given), row(size="128x128", **given, **changed)]) == [
        "m: 3,072 of 452,068 parameters interpolated (pos_embed bicubic) at 128x128; THE STATE DICT CHANGED at 128x128; "
        "top-1 97.1 % at 64x64 -> 61.0 % at 128x128 (scale) (n = 500)."
    ]


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
    assert "Ahead: a +56.0" in text and "c +65.5" in text and "Intervals that hold zero: a/clip +5.5" in text
    (text,) = judge([claim(better=["a", "c"], than=["b", "c"])], frame)
    assert "(2 of 4 pairs" in text and "a +30.5" in text and "(b)" in text and "Behind: a -9.5" in text and "(c)" in text


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
    with pytest.raises(ValueError, match="a claim names 'c', of which there are no rows; labels are a, b"):
        judge([claim(better="c")], claim_rows("a", [1]) + claim_rows("b", [1]))
    with pytest.raises(ValueError, match="no rows of a at 96x96 canvas"):
        judge([claim(img_size=96)], claim_rows("a", [1]) + claim_rows("b", [1]))
    with pytest.raises(ValueError, match="no rows of a/bicubic at"):
        judge([claim(better="a/bicubic")], claim_rows("a", [1]) + claim_rows("b", [1]))
