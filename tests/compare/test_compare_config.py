"""The configuration of a comparison: models, trainings of their own, tuned and borrowed weights, data sets."""

import sys
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from helpers import command
from vitrel.compare import jobs
from vitrel.compare.config import load_comparison

CONFIG = {
    "name": "trial",
    "data": "shapes",
    "models": ["vitrel_vit_n8_table", {"name": "vitrel_vit_n8_none", "position": "rope_mixed", "label": "rope"}],
    "seeds": [0, 1],
    "train": {"trainer": {"max_epochs": 2}, "data": {"size": 64}, "model": {"model_args": {"drop_path_rate": 0.1}}},
    "evaluate": {"sizes": [64, "64x96"], "n": 10},
}


@pytest.fixture
def load(tmp_path):
    def write(text=None, **changes):
        path = tmp_path / "trial.yaml"
        path.write_text(text if text is not None else yaml.safe_dump(CONFIG | changes))
        found = load_comparison(path)
        return found[0] if len(found) == 1 else found

    return write


def test_a_configuration_is_read_whole(load):
    found = load()
    assert (found.name, found.data, found.seeds, found.checkpoint) == ("trial", "shapes", (0, 1), "last")
    assert [(entry.name, entry.label) for entry in found.entries] == [
        ("vitrel_vit_n8_table", "vitrel_vit_n8_table"),
        ("vitrel_vit_n8_none", "rope"),
    ]
    assert found.sweep.sizes == ((64, 64), (64, 96)) and found.sweep.n == 10 and found.sweep.protocols == ("scale", "canvas")
    assert load(seeds=3).seeds == (3,)


def test_several_data_sets_are_a_comparison_each_with_what_differs_there(load):
    own = {"data": "shapes-place", "seeds": [4], "train": {"data": {"n_train": 64}}, "evaluate": {"sizes": [64]}}
    shapes, place = load(data=["shapes", own])
    assert [(c.name, c.data, c.seeds) for c in (shapes, place)] == [
        ("trial/shapes", "shapes", (0, 1)),
        ("trial/shapes-place", "shapes-place", (4,)),
    ]
    assert (shapes.sweep.data, shapes.sweep.sizes, place.sweep.sizes) == ("shapes", ((64, 64), (64, 96)), ((64, 64),))
    assert place.sweep.n == 10 and shapes.train["data"] == {"size": 64} and place.train["data"] == {"size": 64, "n_train": 64}
    assert place.training(place.entries[0], 4, Path("a"))["data"] == {"size": 64, "n_train": 64, "data": "shapes-place"}
    with pytest.raises(ValueError, match="two data sets are called trial/shapes; rename one of the folders"):
        load(data=["shapes", "shapes"])
    assert [entry.label for entry in load(data=[{"data": "shapes", "only": ["rope"]}]).entries] == ["rope"]
    with pytest.raises(ValueError, match="data, only: no model that is trained here is called table"):
        load(data=[{"data": "shapes", "only": ["table"]}])
    with pytest.raises(ValueError, match="data: unknown key 'sizes'; did you mean"):
        load(data=[{"data": "shapes", "sizes": [64]}])


def test_an_entry_may_have_the_weights_of_another(load):
    aid = {"name": "vitrel_vit_n8_table", "label": "aid", "model_args": {"position_args": {"temperature": "log_n"}}}
    found = load(models=["vitrel_vit_n8_table", aid | {"weights_of": "vitrel_vit_n8_table"}])
    assert [entry.weights_of for entry in found.entries] == [None, "vitrel_vit_n8_table"]
    with pytest.raises(ValueError, match="aid has weights_of: table, but no vitrel_vit_n8_table with that label is trained"):
        load(models=["vitrel_vit_n8_table", aid | {"weights_of": "table"}])
    with pytest.raises(ValueError, match="but no vitrel_vit_n8_table with that label is trained here"):
        load(models=["vitrel_vit_n8_none", aid | {"weights_of": "vitrel_vit_n8_none"}])


