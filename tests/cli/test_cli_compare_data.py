"""`vitrel compare` with other data for the evaluation, seeds per model, and the weights of a model with an added encoding."""

import pandas as pd
import pytest
import torch
import yaml

from helpers import command, each
from helpers.pictures import write_classes
from vitrel.compare import jobs
from vitrel.compare.config import load_comparison
from vitrel.compare.models import trained_models
from vitrel.evaluate.folder import read_folder

pytestmark = pytest.mark.usefixtures("brief_evaluations")
ABSOLUTE = "vitrel_vit_n8_absolute"
ADDED = {"position": "rope_mixed", "position_args": {"base": 5.0}}
CONFIG = {
    "name": "trial",
    "data": "photographs",
    "models": [
        {"name": ABSOLUTE, "label": "aid", "weights_of": "roped", "model_args": {"position_args": {"policy": "ntk"}}},
        {"name": ABSOLUTE, "label": "roped", "seeds": [0], "train": {"model": {"tuning": ADDED}}},
        {"name": ABSOLUTE, "label": "plain", "train": {"model": {"optim": {"position_lr_scale": 1}}}},
    ],
    "seeds": [1],
    "train": {
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
        "data": {"size": 32, "batch_size": 8},
        "model": {
            "optim": {"lr": 1e-3, "warmup_epochs": 0.5, "position_lr_scale": 2},
            "model_args": {"depth": 1, "embed_dim": 32, "num_heads": 2},
        },
    },
    "evaluate": {"data": "labeled", "sizes": [32, 64], "protocols": ["scale"], "device": "cpu"},
}


FILES = [f"{i}.png" for i in range(4)]


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """compare(**changes): run the comparison in tmp_path, and return the path of its configuration."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        write_classes(tmp_path / "photographs" / split, ["ant", "bee", "cat", "dog"], FILES, (32, 32))
    write_classes(tmp_path / "labeled" / "val", ["bee", "dog"], FILES, (32, 32))

    def run(**changes):
        (tmp_path / "trial.yaml").write_text(yaml.safe_dump(CONFIG | changes))
        command("compare").main(["trial.yaml", "--jobs", "1", "--no-report"])

    return run


@pytest.mark.slow
def test_models_are_trained_on_one_data_set_and_evaluated_on_another(compare, tmp_path, capsys):
    compare()
    printed = capsys.readouterr().out
    assert "on photographs, evaluated on labeled" in printed and "[2/2] plain-seed1" in printed
    folder = tmp_path / "runs" / "trial"
    assert sorted(path.parent.name for path in folder.glob("*/checkpoints")) == ["plain-seed1", "roped-seed0"]
    rows = pd.read_csv(folder / "results.csv")
    assert set(zip(rows["label"], rows["seed"], strict=True)) == {("aid", 0), ("roped", 0), ("plain", 1)}
    assert set(rows["n"]) == {8} and read_folder(folder).settings["data"] == "labeled"
    [comparison] = load_comparison(tmp_path / "trial.yaml", tmp_path / "runs")
    aid, roped, *_ = trained_models(comparison)
    assert aid.model.arguments["position_args"] == {"base": 5.0, "policy": "ntk"} and aid.encoding == "absolute+rope_mixed"
    with torch.no_grad():
        for side, equal in ((32, True), (64, False)):
            image = torch.randn(2, 3, side, side)
            assert torch.equal(aid.model(image), roped.model(image)) == equal


GONE = {"name": ABSOLUTE, "label": "a", "train": {"model": {"tuning": {"init_from": "gone.ckpt"}}}}
AID, ROPED, _ = CONFIG["models"]


@each(
    ("changes", "message"),
    [
        ({"models": [GONE]}, r"gone\.ckpt"),
        ({"models": [ROPED, AID | {"model_args": {"position": "table"}}]}, "aid cannot have the weights"),
        ({"models": ["vitrel_vit_n8_tabel"]}, "vitrel_vit_n8_tabel cannot be built: .*vitrel_vit_n8_table"),
        ({"models": [ROPED, AID | {"model_args": {"depht": 2}}]}, "aid cannot have .*depht"),
        ({"models": [ROPED | {"train": {"model": {"tuning": {"position": "tabel"}}}}]}, "roped cannot be built: .*tabel"),
        (
            {"evaluate": CONFIG["evaluate"] | {"policies": ["bicubic", "rescale"]}},
            "no model has the policy 'rescale'; the policies of .*bicubic",
        ),
    ],
)
def test_what_cannot_be_trained_or_evaluated_is_refused_before_training(compare, monkeypatch, changes, message):
    monkeypatch.setattr(jobs, "run", lambda arguments: pytest.fail("trained"))
    with pytest.raises(SystemExit, match=message):
        compare(**changes)
