import os
import shutil
import signal
import time
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import yaml

from helpers import command
from helpers.locks import locked
from helpers.runs import in_child, status
from vitrel import cli
from vitrel.common import lock
from vitrel.compare import jobs

tool = command("compare")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_evaluations")]
ROPE = {"name": "vitrel_vit_n8_none", "label": "rope", "model_args": {"position": "rope_mixed"}}
CONFIG = {
    "name": "trial",
    "data": "shapes",
    "models": [
        "vitrel_vit_n8_absolute",
        ROPE,
    ],
    "seeds": [0, 1],
    "train": {
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
        "data": {"size": 64, "batch_size": 16, "n_train": 32, "n_val": 16},
        "model": {"optim": {"lr": 1e-3, "warmup_epochs": 0.5}, "model_args": {"depth": 1, "embed_dim": 32, "num_heads": 2}},
    },
    "evaluate": {"sizes": [64, "64x96"], "protocols": ["scale", "canvas"], "n": 16, "device": "cpu"},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with the finished comparison `trial`."""
    folder = tmp_path_factory.mktemp("runs")
    path = folder / "trial.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    tool.main([str(path), "--out", str(folder), "--jobs", "1"])
    return folder


@pytest.fixture
def again(finished, tmp_path, capsys):
    """again(**changes): the comparison once more, on a copy of the finished folder; returns the printed text."""
    shutil.copytree(finished / "trial", tmp_path / "trial")

    def run(*more, **changes):
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump(CONFIG | changes))
        tool.main([str(path), "--out", str(tmp_path), "--jobs", "1", "--no-report", *more])
        return capsys.readouterr().out

    return run


def test_a_comparison_from_training_to_the_table(finished):
    folder = finished / "trial"
    frame = pd.read_csv(folder / "results.csv")
    assert len(frame) == 2 * 2 * 2 * 2
    assert set(zip(frame["label"], frame["seed"], strict=True)) == {
        (label, seed) for label in ("vitrel_vit_n8_absolute", "rope") for seed in (0, 1)
    }
    assert set(frame[frame["label"] == "rope"]["resampled"]) == {"nothing"}
    assert set(frame[frame["label"] == "rope"]["encoding"]) == {"rope_mixed"}
    assert set(frame[frame["img_size"] == "64x96"]["resampled"]) == {"nothing", "absolute bicubic"}
    assert (folder / "report.html").exists()
    seeds = [torch.load(folder / f"rope-seed{seed}/checkpoints/last.ckpt", weights_only=True) for seed in (0, 1)]
    assert [stored["vitrel"]["seed"] for stored in seeds] == [0, 1]
    assert not torch.equal(*(stored["state_dict"]["model.head.weight"] for stored in seeds))


def test_what_is_done_is_not_done_again(again, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "run", lambda arguments: pytest.fail("trained again"))
    monkeypatch.setattr("vitrel.evaluate.run._share", lambda *_: pytest.fail("evaluated again"))
    printed = again()
    assert printed.count("trained already") == 4 and "[4/4] rope-seed1: trained already" in printed
    assert "rows: 16, done already: 16" in printed


def test_more_sizes_add_rows_and_other_images_are_another_evaluation(again, tmp_path):
    again(evaluate=CONFIG["evaluate"] | {"sizes": [64, "64x96", 80], "protocols": ["scale"]}, seeds=[0])
    assert len(pd.read_csv(tmp_path / "trial" / "results.csv")) == 16 + 2
    few = {"evaluate": CONFIG["evaluate"] | {"n": 12}, "seeds": [0]}
    with pytest.raises(SystemExit, match=r"another evaluation is in .*number of images: 16 there, 12 now.*--overwrite"):
        again(**few)
    again("--overwrite", **few)
    assert pd.read_csv(tmp_path / "trial" / "results.csv")["n"].tolist() == [12] * 8


def test_an_evaluation_that_is_stopped_says_what_is_saved(again, tmp_path, capsys, monkeypatch):
    """By SIGTERM; ctrl-c is asked of `vitrel evaluate`."""
    monkeypatch.setattr("vitrel.evaluate.run._share", lambda *given: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        again(evaluate=CONFIG["evaluate"] | {"sizes": [64, "64x96", 80]})
    assert caught.value.code == 143 and f"rows in {tmp_path / 'trial'}: 16; the same command" in capsys.readouterr().err


def test_an_interrupted_run_goes_on_from_its_last_checkpoint(again, tmp_path):
    folder = tmp_path / "trial" / "rope-seed1"
    settings = yaml.safe_load((folder / "train.yaml").read_text())
    settings["trainer"]["max_epochs"] = 2
    (folder / "train.yaml").write_text(yaml.safe_dump(settings))
    train = CONFIG["train"] | {"trainer": CONFIG["train"]["trainer"] | {"max_epochs": 2}}
    printed = again("--overwrite", train=train, seeds=[1], models=CONFIG["models"][1:])
    assert "rope-seed1: resuming after epoch 1 of 2" in printed
    assert jobs.epochs_done(folder / "checkpoints" / "last.ckpt") == 2


STAND_IN = """#!/bin/sh
trap 'echo told; exit 143' TERM
echo began
while :; do sleep 0.1; done
"""


def test_sigterm_ends_training_in_parallel(tmp_path):
    """Each process that trains is told, and would save (tests/train); here a script stands for it."""
    script = tmp_path / "python"
    script.write_text(STAND_IN)
    script.chmod(0o755)
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(CONFIG))

    def stand_in():
        jobs.sys = SimpleNamespace(executable=str(script))

    arguments = ["compare", str(tmp_path / "trial.yaml"), "--out", str(tmp_path), "--jobs", "2", "--no-report"]
    process, end = in_child(arguments, stand_in, cli.main), time.monotonic() + 400
    logs = [tmp_path / "trial" / f"{label}-seed0" / "train.log" for label in ("vitrel_vit_n8_absolute", "rope")]
    while not all(log.exists() and "began" in log.read_text() for log in logs) and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(process, signal.SIGTERM)
    assert status(process, 100) == 143
    assert all("told" in log.read_text() for log in logs)
    assert len([*(tmp_path / "trial").glob("*/train.log")]) == 2  # no other was begun


def test_a_changed_configuration_stops_with_the_way_out(again):
    model = CONFIG["train"]["model"] | {"optim": {"lr": 2e-3, "warmup_epochs": 0.5}}
    with pytest.raises(SystemExit) as caught:
        again(train=CONFIG["train"] | {"model": model})
    text = str(caught.value)
    assert "holds a run of another configuration (model.optim.lr: 0.001 then, 0.002 now)" in text
    assert "remove that folder to train again, or give the comparison another name" in text


def test_training_that_stops_early_is_not_evaluated(again, monkeypatch):
    monkeypatch.setattr(jobs, "run", lambda arguments: None)
    with pytest.raises(SystemExit, match="training stopped before epoch 1; run the same command again to resume"):
        again(seeds=[5])


def test_two_comparisons_in_one_folder_are_refused_before_training(again, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "run", lambda arguments: pytest.fail("trained"))
    monkeypatch.setattr(lock, "PATIENCE", 0.0)
    with locked(tmp_path / "trial"), pytest.raises(SystemExit, match=r"another process is writing into .*trial"):
        again(seeds=[5])
    assert not (tmp_path / "trial" / "rope-seed5").exists()


def test_sizes_that_the_data_cannot_show_are_refused_before_training(again):
    with pytest.raises(SystemExit, match="error: evaluation at 24x24, canvas protocol: objects do not fit"):
        again(name="other", evaluate={"sizes": [24], "protocols": ["canvas"]})


def test_a_configuration_that_does_not_exist_is_named_with_those_of_the_package(tmp_path):
    with pytest.raises(SystemExit, match=r"error: no .*none\.yaml: give a YAML file, or one of .*quickstart"):
        tool.main([str(tmp_path / "none.yaml")])
