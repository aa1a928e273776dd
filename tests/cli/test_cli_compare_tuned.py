"""`vitrel compare` with a model that is tuned at a larger size from another, in two processes, from training to the table."""

import os
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import yaml

from helpers import command
from helpers.runs import in_child, read, status
from vitrel import cli
from vitrel.common import processes
from vitrel.compare import jobs

tool = command("compare")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_evaluations")]
FINER = {"data": {"size": 96, "batch_size": 8}, "model": {"tuning": {"trainable": ["norm", "head"]}, "optim": {"lr": 1e-2}}}
ABSOLUTE, POSITION = "vitrel_vit_n8_absolute", "pos_embed.pos_embed"
CONFIG = {
    "name": "trial",
    "data": "shapes",
    "models": [
        {"name": ABSOLUTE, "label": "tuned", "tuned_from": "source", "train": FINER},  # before its source
        {"name": ABSOLUTE, "label": "source"},
    ],
    "seeds": [0],
    "train": {
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
        "data": {"size": 64, "batch_size": 16, "n_train": 32, "n_val": 16},
        "model": {"optim": {"lr": 1e-3, "warmup_epochs": 0.5}, "model_args": {"depth": 1, "embed_dim": 32, "num_heads": 2}},
    },
    "evaluate": {"sizes": [64, 96], "protocols": ["scale"], "n": 16, "device": "cpu"},
}


class Forked:
    """In place of a process that trains: a fork, since a new one would take longer to import than to train."""

    def __init__(self, command, env, stdout, **how):
        assert command[:3] == [sys.executable, "-m", "vitrel"]

        def log():
            os.dup2(stdout.fileno(), 1)
            os.environ |= env

        self.pid, self.returncode = in_child(command[3:], log, cli.main), None

    def poll(self):
        ended, how = os.waitpid(self.pid, os.WNOHANG)
        self.returncode = os.waitstatus_to_exitcode(how) if ended else None
        return self.returncode


def compare(folder, number):
    path = folder / "trial.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    tool.main([str(path), "--out", str(folder), "--no-report", "--jobs", number])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")

    def forked():
        processes.start_processes = partial(processes.start_processes, start_method="fork")
        jobs.subprocess = SimpleNamespace(Popen=Forked)

    assert status(in_child(folder, forked, lambda place: compare(place, "2"))) == 0
    return folder


def weights(folder, label):
    state = read(folder / "trial" / f"{label}-seed0" / "checkpoints" / "last.ckpt")["state_dict"]
    return {name.removeprefix("model."): value for name, value in state.items()}


def test_what_is_not_trained_is_that_of_the_source(finished):
    source, tuned = weights(finished, "source"), weights(finished, "tuned")
    trained = {name for name in source if name.split(".")[0] in ("norm", "head")}
    assert {name for name in source if source[name].shape != tuned[name].shape} == {POSITION}  # resampled
    equal = {name for name in source if name != POSITION and torch.equal(source[name], tuned[name])}
    assert equal == source.keys() - trained - {POSITION} and len(trained) == 4


def test_rows_have_the_size_that_each_was_trained_at(finished):
    frame = pd.read_csv(finished / "trial" / "results.csv")
    assert set(zip(frame["label"], frame["train_size"], frame["img_size"], strict=True)) == {
        (label, trained, size) for label, trained in (("source", "64x64"), ("tuned", "96x96")) for size in ("64x64", "96x96")
    }
    assert {*frame[frame["train_size"] == frame["img_size"]]["resampled"]} == {"nothing"}


def test_a_second_run_with_the_folder_named_otherwise_does_nothing(finished, monkeypatch, capsys):
    monkeypatch.setattr(jobs, "run", lambda arguments: pytest.fail("trained again"))
    monkeypatch.setattr("vitrel.evaluate.run._share", lambda *_: pytest.fail("evaluated again"))
    monkeypatch.chdir(finished.parent)
    tool.main([f"{finished.name}/trial.yaml", "--out", finished.name, "--no-report", "--jobs", "1"])
    assert capsys.readouterr().out.count("trained already") == 2


def test_a_source_trained_anew_is_noticed(finished, tmp_path):
    shutil.copytree(finished / "trial", tmp_path / "trial")
    path = tmp_path / "trial" / "source-seed0" / "checkpoints" / "last.ckpt"
    source = read(path)
    source["state_dict"]["model.cls_token"].add_(1.0)
    torch.save(source, path)
    with pytest.raises(
        SystemExit, match=r"tuned-seed0 holds a run of another configuration \(other weights in .*last\.ckpt, SHA-256"
    ):
        compare(tmp_path, "1")
