"""`vitrel compare`: one of several data sets alone, and the order in which models are trained. Nothing is trained here."""

import pytest
import yaml

from helpers import command
from vitrel.compare import jobs

CONFIG = {
    "name": "trial",
    "data": ["shapes", {"data": "shapes-place", "seeds": [7]}],
    "models": ["vitrel_vit_n8_absolute", {"name": "vitrel_vit_n8_none", "label": "rope"}],
    "seeds": [4, 1, 2],
    "train": {"trainer": {"max_epochs": 1}, "data": {"size": 64}},
    "evaluate": {"sizes": [64], "n": 10},
}
TUNED = {"name": "vitrel_vit_n8_none", "label": "tuned", "tuned_from": "rope"}


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """compare(*arguments, **changes): ({folder of a run: its configuration}, in order; folders evaluated, and how)."""
    tool, trained, evaluated = command("compare"), {}, []

    def begin(config, place):
        trained[place.relative_to(tmp_path).as_posix()] = config
        return []

    def evaluate(comparison, how):
        assert how.keys() <= {"photographs", "overwrite", "command"}  # what is not given is that of the file
        evaluated.append((comparison.folder.relative_to(tmp_path).as_posix(), how.get("photographs", True)))

    monkeypatch.setattr(jobs, "begin", begin)
    monkeypatch.setattr("vitrel.cli.compare.check", lambda comparison: None)
    monkeypatch.setattr("vitrel.compare.models.evaluate", evaluate)

    def run(*arguments, **changes):
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump(CONFIG | changes))
        tool.main([str(path), "--out", str(tmp_path), "--jobs", "1", *arguments])
        return trained, evaluated

    return run


def test_all_data_sets_are_trained_a_seed_after_the_other(compare):
    trained, evaluated = compare("--no-images")
    runs = [("shapes", seed) for seed in (4, 1, 2)] + [("shapes-place", 7)]
    labels = ("vitrel_vit_n8_absolute", "rope")
    assert [*trained] == [f"trial/{name}/{label}-seed{seed}" for name, seed in runs for label in labels]
    assert evaluated == [("trial/shapes", False), ("trial/shapes-place", False)]


def test_one_data_set_alone(compare):
    trained, evaluated = compare("--data", "shapes-place")
    assert evaluated == [("trial/shapes-place", True)] and len(trained) == 2
    with pytest.raises(SystemExit, match=r"error: --data animals: the data sets of .* are shapes, shapes-place"):
        compare("--data", "animals")


def test_tuned_models_come_after_the_others_and_start_from_the_run_of_their_seed(compare, tmp_path):
    train = {"data": {"size": 96}, "model": {"tuning": {"trainable": ["norm", "head"]}}}
    models = [TUNED | {"train": train}, *CONFIG["models"], TUNED | {"label": "plain"}]
    trained, _ = compare("--data", "shapes", models=models)
    names = [place.removeprefix("trial/shapes/") for place in trained]
    assert names[-6:] == [f"{label}-seed{seed}" for seed in (4, 1, 2) for label in ("tuned", "plain")] and len(names) == 12
    for seed in (4, 1, 2):
        source = str(tmp_path / "trial" / "shapes" / f"rope-seed{seed}" / "checkpoints" / "last.ckpt")
        tuned, plain, rope = (trained[f"trial/shapes/{label}-seed{seed}"] for label in ("tuned", "plain", "rope"))
        assert tuned["model"]["tuning"] == {"trainable": ["norm", "head"], "init_from": source}
        assert plain["model"]["tuning"] == {"init_from": source} and "tuning" not in rope["model"]
        assert [run["data"]["size"] for run in (tuned, plain, rope)] == [96, 64, 64] and tuned["seed_everything"] == seed
