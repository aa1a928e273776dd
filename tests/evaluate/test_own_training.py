"""A model of a comparison with training of its own, on top of the comparison's."""

import sys
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from helpers import command
from vitrel.evaluate.comparison import load_comparison
from vitrel.train import several

TRAIN = {
    "trainer": {"max_epochs": 2, "precision": "32-true"},
    "data": {"size": 64, "batch_size": 16, "train_sizes": [48, 64], "augment": {"jitter": 0.3, "scale": [0.5, 1.0]}},
    "model": {"optim": {"lr": 1e-3, "weight_decay": 0.1}, "model_args": {"drop_path_rate": 0.1, "depth": 3}},
}
DECIDED = [("trainer", "default_root_dir"), ("data", "data"), ("data", "seed"), ("model", "model")]
NAME = "vitrel_vit_n8_none"
EVALUATE = {"sizes": [64, 96], "protocols": ["scale"], "n": 10}


@pytest.fixture
def load(tmp_path):
    """load(entry's train, **changes): the comparisons of two models, the second one of which, called own, has that train."""

    def write(own, entry=None, **changes):
        models = [NAME, {"name": NAME, "label": "own", "train": own} | (entry or {})]
        config = {"name": "trial", "data": "shapes", "models": models, "seeds": [0], "train": TRAIN, "evaluate": EVALUATE}
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump(deepcopy(config | changes)))
        return load_comparison(path)

    return write


def trainings(found):
    """What each model is trained with: by label."""
    return {entry.label: found.training(entry, 0, Path("here")) for entry in found.entries}


def test_it_is_merged_over_that_of_the_comparison(load):
    train = {
        "trainer": {"max_epochs": 5, "limit_val_batches": 1},
        "data": {"size": [96, 128], "train_sizes": [32], "augment": {"crop": "center", "scale": [0.2, 1.0]}},
        "model": {"optim": {"lr": 0.01}, "tuning": {"trainable": ["norm", "head"]}},
    }
    (found,) = load(train)
    expected = {
        "seed_everything": 0,
        "trainer": {"max_epochs": 5, "precision": "32-true", "limit_val_batches": 1, "default_root_dir": "here"},
        "data": {
            "size": [96, 128],
            "batch_size": 16,
            "train_sizes": [32],
            "augment": {"jitter": 0.3, "scale": [0.2, 1.0], "crop": "center"},
            "data": "shapes",
        },
        "model": {
            "optim": {"lr": 0.01, "weight_decay": 0.1},
            "tuning": {"trainable": ["norm", "head"]},
            "model_args": {"drop_path_rate": 0.1, "depth": 3},
            "model": NAME,
        },
    }
    assert trainings(found)["own"] == expected


@pytest.mark.parametrize("train", [{"trainer": {"max_epochs": 9}}, {"data": {"augment": {"crop": "simple"}}}, {}])
def test_it_is_for_this_model_alone(load, train):
    plain = {
        "seed_everything": 0,
        "trainer": TRAIN["trainer"] | {"default_root_dir": "here"},
        "data": TRAIN["data"] | {"data": "shapes"},
        "model": TRAIN["model"] | {"model": NAME},
    }
    (found,) = load(train)
    for _ in range(2):  # asking changes nothing
        assert trainings(found)[NAME] == plain
        assert (trainings(found)["own"] == plain) == (train == {})


def test_nothing_and_other_kinds_of_values_replace(load):
    (found,) = load({"data": {"augment": None, "train_sizes": None}, "model": {"optim": {"lr": None}}})
    own = trainings(found)["own"]
    assert own["data"]["augment"] is None and own["data"]["train_sizes"] is None
    assert own["model"]["optim"] == {"lr": None, "weight_decay": 0.1}
    (found,) = load({"data": {"augment": {"crop": "center"}}}, train=TRAIN | {"data": {"size": 64, "augment": None}})
    assert trainings(found)["own"]["data"] == {"size": 64, "augment": {"crop": "center"}, "data": "shapes"}


def test_arguments_of_the_model_win(load):
    train = {"model": {"model_args": {"drop_path_rate": 0.2, "num_heads": 2, "position": "table"}}}
    (found,) = load(train, {"model_args": {"drop_path_rate": 0.3}, "position": "rope_mixed"})
    expected = {"drop_path_rate": 0.3, "depth": 3, "num_heads": 2, "position": "rope_mixed"}
    assert trainings(found)["own"]["model"]["model_args"] == expected
    (found,) = load(train)
    assert trainings(found)["own"]["model"]["model_args"] == expected | {"drop_path_rate": 0.2, "position": "table"}


def test_it_is_merged_over_that_of_each_data_set(load):
    place = {"data": "shapes-place", "train": {"trainer": {"max_epochs": 7}, "data": {"n_train": 64, "size": 32}}}
    shapes, place = load({"trainer": {"max_epochs": 5}, "data": {"batch_size": 8}}, data=["shapes", place])
    own, other = trainings(shapes)["own"], trainings(place)["own"]
    assert [own["trainer"]["max_epochs"], other["trainer"]["max_epochs"]] == [5, 5]
    assert "n_train" not in own["data"] and other["data"]["n_train"] == 64 and other["data"]["data"] == "shapes-place"
    assert [own["data"]["size"], other["data"]["size"], other["data"]["batch_size"]] == [64, 32, 8]
    assert trainings(place)[NAME]["trainer"]["max_epochs"] == 7


@pytest.mark.parametrize(("section", "key"), DECIDED)
def test_what_the_comparison_decides_is_refused_with_the_label(load, section, key):
    with pytest.raises(ValueError, match=rf"trial.yaml.*\bown\b.*{section}.{key} cannot be set here"):
        load({section: {key: 1}})
    with pytest.raises(ValueError, match=rf"train.{section}.{key} cannot be set here"):
        load({}, train=TRAIN | {section: TRAIN[section] | {key: 1}})


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"optim": {}}, "unknown key 'optim'"),
        ({"trainer": {"max_epochs": 0}}, "max_epochs must be given, 1 or more, got 0"),
        ({"data": {"size": 0}}, "data.size must be given"),
        ({"data": {"size": [64]}}, "data.size must be given"),
        ({"trainer": 3}, "trainer"),
        ({"data": None}, "data"),
        (["trainer"], "keys and values are expected"),
        (3, "keys and values are expected"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(load, train, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(train)
    assert "trial.yaml" in str(caught.value) and "own" in str(caught.value)


@pytest.mark.parametrize("data", ["shapes", ["shapes-place", "shapes"]])
@pytest.mark.parametrize("size", [256, [256, 320]])
def test_every_size_is_checked_before_the_first_is_trained(load, tmp_path, monkeypatch, data, size):
    """Objects that are drawn for 256 pixels do not fit into 64; the own size is that of the last model."""
    trained = []
    monkeypatch.setattr(several, "train_one", lambda config, place: trained.append(place) or sys.exit("trained"))
    evaluate = EVALUATE | {"sizes": [64], "protocols": ["canvas"]}
    for own, message in (({"data": {"size": size}}, r"^error: evaluation at 64x64, .*objects do not fit"), ({}, "^trained$")):
        load(own, data=data, evaluate=evaluate)
        with pytest.raises(SystemExit, match=message):
            command("compare").main([str(tmp_path / "trial.yaml"), "--out", str(tmp_path), "--jobs", "1"])
        assert len(trained) == (own == {})