def test_a_training_run_gets_model_data_seed_and_folder(load, tmp_path):
    found = load()
    assert found.training(found.entries[1], 1, tmp_path) == {
        "seed_everything": 1,
        "trainer": {"max_epochs": 2, "default_root_dir": str(tmp_path)},
        "data": {"size": 64, "data": "shapes"},
        "model": {"model": "vitrel_vit_n8_none", "model_args": {"drop_path_rate": 0.1, "position": "rope_mixed"}},
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modles": []}, "unknown key 'modles'; did you mean 'models'"),
        ({"models": []}, "models is missing or empty; a comparison needs name, data, models, seeds, train, evaluate"),
        ({"models": ["vitrel_vit_n8_tabel"]}, "unknown model 'vitrel_vit_n8_tabel'; the nearest are vitrel_vit_n8_table,"),
        ({"models": [{"nmae": "vitrel_swin_n"}]}, "models: unknown key 'nmae'; did you mean 'name'"),
        ({"models": ["vitrel_swin_n"] * 2}, "two models are called vitrel_swin_n; give each its own label"),
        ({"models": [{"name": "vitrel_swin_n", "label": "a/b"}]}, "label names a folder: letters, digits and"),
        ({"name": ".."}, "name names a folder"),
        ({"seeds": [0, 0]}, r"seeds must be a list of different whole numbers such as \[0, 1, 2\], got \[0, 0\]"),
        ({"seeds": [True]}, "different whole numbers"),
        ({"train": {"optim": {}}}, "train: unknown key 'optim'; did you mean"),
        ({"train": {"trainer": {}, "data": {"size": 64}}}, "max_epochs must be given, 1 or more, got None"),
        ({"train": {"trainer": {"max_epochs": 1}, "data": {"batch_size": 1}}}, "data.size must be given"),
        ({"train": {"trainer": {"max_epochs": 1}}}, "train.data is missing or not a section"),
        (
            {"train": CONFIG["train"] | {"model": {"model": "vitrel_swin_n"}}},
            "train.model.model cannot be set here: models are",
        ),
        ({"evaluate": {"size": [64]}}, "evaluate: unknown key 'size'; did you mean 'sizes'"),
        ({"evaluate": {"sizes": 64}}, "evaluate.sizes must be a list such as"),
        (
            {"evaluate": {"sizes": ["64*96"]}},
            r"'64\*96' is not an image size: write pixels as 96, or height x width as 160x224",
        ),
        ({"evaluate": {"sizes": [64], "protocols": ["zoom"]}}, "unknown protocol 'zoom'"),
        ({"evaluate": {"sizes": [64], "checkpoint": "first"}}, "evaluate.checkpoint is last or best, got 'first'"),
    ],
)
def test_every_mistake_is_named(load, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(**changes)
    assert "trial.yaml" in str(caught.value)


def test_what_is_no_configuration_is_refused(load, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no configuration at .*none\.yaml; vitrel/configs/quickstart\.yaml is one"):
        load_comparison(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="keys and values are expected"):
        load("- a\n- b\n")
    with pytest.raises(ValueError, match="is not plain YAML"):
        load("name: [a\n")
    with pytest.raises(ValueError, match="is not plain YAML"):
        load("name: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match=r"trial\.yaml: .* the key n is given twice, in line 3 and in line 4"):
        load("name: a\nevaluate:\n  n: 1\n  n: 2\n")


def test_data_is_found_from_here_or_beside_the_file(load, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load(data="images").data == "../images"
    monkeypatch.chdir(tmp_path)
    assert load(data="images").data == "images"
    with pytest.raises(
        FileNotFoundError, match=r"no data folder missing .*train/<class>/ and val/<class>/, or a built-in data set: shapes,"
    ):
        load(data="missing")


def test_where_the_data_lie_may_be_said_beside_the_file(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("images", "elsewhere/flowers", "elsewhere/images"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no data folder path/to/flowers .*--data path/to/flowers"):
        load(data="path/to/flowers")
    path = tmp_path / "trial.yaml"

    def found(requested):
        return [(one.name, one.data) for one in load_comparison(path, requested)]

    # one data set may lie anywhere
    assert found(str(tmp_path / "elsewhere" / "images")) == [("trial", str(tmp_path / "elsewhere" / "images"))]
    assert found("./images") == [("trial", "./images")]
    path.write_text(path.read_text().replace("data: path/to/flowers", "data: [path/to/flowers, images, shapes]"))
    assert found("elsewhere/flowers") == [("trial/flowers", "elsewhere/flowers")]
    assert found("images") == [("trial/images", "images")]  # the others need not be there
    for requested, reported in [
        ("./elsewhere", "one of these names"),
        ("none/flowers", "no such folder"),
        ("birds", "--data birds"),
    ]:
        with pytest.raises(ValueError, match="the data sets of this configuration are flowers, images, shapes") as caught:
            found(requested)
        assert reported in str(caught.value)


def test_the_evaluation_may_have_data_of_its_own(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("photographs", "elsewhere/photographs", "labeled"):
        (tmp_path / name).mkdir(parents=True)
    evaluate = CONFIG["evaluate"] | {"data": "labeled"}

    def found(comparison):
        return comparison.data, comparison.sweep.data, comparison.training(comparison.entries[0], 0, tmp_path)["data"]["data"]

    assert found(load(data="photographs")) == ("photographs",) * 3
    assert found(load(data="photographs", evaluate=evaluate)) == ("photographs", "labeled", "photographs")
    [moved] = load_comparison(tmp_path / "trial.yaml", "elsewhere/photographs")  # the data of training
    assert found(moved) == ("elsewhere/photographs", "labeled", "elsewhere/photographs")
    items = [{"data": "photographs", "evaluate": {"data": "labeled"}}, "shapes"]
    assert [found(one)[:2] for one in load(data=items)] == [("photographs", "labeled"), ("shapes", "shapes")]
    with pytest.raises(FileNotFoundError, match=r"no data folder none in .* for evaluate\.data"):
        load(data="photographs", evaluate=evaluate | {"data": "none"})
    with pytest.raises(ValueError, match=r"evaluate\.data must be a folder"):
        load(evaluate=evaluate | {"data": ["labeled"]})


@pytest.mark.parametrize("name", ["quickstart", "imagenette96", "shapes_encodings", "study_shapes", "study_imagenet"])
def test_the_configurations_of_the_repository_are_valid(name, request, monkeypatch):
    path = request.config.rootpath / "vitrel" / "configs" / f"{name}.yaml"
    monkeypatch.setattr("vitrel.compare.config._data", lambda data, path, key="data": data)
    for found in load_comparison(path):
        assert found.name.split("/")[0] == name and len(found.entries) >= 4
    header = [line for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
    for word in ("Command", "Hardware", "Time", "Expected", "Measured"):
        assert any(line.startswith(f"# {word}:") for line in header)


NAME, OTHER = "vitrel_vit_n8_none", "vitrel_vit_n8_table"

FINER = {"data": {"size": 96, "augment": {"crop": "center"}}, "model": {"tuning": {"trainable": ["norm", "head"]}}}

BASE = {"name": NAME, "label": "base", "position": "rope_mixed"}

TUNED = BASE | {"label": "tuned", "tuned_from": "base", "train": FINER}

AID = BASE | {"label": "aid", "weights_of": "base", "model_args": {"position_args": {"policy": "ntk"}}}

TUNED_AID = AID | {"label": "tuned-aid", "weights_of": "tuned"}

TABLE = {"name": OTHER, "label": "table"}


@pytest.fixture
def load_tuned(tmp_path):
    def write(*models, **changes):
        config = {"name": "trial", "data": "shapes", "models": list(models), "seeds": [0, 1]}
        config |= {"train": {"trainer": {"max_epochs": 1}, "data": {"size": 64}}, "evaluate": {"sizes": [64], "n": 10}}
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump(config | changes))
        return load_comparison(path)

    return write


def labels(found):
    return [entry.label for entry in found.entries]


@pytest.mark.parametrize("models", [(TUNED_AID, TUNED, BASE)])
def test_an_entry_may_be_tuned_from_another_and_lend_its_weights(load_tuned, models):
    (found,) = load_tuned(*models)
    assert labels(found) == [model["label"] for model in models]
    entries = {entry.label: entry for entry in found.entries}
    assert [entries[label].tuned_from for label in ("base", "tuned", "tuned-aid")] == [None, "base", None]
    assert [entries[label].weights_of for label in ("base", "tuned", "tuned-aid")] == [None, None, "tuned"]


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        (TUNED | {"tuned_from": "nothing"}, "nothing"),
        (TUNED | {"tuned_from": NAME}, NAME),  # a name is no label
        (TUNED | {"tuned_from": "aid"}, "aid"),
        (TUNED | {"tuned_from": "first"}, "first"),
        (TUNED | {"tuned_from": "tuned"}, "tuned"),
        (TUNED | {"tuned_from": "table"}, "table"),
        (TUNED | {"weights_of": "base"}, "base"),
        (TUNED | {"weights_of": "first"}, "base"),
        (TUNED | {"tuned_from": 3}, "3"),
        (TUNED | {"tuned_from": ""}, ""),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_what_cannot_be_a_source_is_refused_with_both_labels(load_tuned, entry, source, last):
    others = [BASE, AID, TABLE, TUNED | {"label": "first"}]
    load_tuned(*others)
    with pytest.raises(ValueError, match=rf"trial.yaml.*\btuned\b.*tuned_from.*{source}"):
        load_tuned(*([*others, entry] if last else [entry, *others]))


def runs(found):
    return [(entry.label, seed) for entry, seed in found.runs]


def test_an_entry_may_have_fewer_seeds_and_those_that_need_its_weights_have_them_too(load_tuned):
    (found,) = load_tuned(
        TUNED_AID, TABLE | {"seeds": 2}, BASE | {"seeds": [2, 0]}, TUNED, AID | {"seeds": [2]}, seeds=[0, 1, 2]
    )
    assert runs(found) == [
        ("tuned-aid", 0), ("tuned-aid", 2), ("table", 2), ("base", 0), ("base", 2), ("tuned", 0), ("tuned", 2), ("aid", 2)
    ]  # fmt: skip
    (found,) = load_tuned(BASE, TABLE)
    assert runs(found) == [("base", 0), ("base", 1), ("table", 0), ("table", 1)]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([BASE | {"seeds": [0, 2]}], r"base has the seed 2, but the comparison has only \[0, 1\]"),
        ([BASE | {"seeds": []}], r"base: seeds must be a list"),
        (
            [BASE | {"seeds": [0]}, AID | {"seeds": [1]}],
            r"aid has the seed 1, but base, whose weights it needs, has only \[0\]",
        ),
        ([BASE, TUNED | {"seeds": [0]}, TUNED_AID | {"seeds": [0, 1]}], r"tuned-aid has the seed 1, but tuned, "),
    ],
)
def test_seeds_that_are_not_trained_are_refused(load_tuned, models, message):
    with pytest.raises(ValueError, match=message):
        load_tuned(*models)


def test_a_tuned_model_lends_its_weights_to_its_own_kind_alone(load_tuned):
    with pytest.raises(ValueError, match=rf"aid has weights_of: tuned, but no {OTHER} with that label is trained"):
        load_tuned(BASE, TUNED, {"name": OTHER, "label": "aid", "weights_of": "tuned"})


@pytest.mark.parametrize(
    ("only", "kept"),
    [
        (["base"], ["base", "aid", "tuned", "tuned-aid"]),
        (["base", "table"], ["base", "aid", "tuned", "tuned-aid", "table"]),
        (["table"], ["table"]),
        (["base", "tuned"], ["base", "aid", "tuned", "tuned-aid"]),
    ],
)
def test_only_keeps_what_is_tuned_from_a_kept_one(load_tuned, only, kept):
    models = [BASE, AID, TUNED, TUNED_AID, TABLE]
    for order in (models, models[::-1]):
        (found,) = load_tuned(*order, data=[{"data": "shapes", "only": only}])
        assert set(labels(found)) == set(kept) and len(labels(found)) == len(kept)
        assert labels(found) == [model["label"] for model in order if model["label"] in kept]


def test_what_is_tuned_is_built_as_its_source(load_tuned, tmp_path):
    (found,) = load_tuned(
        BASE | {"model_args": {"depth": 2}}, {"name": NAME, "label": "tuned", "tuned_from": "base", "train": FINER}
    )
    arguments = [found.training(entry, 0, tmp_path)["model"]["model_args"] for entry in found.entries]
    assert arguments == [{"position": "rope_mixed", "depth": 2}] * 2


TRAIN = {
    "trainer": {"max_epochs": 2, "precision": "32-true"},
    "data": {"size": 64, "batch_size": 16, "train_sizes": [48, 64], "augment": {"jitter": 0.3, "scale": [0.5, 1.0]}},
    "model": {"optim": {"lr": 1e-3, "weight_decay": 0.1}, "model_args": {"drop_path_rate": 0.1, "depth": 3}},
}

DECIDED = [("trainer", "default_root_dir"), ("data", "data"), ("data", "seed"), ("model", "model")]

EVALUATE = {"sizes": [64, 96], "protocols": ["scale"], "n": 10}


@pytest.fixture
def load_own(tmp_path):
    """load_own(entry's train, **changes): the comparisons of two models; the second, called own, has that train."""

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


def test_it_is_merged_over_that_of_the_comparison(load_own):
    train = {
        "trainer": {"max_epochs": 5, "limit_val_batches": 1},
        "data": {"size": [96, 128], "train_sizes": [32], "augment": {"crop": "center", "scale": [0.2, 1.0]}},
        "model": {"optim": {"lr": 0.01}, "tuning": {"trainable": ["norm", "head"]}},
    }
    (found,) = load_own(train)
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
def test_it_is_for_this_model_alone(load_own, train):
    plain = {
        "seed_everything": 0,
        "trainer": TRAIN["trainer"] | {"default_root_dir": "here"},
        "data": TRAIN["data"] | {"data": "shapes"},
        "model": TRAIN["model"] | {"model": NAME},
    }
    (found,) = load_own(train)
    for _ in range(2):  # asking changes nothing
        assert trainings(found)[NAME] == plain
        assert (trainings(found)["own"] == plain) == (train == {})


@pytest.mark.parametrize(("section", "key"), DECIDED)
def test_what_the_comparison_decides_is_refused_with_the_label(load_own, section, key):
    with pytest.raises(ValueError, match=rf"trial.yaml.*\bown\b.*{section}.{key} cannot be set here"):
        load_own({section: {key: 1}})
    with pytest.raises(ValueError, match=rf"train.{section}.{key} cannot be set here"):
        load_own({}, train=TRAIN | {section: TRAIN[section] | {key: 1}})


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
def test_mistakes_are_named_before_anything_is_trained(load_own, train, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_own(train)
    assert "trial.yaml" in str(caught.value) and "own" in str(caught.value)


@pytest.mark.parametrize("data", [["shapes-place", "shapes"]])
@pytest.mark.parametrize("size", [[256, 320]])
def test_every_size_is_checked_before_the_first_is_trained(load_own, tmp_path, monkeypatch, data, size):
    """Objects that are drawn for 256 pixels do not fit into 64; the own size is that of the last model."""
    trained = []
    monkeypatch.setattr(jobs, "train_one", lambda config, place: trained.append(place) or sys.exit("trained"))
    evaluate = EVALUATE | {"sizes": [64], "protocols": ["canvas"]}
    for own, message in (({"data": {"size": size}}, r"^error: evaluation at 64x64, .*objects do not fit"), ({}, "^trained$")):
        load_own(own, data=data, evaluate=evaluate)
        with pytest.raises(SystemExit, match=message):
            command("compare").main([str(tmp_path / "trial.yaml"), "--out", str(tmp_path), "--jobs", "1"])
        assert len(trained) == (own == {})
