"""`vitrel compare` from training to the table, with a model that is tuned at a larger size from another."""

import os
import shutil
import signal
import sys
import time
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import yaml

from helpers import command, each
from helpers.locks import locked
from helpers.runs import in_child, read, status
from vitrel import cli
from vitrel.common import lock, processes
from vitrel.compare import jobs

tool = command("compare")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_evaluations")]
ABSOLUTE = {"name": "vitrel_vit_n8_absolute", "label": "absolute"}
ROPE = {"name": "vitrel_vit_n8_none", "label": "rope", "model_args": {"position": "rope_mixed"}}
FINER = {"data": {"size": 96, "batch_size": 8}, "model": {"tuning": {"trainable": ["norm", "head"]}, "optim": {"lr": 1e-2}}}
CONFIG = {
    "name": "trial",
    "data": "shapes",
    "models": [
        ABSOLUTE | {"label": "tuned", "tuned_from": "absolute", "train": FINER},  # before its source
        ABSOLUTE,
        ROPE | {"seeds": [0, 1]},
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


def compare(folder, *more, number="1", **changes):
    (folder / "trial.yaml").write_text(yaml.safe_dump(CONFIG | changes))
    tool.main([folder / "trial.yaml", "--out", folder, "--jobs", number, *more])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with the finished comparison `trial`, by two processes at a time."""
    folder = tmp_path_factory.mktemp("runs")

    def forked():
        processes.start_processes = partial(processes.start_processes, start_method="fork")
        jobs.subprocess = SimpleNamespace(Popen=Forked)

    assert status(in_child(folder, forked, lambda place: compare(place, number="2"))) == 0
    return folder


@pytest.fixture
def again(finished, tmp_path, capsys):
    """again(**changes): the comparison once more, on a copy of the finished folder; returns the printed text."""
    shutil.copytree(finished / "trial", tmp_path / "trial")

    def run(*more, **changes):
        compare(tmp_path, "--no-report", *more, **changes)
        return capsys.readouterr().out

    return run


def trained(folder, name):
    return read(folder / "trial" / name / "checkpoints" / "last.ckpt")


def test_a_comparison_from_training_to_the_table(finished):
    frame = pd.read_csv(finished / "trial" / "results.csv")
    runs = [("tuned", 0, "96x96"), ("absolute", 0, "64x64"), ("rope", 0, "64x64"), ("rope", 1, "64x64")]
    found = zip(frame["label"], frame["seed"], frame["train_size"], frame["img_size"], strict=True)
    assert sorted(found) == sorted((*run, size) for run in runs for size in ("64x64", "96x96"))
    resampled = frame[(frame["label"] != "rope") & (frame["train_size"] != frame["img_size"])]
    assert set(resampled["resampled"]) == {"absolute bicubic"} and set(resampled["encoding"]) == {"absolute"}
    assert set(frame.drop(resampled.index)["resampled"]) == {"nothing"}
    assert set(frame[frame["label"] == "rope"]["encoding"]) == {"rope_mixed"}
    assert (finished / "trial" / "report.html").exists()
    seeds = [trained(finished, f"rope-seed{seed}") for seed in (0, 1)]
    assert [stored["vitrel"]["seed"] for stored in seeds] == [0, 1]
    assert not torch.equal(*(stored["state_dict"]["model.head.weight"] for stored in seeds))


def test_what_is_not_trained_is_that_of_the_source(finished):
    source, tuned = (trained(finished, f"{label}-seed0")["state_dict"] for label in ("absolute", "tuned"))
    resampled = {name for name in source if source[name].shape != tuned[name].shape}
    changed = {name for name in source if name not in resampled and not torch.equal(source[name], tuned[name])}
    assert resampled == {"model.pos_embed.pos_embed"}
    assert changed == {f"model.{module}.{name}" for module in ("norm", "head") for name in ("weight", "bias")}


def test_what_is_done_is_not_done_again(again, monkeypatch):
    """Also where the folder has moved."""
    monkeypatch.setattr(jobs, "run", lambda arguments: pytest.fail("trained again"))
    monkeypatch.setattr("vitrel.evaluate.run._share", lambda *_: pytest.fail("evaluated again"))
    printed = again()
    assert printed.count("trained already") == 4 and "[3/3] rope-seed1: trained already" in printed
    assert "rows: 8, done already: 8" in printed


def test_more_sizes_add_rows_and_other_images_are_another_evaluation(again, tmp_path):
    again(evaluate=CONFIG["evaluate"] | {"sizes": [96, 80]}, models=[ROPE])
    assert len(pd.read_csv(tmp_path / "trial" / "results.csv")) == 8 + 1
    few = {"evaluate": CONFIG["evaluate"] | {"n": 12}, "models": [ROPE]}
    with pytest.raises(SystemExit, match=r"another evaluation is in .*number of images: 16 there, 12 now.*--overwrite"):
        again(**few)
    again("--overwrite", **few)
    assert pd.read_csv(tmp_path / "trial" / "results.csv")["n"].tolist() == [12] * 2


def test_an_evaluation_that_is_stopped_says_what_is_saved(again, tmp_path, capsys, monkeypatch):
    """By SIGTERM; ctrl-c is asked of `vitrel evaluate`."""
    monkeypatch.setattr("vitrel.evaluate.run._share", lambda *given: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        again(evaluate=CONFIG["evaluate"] | {"sizes": [64, 96, 80]})
    assert caught.value.code == 143 and f"rows in {tmp_path / 'trial'}: 8; the same command" in capsys.readouterr().err


def test_an_interrupted_run_goes_on_from_its_last_checkpoint(again, tmp_path):
    folder = tmp_path / "trial" / "rope-seed1"
    settings = yaml.safe_load((folder / "train.yaml").read_text())
    settings["trainer"]["max_epochs"] = 2
    (folder / "train.yaml").write_text(yaml.safe_dump(settings))
    train = CONFIG["train"] | {"trainer": CONFIG["train"]["trainer"] | {"max_epochs": 2}}
    printed = again("--overwrite", train=train, seeds=[1], models=[ROPE])
    assert "rope-seed1: resuming after epoch 1 of 2" in printed
    assert jobs.epochs_done(folder / "checkpoints" / "last.ckpt") == 2


STAND_IN = """#!/bin/sh
trap 'echo told; exit 143' TERM
echo began
while :; do sleep 0.1; done
"""


@each("number", [signal.SIGTERM, *([signal.SIGKILL] if sys.platform == "linux" else [])])
def test_a_comparison_that_is_stopped_or_killed_ends_its_training(tmp_path, number):
    """Each process that trains is told, if need be by the kernel, and would save (tests/train); here a script stands for it."""
    folder = tmp_path / number.name
    folder.mkdir()
    script = folder / "python"
    script.write_text(STAND_IN)
    script.chmod(0o755)

    def stand_in():
        jobs.sys = SimpleNamespace(executable=str(script))

    process, end = in_child(folder, stand_in, lambda place: compare(place, number="2")), time.monotonic() + 400
    logs = [folder / "trial" / f"{label}-seed0" / "train.log" for label in ("absolute", "rope")]

    def all_say(word):
        return all(log.exists() and word in log.read_text() for log in logs)

    while not all_say("began") and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(process, number)
    assert status(process, 100) == (143 if number == signal.SIGTERM else -number)
    while number == signal.SIGKILL and not all_say("told") and time.monotonic() < end:
        time.sleep(0.1)
    assert all_say("told")
    assert len([*(folder / "trial").glob("*/train.log")]) == 2  # no other was begun


def test_a_changed_configuration_or_source_stops_with_the_way_out(again, tmp_path):
    model = CONFIG["train"]["model"] | {"optim": {"lr": 2e-3, "warmup_epochs": 0.5}}
    with pytest.raises(SystemExit) as caught:
        again(train=CONFIG["train"] | {"model": model})
    text = str(caught.value)
    assert "holds a run of another configuration (model.optim.lr: 0.001 then, 0.002 now)" in text
    assert "remove that folder to train again, or give the comparison another name" in text
    source = trained(tmp_path, "absolute-seed0")
    source["state_dict"]["model.cls_token"].add_(1.0)  # as if trained anew
    torch.save(source, tmp_path / "trial" / "absolute-seed0" / "checkpoints" / "last.ckpt")
    with pytest.raises(SystemExit, match=r"tuned-seed0 holds .*another configuration \(other weights in .*last\.ckpt, SHA-256"):
        again()


def test_training_that_stops_early_is_not_evaluated(again, monkeypatch):
    monkeypatch.setattr(jobs, "run", lambda arguments: None)
    with pytest.raises(SystemExit, match="training stopped before epoch 1; run the same command again to resume"):
        again(seeds=[5])


def test_two_comparisons_in_one_folder_are_refused_before_training(again, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "run", lambda arguments: pytest.fail("trained"))
    monkeypatch.setattr(lock, "PATIENCE", 0.0)
    with locked(tmp_path / "trial"), pytest.raises(SystemExit, match=r"another process is writing into .*trial"):
        again(seeds=[5])
    assert not (tmp_path / "trial" / "absolute-seed5").exists()


def test_what_cannot_begin_is_refused_before_training(tmp_path):
    with pytest.raises(SystemExit, match="error: evaluation at 24x24, canvas protocol: objects do not fit"):
        compare(tmp_path, evaluate={"sizes": [24], "protocols": ["canvas"]})
    with pytest.raises(SystemExit, match=r"error: no .*none\.yaml: give a YAML file, or one of .*quickstart"):
        tool.main([tmp_path / "none.yaml"])


def test_one_data_set_of_several_and_what_the_command_sets(tmp_path, monkeypatch):
    begun, several = [], ["shapes", {"data": "shapes-place", "seeds": [7]}]
    monkeypatch.setattr("vitrel.cli.compare.check", lambda comparison: None)
    monkeypatch.setattr("vitrel.cli.compare.compare", lambda one, number, how: begun.append((one.name, number, how)))
    compare(tmp_path, data=several)
    assert [(name, [*how]) for name, _, how in begun] == [
        (f"trial/{name}", ["overwrite", "command"]) for name in ("shapes", "shapes-place")
    ]  # what is not given is that of the file
    compare(tmp_path, "--data", "shapes-place", "--no-images", "--margin", "3", number="4", data=several)
    assert begun[2][:2] == ("trial/shapes-place", 4) and begun[2][2].items() >= {"photographs": False, "margin": 3.0}.items()
    with pytest.raises(SystemExit, match=r"error: --data animals: the data sets of .* are shapes, shapes-place"):
        compare(tmp_path, "--data", "animals", data=several)
