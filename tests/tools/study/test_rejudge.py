"""table.md and claims.md of results/ are what their rows, predictions and configurations give."""

import shutil

import pytest

from helpers import ROOT
from tools.study import rejudge


@pytest.mark.slow(seconds=5)
def test_the_files_are_up_to_date():
    rejudge.main(["--check"])


def test_a_file_that_is_not_is_named_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(rejudge, "TABLES", {"shapes_classified": "quickstart"})
    monkeypatch.setattr(rejudge, "CLAIMS", {"study_shapes/shapes-corner": "vitrel/configs/study_shapes.yaml"})
    for name in ("shapes_classified", "study_shapes/shapes-corner"):
        shutil.copytree(ROOT / "results" / name, tmp_path / name)
    claims = tmp_path / "study_shapes" / "shapes-corner" / "claims.md"
    before = claims.read_text("utf-8")
    assert before.startswith("- **Content translated by two patches")
    claims.write_text(before.replace("Behind", "Level"), "utf-8")
    with pytest.raises(SystemExit, match=r"claims\.md is out of date: run python -m tools\.study\.rejudge"):
        rejudge.main(["--check", "--results", str(tmp_path)])
    rejudge.main(["--results", str(tmp_path)])
    assert claims.read_text("utf-8") == before
