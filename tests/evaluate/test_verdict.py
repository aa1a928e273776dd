import pytest

from vitrel.evaluate.report import COLUMNS
from vitrel.evaluate.verdict import verdicts

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
    rows = [row(), row(size="128x128", policy="keep"), row(size="128x128", policy="divisor", top1=62.0)]
    rows.append(table("128x128", "geometric", 0.4) | {"policy": "rescale+geometric", "top1": 70.0})
    assert verdicts(rows) == [
        "m: the policy of windows decides at 128x128 (state dict bit-identical): divisor or keep: nothing interpolated; "
        "rescale+geometric: 2,700 of 452,068 parameters interpolated; "
        "top-1 97.1 % at 64x64 -> divisor 62.0 %, keep 61.0 %, rescale+geometric 70.0 % at 128x128 (scale) (n = 500)."
    ]
    assert verdicts(rows[:2])[0].startswith("m: nothing interpolated, re-created or touched at any of 2 sizes")


def test_a_model_of_another_library_is_told_by_what_was_changed():
    given = {"encoding": "timm", "unseen": float("nan"), "saturated": float("nan"), "backend": "timm"}
    changed = {"resized": "pos_embed bicubic", "resized_params": 3072, "unchanged": False}
    assert verdicts([row(**given), row(size="128x128", **given, **changed)]) == [
        "m: 3,072 of 452,068 parameters interpolated (pos_embed bicubic) at 128x128; THE STATE DICT CHANGED at 128x128; "
        "top-1 97.1 % at 64x64 -> 61.0 % at 128x128 (scale) (n = 500)."
    ]
