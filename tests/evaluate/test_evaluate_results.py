"""Rows as CSV files, aggregated over seeds, and as curves."""

import pandas as pd
import pytest

from vitrel.evaluate.report import curves_table, details_table
from vitrel.evaluate.results import (
    COLUMNS,
    TRANSLATION,
    aggregate,
    curve_summary,
    curves,
    line_key,
    read_csv,
    read_folder,
    read_translation,
    with_curves,
    write_csv,
    write_folder,
)
from vitrel.evaluate.run import evaluate_rows
from vitrel.evaluate.settings import Sweep

pytestmark = pytest.mark.usefixtures("brief_evaluations")


def sweep(**given):
    return Sweep(**{"data": "noise", "sizes": ((32, 32),), "batch_size": 5, "device": "cpu", "attention_n": 0} | given)


def test_files_come_back_with_the_lines_of_every_row(trained, noise, tmp_path):
    models = [trained("vitrel_vit_n8_table"), trained("vitrel_vit_n8_none", label="1", seed=None)]
    done = list(evaluate_rows(models, sweep(sizes=((32, 48),), translations=(0, 2), crop_pct=(1.0, 0.5))))
    write_folder(done, tmp_path)
    back = read_folder(tmp_path)
    assert [line_key(one.row) for one in back] == [line_key(one.row) for one in done]
    for one, other in zip(back, done, strict=True):
        assert one.predicted.predicted.tolist() == other.predicted.predicted.tolist()
        assert [(line["translation"], line["top1"]) for line in one.translation] == [
            (line["translation"], line["top1"]) for line in other.translation
        ]
    assert tuple(read_translation(tmp_path)[0]) == TRANSLATION
    before = noise.decoded
    again = list(evaluate_rows(models, sweep(sizes=((32, 48),), translations=(0, 2), crop_pct=(1.0, 0.5)), back))
    assert noise.decoded == before and len(again) == len(done)
    (tmp_path / "translation.csv").write_text("label,n\na,1\n")
    with pytest.raises(ValueError, match=r"translation\.csv has no column 'seed': move it away and run again"):
        read_folder(tmp_path)


def test_csv_keeps_every_column_in_order_and_reads_back(rows, tmp_path):
    path = tmp_path / "results.csv"
    write_csv(rows, path)
    assert list(pd.read_csv(path).columns) == list(COLUMNS)
    back = read_csv(path)
    for name in ("label", "img_size", "policy", "top1", "resized_params", "state_hash_after", "unchanged"):
        assert [row[name] for row in back] == [row[name] for row in rows]
    assert [file.name for file in tmp_path.iterdir()] == ["results.csv"]
    assert read_csv(tmp_path / "none.csv") == []


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "results.csv"
    for text in ("", "model,top1\na,1\n"):
        path.write_text(text)
        with pytest.raises(
            ValueError, match=r"results\.csv is not a results file of this version \(no column '(model|model_args)'\)"
        ):
            read_csv(path)


def test_one_seed_keeps_wilson_and_several_take_students_t(rows):
    one = aggregate(rows)
    assert (one["interval"] == "Wilson over 12 images").all()
    assert one["low"].tolist() == pytest.approx(one["top1_low"].tolist(), abs=1e-4)
    others = [dict(row, seed=seed, top1=row["top1"] + 30 * seed - 30, n=1200) for row in rows for seed in range(3)]
    three = aggregate(others)
    assert len(three) == len(one) and (three["seeds"] == 3).all()
    assert (three["interval"] == "t over 3 seeds, at least Wilson over 1,200 images").all()
    # standard deviation 30, t 4.3027, 3 seeds
    half = 4.3027 * 30 / 3**0.5
    assert three["high"].tolist() == pytest.approx([min(100, top1 + half) for top1 in three["top1"]], abs=1e-3)


def test_seeds_that_agree_by_chance_do_not_make_an_interval_of_nothing(rows):
    three = aggregate([dict(row, seed=seed) for row in rows for seed in range(3)])
    one = aggregate(rows)
    assert three["low"].tolist() == one["low"].tolist() and three["high"].tolist() == one["high"].tolist()


def test_aggregation_is_ordered_by_model_protocol_policy_and_area(rows):
    table = aggregate(rows)
    assert list(dict.fromkeys(table["label"])) == ["vitrel_vit_n8_table", "vitrel_vit_n8_absolute"]
    first = table[
        (table["label"] == "vitrel_vit_n8_absolute") & (table["policy"] == "bicubic") & (table["protocol"] == "scale")
    ]
    assert list(first["img_size"]) == ["24x24", "32x48", "48x48"]


def test_every_policy_has_a_curve_with_the_sizes_at_which_it_does_not_matter(rows):
    table = aggregate(rows)
    found = {(label, policy): set(part["img_size"]) for label, policy, part in curves(table[table["protocol"] == "scale"])}
    whole = {"24x24", "32x32", "32x48", "48x48"}
    assert found == {
        ("vitrel_vit_n8_table", "bicubic"): whole,
        ("vitrel_vit_n8_table", "clip"): whole,
        ("vitrel_vit_n8_table", "geometric"): whole,
        ("vitrel_vit_n8_absolute", "bicubic"): whole,
    }


def test_a_file_without_a_column_is_refused_by_name(rows, tmp_path):
    path = tmp_path / "results.csv"
    write_csv(rows, path)
    pd.read_csv(path).drop(columns="ece").to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"results\.csv .*no column 'ece'"):
        read_csv(path)


def test_columns_that_no_row_has_are_left_out_of_the_details(rows):
    without = details_table(aggregate([row | {"ece": float("nan")} for row in rows]))
    assert "ECE" not in without and "ECE" in details_table(aggregate(rows))


def curve(**top1):
    sizes = {name.strip("_"): value for name, value in top1.items()}
    return pd.DataFrame({"img_size": list(sizes), "top1": list(sizes.values())})


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
    found = {policy: [*part["policy"]] for _, policy, part in curves(aggregate(windowed))}
    assert {policy: sorted(names) for policy, names in found.items()} == {
        "fixed": ["fixed", "fixed", "none"],
        "divisor+keep": ["divisor+keep", "fixed", "none"],
        "rescale+keep": ["none", "rescale+keep", "rescale+keep"],
        "rescale+renormalise": ["fixed", "none", "rescale+renormalise"],
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
