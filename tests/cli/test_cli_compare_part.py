"""`vitrel compare`: one of several data sets alone, and the order in which models are trained. Nothing is trained here."""

import re

import pytest
import yaml
from PIL import Image

from helpers import command
from vitrel.compare import jobs

CONFIG = {
    "name": "trial",
    "data": ["shapes", {"data": "shapes-place", "seeds": [7]}, "folders/animals"],
    "models": ["vitrel_vit_n8_absolute", {"name": "vitrel_vit_n8_none", "position": "rope_mixed", "label": "rope"}],
    "seeds": [4, 1, 2],
    "train": {"trainer": {"max_epochs": 1}, "data": {"size": 64}},
    "evaluate": {"sizes": [64], "n": 10},
}
TUNED = {"name": "vitrel_vit_n8_none", "position": "rope_mixed", "label": "tuned", "tuned_from": "rope"}


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """compare(*arguments, **changes): (runs in the order of their training, folders evaluated, what was printed)."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "folders" / "animals" / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "folders" / "animals" / split / name / "1.png")
    tool, trained, evaluated = command("compare"), [], []
    configs, photographs = {}, []

    def begin(config, place):
        trained.append(place.relative_to(tmp_path).as_posix())
        configs[trained[-1]] = config
        print("training for 1 epochs")
        return []

    def evaluate(comparison, how):
        evaluated.append(comparison.folder.relative_to(tmp_path).as_posix())
        run.photographs.append(how["photographs"])

    monkeypatch.setattr(jobs, "begin", begin)
    monkeypatch.setattr("vitrel.cli.compare.check", lambda comparison: None)
    monkeypatch.setattr("vitrel.compare.models.evaluate", evaluate)

    def run(*arguments, **changes):
        trained.clear(), evaluated.clear(), photographs.clear(), capsys.readouterr()
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump(CONFIG | changes))
        tool.main([str(path), "--out", str(tmp_path), "--jobs", "1", *arguments])
        return list(trained), list(evaluated), capsys.readouterr().out

    run.trained, run.configs, run.photographs = trained, configs, photographs
    return run


def test_one_data_set_alone(compare, tmp_path):
    for name, seeds in (("shapes", (4, 1, 2)), ("shapes-place", (7,)), ("animals", (4, 1, 2))):
        trained, evaluated, printed = compare("--data", name)
        assert evaluated == [f"trial/{name}"] and f"in {tmp_path / 'trial' / name}\n" in printed
        labels = ("vitrel_vit_n8_absolute", "rope")
        assert trained == [f"trial/{name}/{label}-seed{seed}" for seed in seeds for label in labels]


def test_all_of_them_without_it(compare):
    trained, evaluated, _ = compare()
    assert evaluated == ["trial/shapes", "trial/shapes-place", "trial/animals"] and len(trained) == 6 + 2 + 6


@pytest.mark.parametrize("name", ["animal", "shapes-corner", ""])
def test_an_unknown_name_lists_those_there_are(compare, name):
    with pytest.raises(SystemExit) as caught:
        compare("--data", name)
    text = str(caught.value.code)
    assert caught.value.code not in (0, 2) and text.startswith("error: ")  # a text: status 1
    assert all(known in text for known in ("shapes", "shapes-place", "animals")) and "trial/" not in text
    assert compare.trained == []


def test_no_images_keeps_photographs_out_of_the_report(compare):
    compare("--data", "shapes", "--no-images")
    assert compare.photographs == [False]
    compare("--data", "shapes")
    assert compare.photographs == [True]


def numbered(printed):
    return re.findall(r"^\[(\d+)/(\d+)\] (\S+)-seed(\d+): training for", printed, re.MULTILINE)


def test_a_seed_is_trained_whole_before_the_next(compare):
    trained, _, printed = compare(data="shapes")
    expected = [(label, seed) for seed in "412" for label in ("vitrel_vit_n8_absolute", "rope")]
    assert [(label, seed) for _, _, label, seed in numbered(printed)] == expected
    assert [(int(k), int(n)) for k, n, _, _ in numbered(printed)] == [(k, 6) for k in range(1, 7)]
    assert trained == [f"trial/{label}-seed{seed}" for label, seed in expected]


@pytest.mark.parametrize("first", [True, False])
def test_a_tuned_model_comes_after_its_source_and_before_the_next_seed(compare, first):
    models = [TUNED, *CONFIG["models"]] if first else [*CONFIG["models"], TUNED]
    trained, _, _ = compare("--data", "shapes", models=models)
    assert len(trained) == len(set(trained)) == 9
    seeds = [int(place.rsplit("seed", 1)[1]) for place in trained]
    labels = [place.split("/")[-1].split("-seed")[0] for place in trained]
    for seed in (4, 1, 2):
        own = [label for label, at in zip(labels, seeds, strict=True) if at == seed]
        assert own.index("rope") < own.index("tuned")
    assert seeds == [4] * 3 + [1] * 3 + [2] * 3


def test_each_starts_from_the_run_of_its_seed(compare, tmp_path):
    train = {"data": {"size": 96}, "model": {"tuning": {"trainable": ["norm", "head"]}}}
    compare("--data", "shapes", models=[*CONFIG["models"], TUNED | {"train": train}, TUNED | {"label": "plain"}])
    for seed in (4, 1, 2):
        source = str(tmp_path / "trial" / "shapes" / f"rope-seed{seed}" / "checkpoints" / "last.ckpt")
        tuned, plain, rope = (compare.configs[f"trial/shapes/{label}-seed{seed}"] for label in ("tuned", "plain", "rope"))
        assert tuned["model"]["tuning"] == {"trainable": ["norm", "head"], "init_from": source}
        assert plain["model"]["tuning"] == {"init_from": source} and "tuning" not in rope["model"]
        assert [run["data"]["size"] for run in (tuned, plain, rope)] == [96, 64, 64] and tuned["seed_everything"] == seed
