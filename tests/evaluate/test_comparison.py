from pathlib import Path

import pytest
import yaml

from helpers import ROOT
from vitrel.evaluate.comparison import load_comparison

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
    aid = {"name": "vitrel_vit_n8_table", "label": "aid", "model_args": {"position_args": {"logit_scale": "log_n"}}}
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
        ({"seeds": [0, 0]}, r"seeds is a list of different whole numbers such as \[0, 1, 2\], got \[0, 0\]"),
        ({"seeds": [True]}, "different whole numbers"),
        ({"train": {"optim": {}}}, "train: unknown key 'optim'; did you mean"),
        ({"train": {"trainer": {}, "data": {"size": 64}}}, "max_epochs must be given, 1 or more, got None"),
        ({"train": {"trainer": {"max_epochs": 1}, "data": {"batch_size": 1}}}, "data.size must be given"),
        ({"train": {"trainer": {"max_epochs": 1}}}, "train.data is missing or no section"),
        (
            {"train": CONFIG["train"] | {"model": {"model": "vitrel_swin_n"}}},
            "train.model.model cannot be set here: models are",
        ),
        ({"evaluate": {"size": [64]}}, "evaluate: unknown key 'size'; did you mean 'sizes'"),
        ({"evaluate": {"sizes": 64}}, "evaluate.sizes is a list such as"),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"img_size": 128}, "claim 1: 128x128 is not evaluated, only 64x64, 64x96"),
        ({"protocol": "zoom"}, "claim 1: the protocol 'zoom' is not evaluated, only scale, canvas"),
        ({"shift": 4}, r"content is shifted at 64x64 in the scale protocol alone, by evaluate.shifts \(2, 8\)"),
        ({"shift": 8, "img_size": "64x96"}, "content is shifted at 64x64 in the scale protocol alone"),
        ({"better": "vit"}, "claim 1 names vit, which is the label of no model here"),
    ],
)
def test_claims_about_what_is_not_evaluated_are_refused_before_training(load, changes, message):
    claim = {"text": "It is better.", "better": "rope", "than": 25, "img_size": 64, "shift": 8}
    evaluate = CONFIG["evaluate"] | {"shifts": [2, 8]}
    assert load(claims=[claim], evaluate=evaluate).claims[0].shift == 8
    with pytest.raises(ValueError, match=message):
        load(claims=[claim | {"shift": None} | changes], evaluate=evaluate)


def test_what_is_no_configuration_is_refused(load, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no configuration at .*none\.yaml; configs/quickstart\.yaml is one"):
        load_comparison(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="keys and values are expected"):
        load("- a\n- b\n")
    with pytest.raises(ValueError, match="is not plain YAML"):
        load("name: [a\n")
    with pytest.raises(ValueError, match="is not plain YAML"):
        load("name: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match=r"trial\.yaml: nested too deeply"):
        load(f"name: {'[' * 100_000}{']' * 100_000}")


def test_data_is_found_from_here_or_beside_the_file(load, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load(data="images").data == "../images"
    monkeypatch.chdir(tmp_path)
    assert load(data="images").data == "images"
    with pytest.raises(
        FileNotFoundError, match=r"no data folder missing .*train/<class>/ and val/<class>/, or a built-in set: shapes,"
    ):
        load(data="missing")


def test_where_the_data_lie_may_be_said_beside_the_file(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("images", "elsewhere/flowers", "elsewhere/images"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no data folder path/to/flowers .*--data path/to/flowers"):
        load(data="path/to/flowers")
    path = tmp_path / "trial.yaml"

    def found(asked):
        return [(one.name, one.data) for one in load_comparison(path, asked)]

    # one data set may lie anywhere
    assert found(str(tmp_path / "elsewhere" / "images")) == [("trial", str(tmp_path / "elsewhere" / "images"))]
    assert found("./images") == [("trial", "./images")]
    path.write_text(path.read_text().replace("data: path/to/flowers", "data: [path/to/flowers, images, shapes]"))
    assert found("elsewhere/flowers") == [("trial/flowers", "elsewhere/flowers")]
    assert found("images") == [("trial/images", "images")]  # the others need not be there
    for asked, told in [("./elsewhere", "its name"), ("none/flowers", "no such folder"), ("birds", "--data birds")]:
        with pytest.raises(ValueError, match="the data of this configuration are flowers, images, shapes") as caught:
            found(asked)
        assert told in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_no_configuration_names_a_place_outside_the_checkout(path):
    assert "../" not in path.read_text("utf-8")


@pytest.mark.parametrize("name", ["quickstart", "imagenette96", "shapes_encodings", "study_shapes"])
def test_the_configurations_of_the_repository_are_valid(name, request, monkeypatch):
    path = request.config.rootpath / "configs" / f"{name}.yaml"
    monkeypatch.setattr("vitrel.evaluate.comparison._data", lambda data, path: data)
    for found in load_comparison(path):
        assert found.name.split("/")[0] == name and len(found.entries) >= 4
    header = [line for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
    for word in ("Command", "Hardware", "Time", "Expected", "Measured"):
        assert any(line.startswith(f"# {word}:") for line in header)
