"""Tables: true to the rows they are made from."""

from vitrel.evaluate.results.advice import judge
from vitrel.evaluate.results.aggregate import aggregate, curves
from vitrel.evaluate.results.text import accuracy_tables, markdown, sizes_table, summary


def test_a_rescaled_window_is_told_in_the_table(windowed):
    given = [dict(row, resampled="table clip", resampled_values=0) if "rescale" in row["policy"] else row for row in windowed]
    text = accuracy_tables(aggregate(given))
    cells = [[cell.strip() for cell in line.split("|")[2:4]] for line in text.splitlines() if "|" in line]
    assert ["rescale+keep", "none (table clip)"] in cells and ["divisor+keep", "none"] in cells and ["fixed", "none"] in cells


def test_crops_are_protocols_of_their_own(rows):
    both = [
        dict(row, crop_pct=crop, top1=row["top1"] / 2 if crop < 1 else row["top1"]) for row in rows for crop in (1.0, 0.875)
    ]
    table = aggregate(both)
    protocols = [*dict.fromkeys(row["protocol"] for row in table)]
    assert protocols[:2] == ["scale, crop 1", "scale, crop 0.875"] and {row["seeds"] for row in table} == {1}
    assert "Top-1 in percent, canvas, crop 0.875 protocol:" in accuracy_tables(table)
    assert {row["protocol"] for row in aggregate(rows)} == {"scale", "canvas"}


def test_every_size_is_in_the_table_with_its_verdict(rows):
    judged = judge([row | {"n": 5000, "top1": 90.0 if row["img_size"] == "32x32" else 89.9} for row in rows])
    lines = sizes_table(judged).splitlines()
    used = [row for row in judged.rows if row["used"]]
    assert len([line for line in lines if line.startswith("| vitrel")]) == len(used) == 2 * 2 * 4
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| vitrel_vit_n8_abs")]
    by_size = {cell[2]: cell for cell in cells if cell[1] == "scale"}
    assert by_size["32x32"][5:7] == ["", "training size"] and by_size["48x48"][6] == "safe"
    assert by_size["48x48"][5].startswith("-0.1 (") and "values" in by_size["48x48"][8] and by_size["32x32"][8] == "nothing"
    assert summary(judged).startswith(judged.headline) and "Verdicts are about the trained models" in summary(judged)
    changed = sizes_table(judge([row | {"unchanged": False, "resampled_values": 0} for row in rows]))
    assert "the weights changed: this is an error" in changed


def test_a_policy_that_matters_at_some_sizes_belongs_to_all_its_combinations(rows):
    at = {
        "24x24": ["keep", "renormalize"],
        "48x48": ["clip+keep", "clip+renormalize", "geometric+keep", "geometric+renormalize"],
    }
    mixed = [rows[0]] + [dict(rows[0], img_size=size, policy=policy) for size in at for policy in at[size]]
    found = {policy: [row["policy"] for row in part] for _, policy, part in curves(aggregate(mixed))}
    assert {policy: sorted(names) for policy, names in found.items()} == {
        policy: sorted([policy, policy.split("+")[1], "none"]) for policy in at["48x48"]
    }
    text = accuracy_tables(aggregate(mixed))
    assert all(f"| {policy} " in text for policy in at["48x48"])


def test_markdown_pads_and_aligns_numbers_right():
    assert markdown(["name", "n"], [["a|b", "1"], ["c", "1,000"]]) == (
        "| name |     n |\n| ---- | ----: |\n| a\\|b |     1 |\n| c    | 1,000 |\n"
    )
