"""The trial of position-free features: its links, and the tables on the page, which are those of the rows."""

from pathlib import Path

import pandas as pd

from tools.study import position_free
from tools.study.pages import ROOT


def test_evaluation_folders_may_be_named_by_id_alone(tmp_path):
    for place in ("train/n01_tench", "train/n02_dog", "val/n01", "val/n02"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / f"{Path(place).parent}.jpg").touch()
    for _ in range(2):  # a second run finds the links
        linked = position_free.linked(tmp_path / "train", tmp_path / "val", tmp_path / "linked")
    found = [str(path.relative_to(linked)) for of_class in linked.glob("*/*") for path in of_class.iterdir()]
    assert sorted(found) == [
        "train/n01_tench/train.jpg", "train/n02_dog/train.jpg", "val/n01_tench/val.jpg", "val/n02_dog/val.jpg"
    ]  # fmt: skip


def test_tables_have_a_line_for_each_model_in_order_with_means_over_seeds(tmp_path):
    rows = pd.read_csv(position_free.RESULTS, keep_default_na=False).iloc[[0] * 4].assign(
        encoding=["none", "alibi", "alibi", "absolute"], loss=["features", "features", "features", "teacher"],
        seed=["0", "0", "1", ""], share=[0.01, 0.02, 0.04, 0.5]
    )  # fmt: skip
    rows.to_csv(tmp_path / "results.csv", index=False)
    (name, table), *_ = position_free.tables(tmp_path / "results.csv")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert name == "shares" and [line[:4] for line in lines] == [
        ["`absolute`", "the teacher", "1", "50.00"],
        ["`alibi`", "and on features", "2", "3.00 ± 1.41"],
        ["`none`", "and on features", "1", "1.00"],
    ]


def test_the_tables_of_the_page_are_those_of_the_rows():
    page = (ROOT / position_free.PAGE).read_text("utf-8")
    for name, table in position_free.tables(position_free.RESULTS):
        assert f"<!-- {name} -->\n\n{table}\n" in page
