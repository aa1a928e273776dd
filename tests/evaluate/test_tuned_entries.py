"""A model of a comparison that starts from the trained weights of another: what is read, kept and refused."""

import pytest
import yaml

from vitrel.evaluate.comparison import load_comparison

NAME, OTHER = "vitrel_vit_n8_none", "vitrel_vit_n8_table"
FINER = {"data": {"size": 96, "augment": {"crop": "center"}}, "model": {"tuning": {"trainable": ["norm", "head"]}}}
BASE = {"name": NAME, "label": "base", "position": "rope_mixed"}
TUNED = BASE | {"label": "tuned", "tuned_from": "base", "train": FINER}
AID = BASE | {"label": "aid", "weights_of": "base", "model_args": {"position_args": {"scaling": "ntk"}}}
TUNED_AID = AID | {"label": "tuned-aid", "weights_of": "tuned"}
TABLE = {"name": OTHER, "label": "table"}


@pytest.fixture
def load(tmp_path):
    def write(*models, **changes):
        config = {"name": "trial", "data": "shapes", "models": list(models), "seeds": [0, 1]}
        config |= {"train": {"trainer": {"max_epochs": 1}, "data": {"size": 64}}, "evaluate": {"sizes": [64], "n": 10}}
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump(config | changes))
        return load_comparison(path)

    return write


def labels(found):
    return [entry.label for entry in found.entries]


@pytest.mark.parametrize("models", [(BASE, TUNED, TUNED_AID), (TUNED_AID, TUNED, BASE)])
def test_an_entry_may_be_tuned_from_another_and_lend_its_weights(load, models):
    (found,) = load(*models)
    assert labels(found) == [model["label"] for model in models]
    entries = {entry.label: entry for entry in found.entries}
    assert [entries[label].tuned_from for label in ("base", "tuned", "tuned-aid")] == [None, "base", None]
    assert [entries[label].weights_of for label in ("base", "tuned", "tuned-aid")] == [None, None, "tuned"]


def test_several_may_be_tuned_from_one(load):
    (found,) = load(BASE, TUNED, TUNED | {"label": "again"}, TABLE, TABLE | {"label": "finer", "tuned_from": "table"})
    assert [entry.tuned_from for entry in found.entries] == [None, "base", "base", None, "table"]


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
def test_what_cannot_be_a_source_is_refused_with_both_labels(load, entry, source, last):
    others = [BASE, AID, TABLE, TUNED | {"label": "first"}]
    load(*others)
    with pytest.raises(ValueError, match=rf"trial.yaml.*\btuned\b.*tuned_from.*{source}"):
        load(*([*others, entry] if last else [entry, *others]))


def test_a_tuned_model_lends_its_weights_to_its_own_kind_alone(load):
    with pytest.raises(ValueError, match=rf"aid has weights_of: tuned, but no {OTHER} with that label is trained"):
        load(BASE, TUNED, {"name": OTHER, "label": "aid", "weights_of": "tuned"})


@pytest.mark.parametrize(
    ("only", "kept"),
    [
        (["base"], ["base", "aid", "tuned", "tuned-aid"]),
        (["base", "table"], ["base", "aid", "tuned", "tuned-aid", "table"]),
        (["table"], ["table"]),
        (["base", "tuned"], ["base", "aid", "tuned", "tuned-aid"]),
    ],
)
def test_only_keeps_what_is_tuned_from_a_kept_one(load, only, kept):
    models = [BASE, AID, TUNED, TUNED_AID, TABLE]
    for order in (models, models[::-1]):
        (found,) = load(*order, data=[{"data": "shapes", "only": only}])
        assert set(labels(found)) == set(kept) and len(labels(found)) == len(kept)
        assert labels(found) == [model["label"] for model in order if model["label"] in kept]


def test_only_does_not_keep_a_tuned_one_without_its_source(load):
    with pytest.raises(ValueError, match=r"data, only: .*tuned"):
        load(BASE, TUNED, TABLE, data=[{"data": "shapes", "only": ["table", "tuned"]}])


def test_training_of_its_own_is_read_at_each_data_set(load):
    place = {"data": "shapes-place", "train": {"data": {"n_train": 32}}}
    for found in load(BASE, TUNED, data=["shapes", place]):
        assert found.train_size == (64, 64) and labels(found) == ["base", "tuned"]
        assert found.entries[1].train == FINER


def test_a_source_twice_and_training_of_what_is_not_trained_are_refused(load):
    with pytest.raises(ValueError, match=r"tuned starts from base: leave model\.tuning\.init_from out"):
        load(BASE, TUNED | {"train": {"model": {"tuning": {"init_from": "other.ckpt"}}}})
    with pytest.raises(ValueError, match="aid has the weights of base, it is not trained: leave its train out"):
        load(BASE, AID | {"train": FINER})


def test_what_is_tuned_is_built_as_its_source(load, tmp_path):
    (found,) = load(BASE | {"model_args": {"depth": 2}}, {"name": NAME, "label": "tuned", "tuned_from": "base", "train": FINER})
    arguments = [found.training(entry, 0, tmp_path)["model"]["model_args"] for entry in found.entries]
    assert arguments == [{"position": "rope_mixed", "depth": 2}] * 2
