"""The configuration of a comparison: models, trainings of their own, tuned and borrowed weights, data sets."""

from pathlib import Path

import pytest
import torch
import yaml

from helpers import ROOT, each
from vitrel.cli.compare import compare
from vitrel.compare.config import load_comparison
from vitrel.compare.jobs import epochs_done
from vitrel.compare.models import untrained_models

ROPE = {"name": "vitrel_vit_n8_none", "label": "rope", "model_args": {"position": "rope_mixed"}}
CONFIG = {
    "name": "trial",
    "data": "shapes",
    "models": [
        "vitrel_vit_n8_table",
        ROPE,
    ],
    "seeds": [0, 1],
    "train": {
        "trainer": {"max_epochs": 2},
        "data": {"size": 64, "augment": {"jitter": 0.3}},
        "model": {"model_args": {"drop_path_rate": 0.1}, "optim": {"lr": 0.1}},
    },
    "evaluate": {"sizes": [64, "64x96"], "n": 10},
}


@pytest.fixture
def load(tmp_path):
    def write(text=None, data=None, **changes):
        path = tmp_path / "trial.yaml"
        path.write_text(text if text is not None else yaml.safe_dump(CONFIG | changes))
        found = load_comparison(path, tmp_path / "runs", data)
        return found[0] if len(found) == 1 else found

    return write


def test_a_configuration_is_read_whole(load, tmp_path):
    found = load()
    assert (found.name, found.data, found.evaluated, found.folder) == ("trial", "shapes", "shapes", tmp_path / "runs" / "trial")
    assert [(run.label, run.seed) for run in found.runs] == [
        (label, seed) for label in ("vitrel_vit_n8_table", "rope") for seed in (0, 1)
    ]
    assert found.settings == {"sizes": [64, "64x96"], "n": 10} and {run.seed for run in load(seeds=3).runs} == {3}
    rope = found.runs[3]
    assert (
        rope.folder == tmp_path / "runs" / "trial" / "rope-seed1"
        and rope.checkpoint == rope.folder / "checkpoints" / "last.ckpt"
    )
    assert rope.training == {
        "seed_everything": 1,
        "trainer": {"max_epochs": 2, "default_root_dir": str(rope.folder)},
        "data": {"size": 64, "augment": {"jitter": 0.3}, "data": "shapes"},
        "model": {
            "optim": {"lr": 0.1},
            "model": "vitrel_vit_n8_none",
            "model_args": {"drop_path_rate": 0.1, "position": "rope_mixed"},
        },
    }


def test_training_of_its_own_is_merged_over_that_of_the_comparison(load):
    train = {
        "trainer": {"max_epochs": 5},
        "data": {"size": [96, 128], "augment": {"crop": "center"}},
        "model": {"optim": {"wd": 0.2}},
    }
    own, plain = load(
        models=[{"name": "vitrel_vit_n8_none", "label": "own", "train": train}, "vitrel_vit_n8_none"], seeds=[0]
    ).runs
    assert own.training["trainer"]["max_epochs"] == 5 and plain.training["trainer"]["max_epochs"] == 2
    assert own.training["data"] == {"size": [96, 128], "augment": {"jitter": 0.3, "crop": "center"}, "data": "shapes"}
    assert own.training["model"]["optim"] == {"lr": 0.1, "wd": 0.2} and plain.training["model"]["optim"] == {"lr": 0.1}


def test_several_data_sets_are_a_comparison_each_with_what_differs_there(load):
    own = {"data": "shapes-place", "seeds": [4], "models": ["vitrel_swin_n"], "train": {"data": {"n_train": 64}}}
    shapes, place = load(yaml.safe_dump(CONFIG | {"data": ["shapes", own]}))
    assert [
        (one.name, one.data, {run.seed for run in one.runs}, {run.label for run in one.runs}) for one in (shapes, place)
    ] == [
        ("trial/shapes", "shapes", {0, 1}, {"vitrel_vit_n8_table", "rope"}),
        ("trial/shapes-place", "shapes-place", {4}, {"vitrel_swin_n"}),
    ]
    assert place.runs[0].training["data"]["n_train"] == 64 and "n_train" not in shapes.runs[0].training["data"]


NONE = {"name": "vitrel_vit_n8_none", "model_args": {"position": "rope_mixed"}}


def test_weights_of_another_and_tuning_from_another(load, tmp_path):
    models = [
        NONE
        | {
            "label": "tuned",
            "tuned_from": "base",
            "train": {"data": {"size": 96}, "model": {"tuning": {"trainable": ["head"]}}},
        },
        NONE | {"label": "base", "seeds": [2, 1]},
        NONE | {"label": "aid", "weights_of": "tuned", "model_args": {"position_args": {"policy": "ntk"}}},
    ]
    first, tuned, _, base, _, aid = load(models=models).runs  # of the seeds of what they start from
    source = tmp_path / "runs" / "trial" / "base-seed1" / "checkpoints" / "last.ckpt"
    assert base.checkpoint == source and not base.tuned and base.options is None
    assert tuned.training["model"]["tuning"] == {"trainable": ["head"], "init_from": str(source)} and tuned.tuned
    assert first.training["model"]["tuning"]["init_from"] == str(source).replace("seed1", "seed2")
    assert (aid.checkpoint, aid.training, aid.seed) == (tuned.checkpoint, tuned.training, 1)
    assert aid.options == {"position_args": {"policy": "ntk"}} and tuned.training["model"]["model_args"]["position"]
    with pytest.raises(ValueError, match="tuned needs the weights of nothing, which is no label of a model here"):
        load(models=[models[0] | {"tuned_from": "nothing"}, models[1]])


