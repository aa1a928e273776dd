"""The table of the study of street scenes has the numbers of its rows."""

import re

import pandas as pd
import pytest

from helpers import ROOT
from tools.study import camvid

ROWS = pd.read_csv(ROOT / "results" / "study" / "camvid" / "results.csv").fillna({"policy": "none"})


def test_the_page_has_the_table_of_the_results():
    page, table = (ROOT / camvid.PAGE).read_text("utf-8"), camvid.table(ROOT / "results" / "study" / "camvid")
    assert f"<!-- camvid -->\n\n{table}\n" in page


@pytest.mark.parametrize(("label", "policy"), camvid.MODELS)
def test_its_cells_are_means_over_seeds(label, policy):
    cells = camvid.cells_of((ROOT / "results" / "study" / "camvid" / "table.md").read_text("utf-8"))
    for protocol, size in camvid.COLUMNS:
        chosen = ROWS[(ROWS.label == label) & (ROWS.protocol == protocol) & (ROWS.img_size == size)]
        chosen = chosen[chosen.policy.isin([policy, "none"])]  # "none" where policies do not differ
        shown = cells[protocol, size, label, "none" if protocol == "sliding" else policy]
        assert len(chosen) == 3 and re.match(r"[\d.]+", shown)[0] == f"{chosen.miou.mean():.1f}"
