"""`vitrel compare` with models that are tuned at a larger size, from training to the table."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from helpers import command
from helpers.runs import fork_processes_of, in_child, read, status
from vitrel.common import processes
from vitrel.compare import jobs
from vitrel.train import Classifier
from vitrel.train.tuning import Tuning

tool = command("compare")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_evaluations")]
SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
FINER = {
    "trainer": {"max_epochs": 2},
    "data": {"size": 96, "batch_size": 8},
    "model": {"tuning": {"trainable": ["norm", "head"]}, "optim": {"lr": 1e-2}},
}
ABSOLUTE, NONE = "vitrel_vit_n8_absolute", "vitrel_vit_n8_none"
POSITION = "pos_embed.pos_embed"
ROPE = {"name": NONE, "position": "rope_mixed"}
CONFIG = {
    "name": "trial",
    "data": "shapes",
    "models": [
        {"name": ABSOLUTE, "label": "absolute-tuned", "tuned_from": "absolute", "train": FINER},  # before its source
        {"name": ABSOLUTE, "label": "absolute"},
        ROPE | {"label": "rope"},
        ROPE | {"label": "rope-tuned", "tuned_from": "rope", "train": FINER},
        ROPE | {"label": "aid", "weights_of": "rope-tuned", "model_args": {"position_args": {"policy": "ntk"}}},
    ],
    "seeds": [0, 1],
    "train": {
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
        "data": {"size": 64, "batch_size": 16, "n_train": 32, "n_val": 16},
        "model": {"optim": {"lr": 1e-3, "warmup_epochs": 0.5}, "model_args": SMALL},
    },
    "evaluate": {"sizes": [64, 96], "protocols": ["scale"], "n": 16, "device": "cpu"},
}


def compare(folder, *arguments, **changes):
    path = folder / "trial.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changes))
    tool.main([str(path), "--out", str(folder), "--jobs", "1", *arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    compare(folder, "--no-report")
    return folder


def weights(folder, label, seed):
    state = read(folder / "trial" / f"{label}-seed{seed}" / "checkpoints" / "last.ckpt")["state_dict"]
    return {name.removeprefix("model."): value for name, value in state.items()}


def trained(name):
    return name.split(".")[0] in ("norm", "head")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("label", ["absolute", "rope"])
def test_what_is_not_trained_is_that_of_the_source(finished, label, seed):
    source, tuned = weights(finished, label, seed), weights(finished, f"{label}-tuned", seed)
    assert source.keys() == tuned.keys() and sum(map(trained, source)) == 4
    resampled = {name for name in source if source[name].shape != tuned[name].shape}
    assert resampled == ({POSITION} if label == "absolute" else set())
    equal = {name for name in source if name not in resampled and torch.equal(source[name], tuned[name])}
    assert equal == {name for name in source if not trained(name)} - resampled
    other = weights(finished, label, 1 - seed)
    assert not torch.equal(other["blocks.0.attn.qkv.weight"], tuned["blocks.0.attn.qkv.weight"])


def test_a_resampled_position_is_the_sources_at_the_larger_grid(finished, capsys):
    path = finished / "trial" / "absolute-seed1" / "checkpoints" / "last.ckpt"
    classes = len(read(path)["vitrel"]["classes"])
    module = Classifier(ABSOLUTE, classes, 96, SMALL, tuning=Tuning(str(path), trainable=["norm", "head"]))
    assert "resampled to the model's grid: pos_embed.pos_embed" in capsys.readouterr().out
    assert torch.equal(module.model.state_dict()[POSITION], weights(finished, "absolute-tuned", 1)[POSITION])


def test_runs_say_what_they_started_from(finished):
    for seed in (0, 1):
        settings = yaml.safe_load((finished / "trial" / f"rope-tuned-seed{seed}" / "train.yaml").read_text())
        source = finished / "trial" / f"rope-seed{seed}" / "checkpoints" / "last.ckpt"
        assert Path(settings["model"]["tuning"]["init_from"]).resolve() == source.resolve()
        assert settings["model"]["tuning"]["trainable"] == ["norm", "head"] and settings["data"]["size"] == 96
        own = yaml.safe_load((finished / "trial" / f"rope-seed{seed}" / "train.yaml").read_text())
        assert "tuning" not in own["model"] and own["data"]["size"] == 64
    assert read(finished / "trial" / "rope-tuned-seed0" / "checkpoints" / "last.ckpt")["vitrel"]["epoch"] == 2


def test_rows_have_the_size_that_each_was_trained_at(finished):
    frame = pd.read_csv(finished / "trial" / "results.csv")
    sizes = {label: set(part["train_size"]) for label, part in frame.groupby("label")}
    tuned = {"absolute-tuned", "rope-tuned", "aid"}
    assert sizes == {label: {"96x96" if label in tuned else "64x64"} for label in (*tuned, "absolute", "rope")}
    assert {(row.label, row.seed, row.img_size) for row in frame.itertuples()} == {
        (label, seed, size) for label in sizes for seed in (0, 1) for size in ("64x64", "96x96")
    }
    resampled = frame[frame["label"].str.startswith("absolute")].set_index(["label", "seed", "img_size"])["resampled"]
    assert {index: text == "nothing" for index, text in resampled.items()} == {
        (label, seed, size): (size == "96x96") == (label in tuned) for label, seed, size in resampled.index
    }
    nll = frame.pivot_table(index=["seed", "img_size"], columns="label", values="nll")
    assert nll.xs("96x96", level="img_size")["aid"].tolist() == nll.xs("96x96", level="img_size")["rope-tuned"].tolist()
    assert "rope-tuned" in (finished / "trial" / "table.md").read_text("utf-8")


def test_a_second_run_with_the_folder_named_otherwise_does_nothing(finished, monkeypatch, capsys):
    monkeypatch.setattr(jobs, "run", lambda arguments: pytest.fail("trained again"))
    monkeypatch.setattr("vitrel.evaluate.run._share", lambda *_: pytest.fail("evaluated again"))
    monkeypatch.chdir(finished.parent)
    tool.main([f"{finished.name}/trial.yaml", "--out", finished.name, "--no-report", "--jobs", "1"])
    assert capsys.readouterr().out.count("trained already") == 8


def test_what_is_missing_is_tuned_alone_and_comes_out_the_same(finished, tmp_path, capsys):
    for label in ("rope", "rope-tuned"):
        for seed in (0, 1):
            shutil.copytree(finished / "trial" / f"{label}-seed{seed}", tmp_path / "trial" / f"{label}-seed{seed}")
    shutil.rmtree(tmp_path / "trial" / "rope-tuned-seed1")
    settings = tmp_path / "trial" / "rope-tuned-seed0" / "train.yaml"
    settings.write_text(settings.read_text().replace(str(finished), str(tmp_path)))
    compare(tmp_path, "--no-report", models=CONFIG["models"][2:4])
    printed = capsys.readouterr().out
    assert printed.count("trained already") == 3 and "rope-tuned-seed1: training for 2 epochs" in printed
    old, new = weights(finished, "rope-tuned", 1), weights(tmp_path, "rope-tuned", 1)
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_two_jobs_wait_for_the_source(tmp_path):
    def main(folder):
        compare(folder, "--no-report", "--jobs", "2", models=CONFIG["models"][:2], seeds=[0])

    assert status(in_child(tmp_path, lambda: fork_processes_of(jobs, processes), main)) == 0
    source, tuned = weights(tmp_path, "absolute", 0), weights(tmp_path, "absolute-tuned", 0)
    assert all(torch.equal(source[name], tuned[name]) for name in source if not trained(name) and name != POSITION)
    assert set(pd.read_csv(tmp_path / "trial" / "results.csv")["label"]) == {"absolute", "absolute-tuned"}


def test_a_source_trained_anew_is_noticed(finished, tmp_path):
    for label in ("rope", "rope-tuned"):
        shutil.copytree(finished / "trial" / f"{label}-seed0", tmp_path / "trial" / f"{label}-seed0")
    path = tmp_path / "trial" / "rope-seed0" / "checkpoints" / "last.ckpt"
    source = read(path)
    source["state_dict"]["model.cls_token"].add_(1.0)
    torch.save(source, path)
    with pytest.raises(
        SystemExit, match=r"rope-tuned-seed0 holds a run of another configuration \(other weights in .*last\.ckpt, SHA-256"
    ):
        compare(tmp_path, "--no-report", models=CONFIG["models"][2:4], seeds=[0])