@each(
    ("changes", "message"),
    [
        ({"modles": []}, "unknown key 'modles': did you mean models"),
        ({"models": []}, "models is missing or empty; needed are name, data, models, seeds, train, evaluate"),
        ({"models": [{"nmae": "vitrel_swin_n"}]}, "models: unknown key 'nmae': did you mean name"),
        ({"models": [{"label": "swin"}]}, "models: name is missing"),
        ({"models": ["vitrel_swin_n"] * 2}, "two models have the same label"),
        ({"train": {"trainer": {}, "data": {"size": 64}}}, "needs train.trainer.max_epochs and train.data.size"),
        ({"evaluate": {"size": [64]}}, "evaluate: unknown key 'size': did you mean sizes"),
        ({"evaluate": {"sizes": ["64*96"]}}, r"'64\*96' is not an image size: write pixels as 96"),
        ({"evaluate": {"batch_size": "x"}}, "evaluate: a value has another type"),
        ({"models": [{"name": "vitrel_swin_n", "model_args": None}]}, "model_args of vitrel_swin_n, got None"),
        ({"name": "../../y"}, "name: a folder is named by it"),
        ({"models": [{"name": "vitrel_swin_n", "label": "../y"}]}, "label: a folder is named by it"),
        ({"models": [{"name": "vitrel_swin_n", "label": " "}]}, "label: a folder is named by it, .* not empty, .* got ' '"),
        ({"evaluate": {"sizes": [64], "protocols": ["zoom"]}}, "unknown protocol 'zoom'"),
        ({"models": [ROPE, ROPE | {"label": "aid", "weights_of": ["rope"]}]}, r"weights_of of aid: .* got \['rope'\]"),
        ({"models": [ROPE, ROPE | {"label": "aid", "tuned_from": {"rope": 1}}]}, "tuned_from of aid: .* got {'rope': 1}"),
    ],
)
def test_every_mistake_is_named(load, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(**changes)
    assert "trial.yaml" in str(caught.value)


def test_one_model_the_seed_zero_and_no_data_of_the_evaluation(load):
    found = load(models="vitrel_swin_n", seeds=0, evaluate={"data": None, "n": 10})
    assert [(run.label, run.seed) for run in found.runs] == [("vitrel_swin_n", 0)] and found.evaluated == "shapes"
    [run] = load(models=[{"name": "vitrel_swin_n", "seeds": 0}], seeds=3).runs
    assert run.seed == 0
    with pytest.raises(ValueError, match=r"trial\.yaml, data: the name or folder of a data set is expected, got 5"):
        load(yaml.safe_dump(CONFIG | {"data": ["shapes", 5]}))


def test_a_tuned_model_with_a_new_head_is_built_before_training(load):
    tuned = {"label": "tuned", "tuned_from": "base", "train": {"model": {"tuning": {"reset_head": True}}}}
    found = untrained_models(load(models=[NONE | {"label": "base"}, NONE | tuned]))
    assert [model.label for model in found] == ["base", "tuned"]


def test_what_is_no_configuration_is_refused(load):
    with pytest.raises(ValueError, match="keys and values are expected"):
        load("- a\n- b\n")
    with pytest.raises(ValueError, match="is not plain YAML"):
        load("name: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match=r"trial\.yaml: .* the key n is given twice, in line 3 and in line 4"):
        load("name: a\nevaluate:\n  n: 1\n  n: 2\n")


def test_a_checkpoint_of_another_trainer_is_named(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"last\.ckpt is no checkpoint of vitrel train"):
        epochs_done(tmp_path / "last.ckpt")


def test_data_are_those_of_the_file_or_of_the_command(load):
    one, several = (
        yaml.safe_dump(CONFIG | {"data": data}) for data in ("path/to/flowers", ["path/to/flowers", "path/to/images", "shapes"])
    )
    assert load(one).data == "path/to/flowers" and load(one, "./images").data == "./images"  # whatever its name
    assert load(several, "elsewhere/flowers").data == "elsewhere/flowers"
    assert load(several, "images").name == "trial/images"
    with pytest.raises(ValueError, match=r"--data \./elsewhere: .* are flowers, images, shapes"):
        load(several, "./elsewhere")
    found = load(evaluate=CONFIG["evaluate"] | {"data": "labeled"})
    assert (found.data, found.evaluated, found.runs[0].training["data"]["data"]) == ("shapes", "labeled", "shapes")


def test_the_configurations_of_the_repository_are_valid():
    for path in (ROOT / "configs").glob("*.yaml"):
        for found in load_comparison(path, Path("runs")):
            assert found.name.split("/")[0] == path.stem and len(found.runs) >= 4
        header = [line for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
        for word in ("Command", "Hardware", "Time", "Expected", "Measured"):
            assert any(line.startswith(f"# {word}:") for line in header), (path.name, word)


def test_of_a_seed_the_longest_training_comes_first_and_what_is_tuned_last(load, monkeypatch):
    """At the end the longest would run alone."""
    order = []
    monkeypatch.setattr("vitrel.compare.jobs.train_all", lambda runs, jobs: order.append([folder.name for folder in runs]))
    monkeypatch.setattr("vitrel.compare.models.evaluate", lambda comparison, how: None)
    images = {"few": 10, "all": None, "many": 99}
    models = [ROPE | {"label": "tuned", "tuned_from": "few"}]
    models += [ROPE | {"label": name, "train": {"data": {"n_train": n}}} for name, n in images.items()]
    compare(load(models=models, seeds=[3, 1]), 1, {})
    assert order == [
        [f"{name}-seed{seed}" for seed in (3, 1) for name in ("all", "many", "few")], ["tuned-seed3", "tuned-seed1"]
    ]  # fmt: skip
