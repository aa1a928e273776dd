"""Rows as CSV files."""

import pandas as pd
import pytest

from vitrel.evaluate.results.table import (
    columns_of,
    line_key,
    read_csv,
    read_folder,
    read_translation,
    translation_columns,
    write_csv,
    write_folder,
)
from vitrel.evaluate.run import evaluate_rows
from vitrel.evaluate.sweep import Sweep

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
        assert one.predicted.arrays["predicted"].tolist() == other.predicted.arrays["predicted"].tolist()
        assert [(line["translation"], line["top1"]) for line in one.translation] == [
            (line["translation"], line["top1"]) for line in other.translation
        ]
    assert [*read_translation(tmp_path)[0]] == translation_columns("classification")
    before = noise.decoded
    again = list(evaluate_rows(models, sweep(sizes=((32, 48),), translations=(0, 2), crop_pct=(1.0, 0.5)), back))
    assert noise.decoded == before and len(again) == len(done)
    (tmp_path / "translation.csv").write_text("label,n\na,1\n")
    with pytest.raises(ValueError, match=r"translation\.csv has no column 'seed': move it away and run again"):
        read_folder(tmp_path)


def test_csv_keeps_every_column_in_order_and_reads_back(rows, tmp_path):
    path = tmp_path / "results.csv"
    write_csv(rows, path)
    assert list(pd.read_csv(path).columns) == columns_of("classification")
    back = read_csv(path)
    for name in ("label", "img_size", "policy", "top1", "resampled_values", "state_hash_after", "unchanged"):
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


def test_a_file_without_a_column_is_refused_by_name(rows, tmp_path):
    path = tmp_path / "results.csv"
    write_csv(rows, path)
    pd.read_csv(path).drop(columns="ece").to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"results\.csv .*no column 'ece'"):
        read_csv(path)
