import pytest

from vitrel.transfer.report import COLUMNS
from vitrel.transfer.verdict import verdicts

TOP1 = {"48x48": 80.0, "64x64": 97.1, "64x96": 88.0, "128x128": 61.0}


def row(label="m", size="64x64", protocol="scale", **given):
    columns = {
        "model": label, "label": label, "seed": 0, "img_size": size, "train_size": "64x64", "protocol": protocol,
        "policy": "none", "top1": TOP1[size], "top1_low": TOP1[size] - 1, "top1_high": TOP1[size] + 1, "top5": 100.0,
        "nll": 0.1, "n": 500, "retention": 1.0, "resized": "nothing", "resized_params": 0, "unseen": 0.0, "unchanged": True,
        "params": 452_068, "infer_samples_per_sec": 100.0, "peak_memory_mb": 1.0, "batch_size": 8, "oom": 0, "tokens": 64,
    }  # fmt: skip
    return dict.fromkeys(COLUMNS, "") | columns | given


def absolute(size, **given):
    return row(size=size, policy="bicubic", resized="absolute bicubic", resized_params=6144, **given)


def table(size, policy, unseen, **given):
    values = 0 if policy == "clip" else 2700
    return row(size=size, policy=policy, resized=f"table {policy}", resized_params=values, unseen=unseen, **given)


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


def test_untrained_offsets_are_told_even_where_nothing_is_resized():
    assert "sizes (state dict bit-identical), 12 % of the offsets (at 128x128) were never trained; top-1" in verdicts(
        [row(), row(size="128x128", unseen=0.12)]
    )[0]  # fmt: skip


def test_a_composition_that_clips_and_interpolates_tells_both():
    mixed = absolute("128x128", unseen=0.5) | {"resized": "absolute bicubic + table clip", "policy": "clip"}
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
