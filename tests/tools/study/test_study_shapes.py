"""A slice of the study, from training to the claims: three models, one seed, few images."""

import pandas as pd
import pytest
import yaml

from helpers import ROOT, command

LABELS = ("absolute", "rope_mixed", "swin-table")


def cut(config):
    """The study on two of its data sets, with three models and one that borrows weights, shallow, trained for two updates."""
    config["models"] = [entry for entry in config["models"] if entry["label"] in (*LABELS, "rope_mixed+ntk")]
    config["seeds"], labels = [0], {entry["label"] for entry in config["models"]}
    config["data"] = [data for data in config["data"] if data["data"] != "shapes-place"]
    config["train"]["data"] |= {"n_train": 128, "n_val": 16}
    config["train"]["trainer"] |= {"accelerator": "cpu", "enable_progress_bar": False}
    config["evaluate"] |= {"n": 8, "device": "cpu", "attention_n": 2, "border_leak": False, "sizes": [64, 96, 128]}
    for entry in config["models"]:
        few = {"depths": [2, 1, 1]} if "swin" in entry["name"] else {"depth": 1}
        entry["model_args"] = entry.get("model_args", {}) | few
    for data in config["data"]:
        data.get("train", {}).get("data", {}).pop("n_train", None)
        if "only" in data:
            data["only"] = [label for label in data["only"] if label in LABELS]
        for claim in data["claims"]:
            for side in ("better", "than"):
                if isinstance(claim[side], list):
                    claim[side] = [name for name in claim[side] if name.split("/")[0] in labels]
        sides = ("better", "than")
        data["claims"] = [
            claim | {"learned": 0}
            for claim in data["claims"]
            if all(claim[side] for side in sides)
            and {claim[s].split("/")[0] for s in sides if isinstance(claim[s], str)} <= labels
        ]
    return config


@pytest.mark.slow
@pytest.mark.usefixtures("brief_evaluations")
def test_three_models_of_the_study_from_training_to_the_claims(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vitrel.train.summary.draw_curves", lambda epochs, path: None)
    config = cut(yaml.safe_load((ROOT / "configs" / "study_shapes.yaml").read_text("utf-8")))
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(config))
    arguments = [str(path), "--out", str(tmp_path), "--jobs", "1", "--no-report"]
    command("compare").main(arguments)
    printed = capsys.readouterr().out
    assert printed.count(": training for") == 2 * len(LABELS)
    for name, lines in (("shapes", 4 + 2 * 2 * 4), ("shapes-corner", 4)):
        folder = tmp_path / "study_shapes" / name
        rows = pd.read_csv(folder / "results.csv")
        assert set(rows["label"]) == {*LABELS, "rope_mixed+ntk"} and set(rows["data"]) == {name} and len(rows) >= lines
        assert rows["unchanged"].all()
        assert "pairs; " in (folder / "claims.md").read_text("utf-8")
    windows = pd.read_csv(tmp_path / "study_shapes" / "shapes" / "results.csv").query("label == 'swin-table'")
    assert {"fixed", "divisor", "rescale+geometric"} <= set(windows["policy"])
    translated = pd.read_csv(tmp_path / "study_shapes" / "shapes-corner" / "translation.csv")
    assert set(translated["translation"]) == {0, 4, 8, 12, 16} and set(translated["label"]) == set(rows["label"])
    assert "claims of the configuration:\n- **Where objects keep their size" in printed
