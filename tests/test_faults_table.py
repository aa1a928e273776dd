"""What must not happen through dependencies, and other rows of the list of faults that have no better place."""

import ast
import re
import tomllib
from types import SimpleNamespace

import pytest

from helpers import ROOT
from helpers.small_runs import Tensors, fit, small
from helpers.sources import sources
from vitrel.train.running import command

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def named(tree):
    """Every name and attribute that code uses."""
    return {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(tree)}


def imported(tree):
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {module.partition(".")[0] for module in modules}


def test_the_last_free_albumentations_is_pinned():
    assert {"albumentations==2.0.8", "opencv-python-headless<6"} <= set(EXTRAS["train"])


def test_lightning_comes_without_its_extra_and_onnx_with_what_it_needs():
    names = {re.match(r"[\w-]+(\[\w+\])?", text)[0] for text in EXTRAS["train"]}
    assert {"lightning", "rich"} <= names and not any(name.startswith("lightning[") for name in names)
    assert {"onnx", "onnxscript"} <= set(EXTRAS["onnx"])


def test_no_lock_file_names_an_address():
    assert "uv.lock" in (ROOT / ".gitignore").read_text().split()
    locked = [path for path in ROOT.glob("*.txt") if re.search(r"https?://", path.read_text())]
    assert not locked


def trees_with(pattern):
    """{path: syntax tree} of the files whose text has the pattern."""
    return {name: ast.parse(text) for name, text in sources().items() if re.search(pattern, text)}


def test_nothing_is_unpickled_or_extracted():
    for name, tree in trees_with(r"extract|pickle|torch\.load|dill|joblib").items():
        assert "extractall" not in named(tree) and "extract" not in named(tree), name
        assert not imported(tree) & {"dill", "cloudpickle", "joblib"}, name
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function = ast.unparse(call.func)
            assert function not in ("pickle.load", "pickle.loads", "pickle.Unpickler"), f"{name}: {function}"
            if function == "torch.load":
                assert "weights_only=True" in ast.unparse(call), f"{name}: {ast.unparse(call)}"


def test_yaml_is_parsed_in_one_place():
    """Which refuses what would crash the parser."""
    for name, tree in trees_with("yaml").items():
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        read = [call for call in calls if re.fullmatch(r"yaml\.(safe_|full_|unsafe_)?(load|load_all|parse|scan|compose)", call)]
        assert not read or name == "vitrel/common/plain_yaml.py", f"{name}: {read[0]}: use vitrel.common.plain_yaml"


def test_a_resumed_run_is_read_as_plain_values_whatever_the_strategy(tmp_path, monkeypatch):
    """Some strategies read the file themselves, as the trainer is configured."""
    requested = []
    trainer = SimpleNamespace(is_global_zero=True, fit=lambda model, **how: requested.append(how))
    monkeypatch.setattr(command.TrainCLI, "instantiate_trainer", lambda self: trainer)
    args = ["--model.model=vitrel_vit_n8_none", "--data.data=shapes", "--data.size=64"]
    command.run(["fit", *args, "--ckpt_path=x.ckpt", f"--trainer.default_root_dir={tmp_path}"])
    assert requested[0]["weights_only"] is True and requested[0]["ckpt_path"] == "x.ckpt"


def test_a_run_of_other_classes_is_not_resumed(tmp_path):
    """In another order they would be other labels, and as many."""
    fit(small(), max_epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    other = Tensors()
    other.classes = ["c1", "c0", "c2", "c3"]
    with pytest.raises(
        ValueError, match=r"cannot resume: the checkpoint's classes is \['c0', 'c1', .*, this run's is \['c1', 'c0'"
    ):
        fit(small(), other, ckpt_path=tmp_path / "last.ckpt")
