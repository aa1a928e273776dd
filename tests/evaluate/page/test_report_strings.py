"""Everything from rows in memory to the page, with both kinds of text columns that pandas has: its own, and pyarrow's."""

import pandas as pd
import pytest

from vitrel.evaluate.page import plot_all, write_html
from vitrel.evaluate.results.advice import judge
from vitrel.evaluate.results.aggregate import with_curves
from vitrel.evaluate.results.table import read_csv, read_frame, read_translation, translation_columns, write_csv, write_frame
from vitrel.evaluate.results.text import table_page


@pytest.fixture(params=["python", "pyarrow"])
def text_columns(request):
    """pandas keeps text in pyarrow's arrays where pyarrow is installed."""
    if request.param == "pyarrow":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed: pandas has only one kind of text columns")
    with pd.option_context("mode.string_storage", request.param):
        assert pd.Series(["a"]).dtype.storage == request.param
        yield


@pytest.mark.slow(seconds=3)
def test_files_tables_plots_and_page(text_columns, rows, tmp_path):
    write_csv([row | {"label": "=a", "links": None} for row in with_curves(rows)], tmp_path / "results.csv")
    line = {name: rows[0][name] for name in translation_columns("classification") if name in rows[0]} | {"translation": 4}
    write_frame(pd.DataFrame([line], columns=translation_columns("classification")), tmp_path / "translation.csv")
    found = read_csv(tmp_path / "results.csv")
    assert {row["label"] for row in found} == {"=a"} and {type(row["label"]) for row in found} == {str}
    assert [row["top1"] for row in found] == pytest.approx([row["top1"] for row in rows]) and found[0]["links"] != found[0][
        "links"
    ]
    assert read_translation(tmp_path)[0]["budget"] is None
    judged = judge(found)
    assert "| =a " in table_page(judged, "t")
    square = judge([row for row in found if row["img_size"] != "32x48"])  # no size of another shape: parts without rows
    assert all(path.stat().st_size > 10_000 for path in plot_all(square, tmp_path / "plots"))
    assert "=a" in write_html(tmp_path).read_text("utf-8")


def test_a_file_without_rows_or_text(text_columns, tmp_path):
    write_csv([], tmp_path / "results.csv")
    assert read_csv(tmp_path / "results.csv") == []
    write_frame(pd.DataFrame({"image": ["+a", "b"], "n": [1, 2]}), tmp_path / "bad.csv")
    assert read_frame(tmp_path / "bad.csv", ("image",)).to_dict("list") == {"image": ["+a", "b"], "n": [1, 2]}
