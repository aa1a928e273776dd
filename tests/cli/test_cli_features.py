"""`vitrel features`: both tables on the screen and as CSV, for models of any library, and messages instead of traces."""

import csv

import pytest

from helpers import command, each

tool = command("features")


def rows_of(path):
    with path.open() as file:
        return [*csv.DictReader(file)]


@pytest.mark.slow
def test_two_models_at_two_sizes(tmp_path, capsys):
    models = ["vitrel_vit_n8_sincos", "vitrel_vit_n8_none", "--model-args", "{depth: 1}"]
    numbers = ["--images", "8", "--train-images", "16", "--val-images", "8", "--layers", "0", "-1"]
    tool.main([*models, "--data", "shapes", "--size", "48x64", *numbers, "--out", tmp_path])
    position, accuracy = rows_of(tmp_path / "position.csv"), rows_of(tmp_path / "accuracy.csv")
    assert [(row["model"], row["layer"], row["size"]) for row in position] == [
        (name, layer, "64x64") for name in models[:2] for layer in ("0", "-1")
    ]
    assert float(position[1]["leak_row_of_colors"]) > 0.9 > 0.1 > float(position[3]["leak_row_of_colors"])
    assert all(-1 <= float(row["agreement_48x64"]) <= 1 for row in position)
    assert [(row["label"], row["size"], row["method"]) for row in accuracy] == [
        (name, size, method) for name in models[:2] for size in ("64x64", "48x64") for method in ("k-NN", "linear")
    ]
    assert all(float(row["low"]) <= float(row["top1"]) <= float(row["high"]) for row in accuracy)
    printed = capsys.readouterr().out
    assert "| leak_row" in printed and "equivariance" in printed and "k-NN" in printed


@each(
    ("arguments", "message"),
    [
        (["vitrel_vit_n8_none", "--data", "no/such/folder"], "no folder no/such/folder"),
        (["vitrel_vit_n8_nne", "--data", "shapes"], "unknown model 'vitrel_vit_n8_nne'"),
        (["vitrel_vit_n8_none", "--data", "shapes", "--images", "2", "--no-accuracy"], "with at least 4 images"),
        (["vitrel_vit_n8_none", "--data", "shapes", "--images", "4", "--layers", "9", "--no-accuracy"], "there is no layer 9"),
    ],
)
def test_bad_input_ends_with_a_message(arguments, message):
    with pytest.raises(SystemExit) as stop:
        tool.main(arguments)
    assert str(stop.value.code).startswith("error: ") and message in str(stop.value.code)
