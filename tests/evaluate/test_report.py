import matplotlib.image
import pandas as pd
import pytest

from helpers import ROOT
from vitrel.evaluate.columns import ADDED, COLUMNS
from vitrel.evaluate.plots import plot_all
from vitrel.evaluate.report import (
    accuracy_tables,
    aggregate,
    curve_summary,
    curves,
    curves_table,
    details_table,
    markdown,
    read_csv,
    with_curves,
    write_csv,
)
from vitrel.evaluate.settings import Sweep
from vitrel.evaluate.sweep import run_sweep, summary
from vitrel.evaluate.verdict import verdicts

ROWS = []  # made once: they are the same for every test


@pytest.fixture
def rows(trained, noise, rows_of):
    if not ROWS:
        models = [trained(f"vitrel_vit_n8_{key}") for key in ("table", "absolute")]
        ROWS.extend(rows_of(models, Sweep("noise", ((24, 24), (48, 48), (32, 48)), device="cpu", attention_n=0)))
    return [dict(row) for row in ROWS]


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
            ValueError, match=r"results\.csv is not a results file of this version \(no column '(model|label)'\)"
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


def test_a_file_from_before_the_column_saturated_is_read(rows, tmp_path):
    path = tmp_path / "results.csv"
    write_csv(rows, path)
    frame = pd.read_csv(path)
    assert (frame["saturated"] > 0).sum() == 2 * 2  # clip at the two larger sizes, in both protocols
    frame.drop(columns="saturated").to_csv(path, index=False)
    assert [row["saturated"] for row in read_csv(path)] == frame["saturated"].tolist()


def test_a_file_from_before_a_column_is_read_with_the_column_empty(rows, tmp_path):
    path = tmp_path / "results.csv"
    write_csv(rows, path)
    old = [name for name in ADDED if name not in ("saturated", "left_out")]
    pd.read_csv(path).drop(columns=old).to_csv(path, index=False)
    back = read_csv(path)
    assert all(list(row) == list(COLUMNS) for row in back) and all(row["ece"] != row["ece"] for row in back)
    assert [row["top1"] for row in back] == [row["top1"] for row in rows]
    text = details_table(aggregate(back))
    assert " - |" in text and accuracy_tables(aggregate(back)) == accuracy_tables(aggregate(rows))
    assert [row["best_size"] for row in with_curves(back)] == [row["best_size"] for row in with_curves(rows)]


def curve(**top1):
    sizes = {name.strip("_"): value for name, value in top1.items()}
    return pd.DataFrame({"img_size": list(sizes), "top1": list(sizes.values())})


def test_the_area_is_a_mean_over_octaves():
    # 50 to 70 over one octave, 70 to 80 over half of one
    found = curve_summary(curve(_32x32=50.0, _64x64=70.0, _64x128=80.0))
    assert found == {"best_size": "64x128", "top1_area": pytest.approx((60 + 75 / 2) / 1.5, abs=1e-4)}
    # sizes of one area count once, in whatever order they come
    assert curve_summary(curve(_64x128=80.0, _128x64=60.0, _64x64=50.0))["top1_area"] == pytest.approx(60.0)
    one = curve_summary(curve(_64x64=50.0))
    assert one["best_size"] == "64x64" and one["top1_area"] != one["top1_area"]


def windowed(rows):
    """One model with windows, at sizes where policies differ and where the kept window divides the grid."""
    at = {
        "32x32": ["none"],
        "40x40": ["keep", "divisor+keep", "rescale+keep"],
        "64x64": ["keep", "rescale+keep", "rescale+renormalise"],
    }
    return [dict(rows[0], img_size=size, policy=policy, top1=10.0 * i) for size in at for i, policy in enumerate(at[size])]


def test_windows_have_curves_where_keeping_them_is_the_same(rows):
    found = {policy: [*part["policy"]] for _, policy, part in curves(aggregate(windowed(rows)))}
    assert {policy: sorted(names) for policy, names in found.items()} == {
        "keep": ["keep", "keep", "none"],
        "divisor+keep": ["divisor+keep", "keep", "none"],
        "rescale+keep": ["none", "rescale+keep", "rescale+keep"],
        "rescale+renormalise": ["keep", "none", "rescale+renormalise"],
    }


def test_a_rescaled_window_is_told_in_the_table(rows):
    given = [dict(row, resized="table clip", resized_params=0) if "rescale" in row["policy"] else row for row in windowed(rows)]
    text = accuracy_tables(aggregate(given))
    assert (
        "| window rescaled, table clip: 0 of " in text and "| nothing (divisor+keep) " in text and "| nothing (keep) " in text
    )


def test_rows_have_the_best_size_and_area_of_their_own_curve(rows):
    found = with_curves(windowed(rows))
    by_policy = {(row["img_size"], row["policy"]): row for row in found}
    assert by_policy["32x32", "none"]["best_size"] == ""  # belongs to all
    alone = with_curves([row for row in found if row["policy"] in ("none", "keep")])
    assert {row["best_size"] for row in alone} == {"32x32"}  # of one curve
    assert by_policy["40x40", "rescale+keep"]["best_size"] == "40x40" == by_policy["64x64", "rescale+keep"]["best_size"]
    assert by_policy["40x40", "keep"]["top1_area"] == 0
    table = aggregate(found)
    text = curves_table(table)
    assert "mean top-1 over log2 size" in text and text.count("rescale+keep") == 1


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


def test_plots_are_pictures_of_some_size(rows, tmp_path):
    accuracy, throughput = plot_all(rows, tmp_path / "plots", "noise")
    assert accuracy.name == "accuracy.png" and throughput.name == "throughput.png"
    for path in (accuracy, throughput):
        picture = matplotlib.image.imread(path)
        assert min(picture.shape[:2]) > 400 and picture[..., :3].std() > 0.05


def test_an_interrupted_sweep_keeps_its_rows_and_goes_on(trained, noise, tmp_path, monkeypatch):
    models, sweep = [trained("vitrel_vit_n8_table")], Sweep("noise", ((32, 48),), device="cpu", attention_n=0)
    monkeypatch.setattr(noise, "__getitem__", _fails_after(noise.__getitem__, 12 * 3))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(models, sweep, tmp_path)
    kept = read_csv(tmp_path / "results.csv")
    assert len(kept) == 2 + 3
    monkeypatch.undo()
    before = noise.decoded
    for module in ("images", "plan"):
        monkeypatch.setattr(f"vitrel.evaluate.{module}.create_dataset", lambda data, split, size, **how: noise(size))
    rows = run_sweep(models, sweep, tmp_path, "noise")
    assert noise.decoded - before == 12 and len(rows) == 8
    assert [row["nll"] for row in rows[:5]] == [row["nll"] for row in kept]
    assert len(read_csv(tmp_path / "results.csv")) == 8
    text = (tmp_path / "table.md").read_text("utf-8")
    assert text.startswith("# noise\n") and summary(rows) in text and details_table(aggregate(rows)) in text
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["accuracy.png", "throughput.png"]


def _fails_after(method, calls):
    left = [calls]

    def limited(self, index):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return method(self, index)

    return limited
