import pickle
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import yaml

from helpers import each
from vitrel.train import run

BASE = {"model": {"model": "vitrel_vit_n8_none"}, "data": {"data": "shapes", "size": 64}, "trainer": {"max_epochs": 1}}


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module whose import leaves a file; a path to write configurations to; whether the file is there."""
    code = f"""
        from pathlib import Path
        from lightning.pytorch import Callback
        Path({str(tmp_path / "ran")!r}).touch()
        class C(Callback): pass
        def f(*args): pass
        """
    (tmp_path / "evil.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield SimpleNamespace(folder=tmp_path, ran=lambda: (tmp_path / "ran").exists() or "evil" in sys.modules)
    sys.modules.pop("evil", None)


def write(path, text):
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return str(path)


def resume_from(path, folder):
    """Starts a run in `folder` that is to go on from the checkpoint at `path`."""
    base = write(folder / "base.yaml", BASE)
    run(["fit", "--config", base, f"--ckpt_path={path}", f"--trainer.default_root_dir={folder}/r"])


def stopped(args, capsys):
    """(status, stdout, stderr) of a command line that ends before training."""
    with pytest.raises(SystemExit) as end:
        run(["fit", *args])
    return end.value.code, *capsys.readouterr()


CLASS = "evil.C is not allowed: a configuration names classes of lightning.pytorch, "
FILES = {  # a configuration, and what is said of it
    "trainer: {callbacks: [{class_path: evil.C}]}": CLASS,
    "trainer: {callbacks: {class_path: LambdaCallback, init_args: {setup: evil.f}}}": "evil.f is not allowed",
    "trainer: {callbacks: lightning.pytorch.callbacks.timer.os.system}": "has no attribute 'os'",
    "trainer: {strategy: {class_path: FSDPStrategy, init_args: {auto_wrap_policy: evil.f}}}": "evil.f is not allowed",
    "seed_everything: 0\ntrainer: {logger: {<<: {class_path: evil.C}}}": CLASS,
    "data: {augment: {class_path: evil.C}}": CLASS,
    "fit: {trainer: {callbacks: evil.C}}": "unknown key trainer.callbacks: did you mean trainer.callbacks?",
}


@pytest.mark.slow
@each("text", FILES)
def test_a_file_names_no_code_but_lightnings_and_ours(evil, text, capsys):
    base = write(evil.folder / "base.yaml", BASE)
    status, _, said = stopped(["--config", base, "--config", write(evil.folder / "bad.yaml", text)], capsys)
    assert status == 2 and FILES[text] in said and said.count("\n") == 1
    assert not evil.ran()


@pytest.mark.slow
@each(
    "option",
    [
        *(f"--trainer.{name}=evil.C" for name in ("logger", "callbacks.help")),
        "--trainer.callbacks+=evil.C",
        "--trainer=./inner.yaml",
        "--conf=./inner.yaml",
        "--config=file://inner.yaml",
    ],
)
def test_an_option_names_no_code_but_lightnings_and_ours(evil, option, capsys):
    write(evil.folder / "inner.yaml", "callbacks: evil.C\nclass_path: evil.C\ntrainer: {callbacks: evil.C}")
    status, _, said = stopped(["--config", write(evil.folder / "base.yaml", BASE), option], capsys)
    assert status == 2 and said.startswith("vitrel train: error: ") and not evil.ran()


def test_values_of_any_kind_are_no_classes(evil, capsys):
    option = "--model.model_args={a: [{class_path: evil.C, init_args: {}}]}"
    status, printed, _ = stopped(["--config", write(evil.folder / "base.yaml", BASE), option, "--print_config"], capsys)
    assert status == 0 and yaml.safe_load(printed)["model"]["model_args"]["a"][0]["class_path"] == "evil.C" and not evil.ran()


def test_a_logger_without_its_package_says_so(evil, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", False)
    config = write(evil.folder / "base.yaml", BASE | {"trainer": {"max_epochs": 1, "logger": {"class_path": "MLFlowLogger"}}})
    with pytest.raises(ValueError, match=r"^lightning.pytorch.loggers.MLFlowLogger: ") as caught:
        run(["fit", "--config", config])
    assert "\n" not in str(caught.value)


@each("tag", ["!!python/object/apply:evil.f []", "!evil x"])
def test_tags_are_refused(evil, tag, capsys):
    with pytest.raises(ValueError, match=r"bad\.yaml: .*could not determine a constructor for the tag"):
        run(["fit", "--config", write(evil.folder / "bad.yaml", f"seed_everything: {tag}")])
    status, _, _ = stopped([f"--seed_everything={tag}"], capsys)
    assert status == 2 and not evil.ran()


@pytest.mark.slow
@each(
    "value",
    [
        "{callbacks: [{class_path: EarlyStopping, init_args: {monitor: val/top1}}]}",
        "{strategy: {class_path: lightning.pytorch.strategies.DDPStrategy, init_args: {find_unused_parameters: true}}}",
        "{plugins: [{class_path: lightning.pytorch.plugins.environments.SLURMEnvironment, init_args: {auto_requeue: false}}]}",
        "{default_root_dir: runs.v2, max_time: {days: 1}, devices: [0], strategy: ddp, profiler: simple}",
    ],
)
def test_lightnings_own_may_be_named(evil, value, capsys):
    base = {**BASE, "trainer": yaml.safe_load(value), "data": {**BASE["data"], "augment": {"flip": False}}}
    config = write(evil.folder / "base.yaml", base)
    status, printed, said = stopped(["--config", config, "--print_config"], capsys)
    assert status == 0, said
    # what is printed can be given again
    assert stopped(["--config", write(evil.folder / "again.yaml", printed), "--print_config"], capsys)[:2] == (0, printed)


@pytest.mark.slow
@each(
    ("args", "text"),
    [
        (["--trainer.max_epoch=3"], "unknown key trainer.max_epoch: did you mean trainer.max_epochs?"),
        (["--data.augment.flips=false"], "unknown key flips: did you mean flip?"),
        (["--data.size=64", "--model={optim: {lrr: 1}}"], "unknown key model.optim.lrr: did you mean model.optim.lr?"),
        (["--lr=3"], "unknown key lr: did you mean model.optim.lr?"),
        (["--model.learning-rate=3"], "unknown key model.learning-rate: did you mean model.optim.lr?"),
        (["--teeth=32"], "unknown key teeth; --help-all lists the keys"),
        (["--weights_only=false"], "unknown key weights_only"),
        (["--data.seed=3"], 'Linked "data.seed" must be given via "seed_everything"'),
        (["stray"], "unknown key stray"),
        (["--data.size=big"], "data.size must be one of int, tuple[int, int], not 'big'"),
        (["--seed_everything=-5"], "seed_everything must be an integer from 0 to 2**32 - 1, not -5"),
    ],
)
def test_unknown_keys_are_named_with_the_nearest(args, text, capsys):
    status, _, said = stopped(args, capsys)
    assert status == 2 and text in said


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.slow
@each("sharded", [False, True])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, sharded):
    """torch unpickles a sharded one, which is a folder, whatever `weights_only` says."""
    path = tmp_path / f"last{sharded}.ckpt"
    if sharded:
        path.mkdir()
        (path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    else:
        torch.save({"state_dict": {}, "x": Bomb(tmp_path / "ran")}, path)
    text = r"last.*\.ckpt" if sharded else r"last.*\.ckpt \(.* bytes\) was refused: it holds more than tensors and plain values"
    with pytest.raises((ValueError, OSError), match=text):
        resume_from(path, tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@each("path", ["last", "ftp://127.0.0.1/x.ckpt"])
def test_a_checkpoint_is_a_local_file(tmp_path, path):
    with pytest.raises(FileNotFoundError, match=f"no checkpoint at {path[:4]}"):
        resume_from(path, tmp_path)
