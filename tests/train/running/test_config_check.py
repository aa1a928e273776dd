import ast
import pickle
import re
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from helpers import ROOT
from vitrel.train import Classifier, run
from vitrel.train.datamodule import ImageData
from vitrel.train.running import config_check
from vitrel.train.running.command import Run, check_arguments

BASE = {"model": {"model": "vitrel_vit_n8_none"}, "data": {"data": "shapes", "size": 64}, "trainer": {"max_epochs": 1}}
CALLBACK = "lightning.pytorch.callbacks.EarlyStopping"


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


def refused(args, capsys):
    """What is said when the command line is refused."""
    with pytest.raises(SystemExit) as stopped:
        run(["fit", *args])
    said = capsys.readouterr()
    assert stopped.value.code == 2, said.err
    return said.err


def write(path, text):
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return str(path)


FILES = {
    "callbacks": "trainer: {callbacks: evil.C}",
    "class_path": "trainer: {callbacks: [{class_path: evil.C}]}",
    "nested text": "trainer: {callbacks: '{class_path: evil.C}'}",
    "text within text": """trainer: {callbacks: ["'{class_path: evil.C}'"]}""",
    "in arguments": "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {mode: {class_path: evil.C}}}]}",
    "function": "trainer: {callbacks: {class_path: lightning.pytorch.callbacks.LambdaCallback, init_args: {setup: evil.f}}}",
    "policy": "trainer: {strategy: {class_path: FSDPStrategy, init_args: {auto_wrap_policy: evil.f}}}",
    "type": "trainer: {strategy: {class_path: FSDPStrategy, init_args: {auto_wrap_policy: [evil.C]}}}",
    "short": "trainer: {callbacks: LambdaCallback}",
    "through a module": "trainer: {callbacks: lightning.pytorch.callbacks.timer.time}",
    "anchor": "x: &a {class_path: evil.C}\ntrainer: {callbacks: [*a]}",
    "merge": "seed_everything: 0\ntrainer: {logger: {<<: {class_path: evil.C}}}",
    "dotted key": "trainer.callbacks.class_path: evil.C",
    "model": "model: {class_path: evil.C}",
    "data class": "model: {optim: evil.C}",
    "data class_path": "data: {augment: {class_path: evil.C}}",
    "any": "model: {model_args: {a: [{class_path: evil.C, init_args: {}}]}}",
    "strategy": "trainer: {strategy: evil.C}",
    "file": "trainer: {callbacks: ./inner.yaml}",
    "file of a group": "trainer: ./inner.yaml",
    "file of a data class": "model: {optim: ./inner.yaml}",
    "subcommand": "fit: {trainer: {callbacks: evil.C}}",
    "config": "config: ./inner.yaml",
}


@pytest.mark.parametrize("name", FILES)
def test_files_cannot_name_code(evil, name):
    write(evil.folder / "inner.yaml", "class_path: evil.C")
    bad = write(evil.folder / "bad.yaml", FILES[name])
    with pytest.raises(ValueError, match=r"bad\.yaml: .*(not an allowed class|unknown key|takes keys)"):
        check_arguments(["fit", "--config", bad])
    assert not evil.ran()


@pytest.mark.parametrize("given", [["--trainer.callbacks=evil.C"], ["--config", "bad.yaml"]])
def test_nothing_is_imported_before_the_check(evil, given, capsys):
    base = write(evil.folder / "base.yaml", BASE)
    write(evil.folder / "bad.yaml", FILES["callbacks"])
    for extra in ([], ["--print_config"]):
        assert "not an allowed class" in refused(["--config", base, *given, *extra], capsys)
        assert not evil.ran()


@pytest.mark.parametrize(
    "args",
    [
        ["--trainer.callbacks.help=evil.C", "--print_config"],
        ["--trainer.callbacks=evil.C"],
        ["--trainer.callbacks", "evil.C"],
        ["--trainer.callbacks+=evil.C"],
        ["--trainer.callbacks+", "evil.C"],
        ["--trainer.callbacks=[evil.C]"],
        ["--trainer.callbacks.class_path=evil.C"],
        [f"--trainer.callbacks={CALLBACK}", "--trainer.callbacks.monitor=evil.C"],
        ["--trainer.callbacks.help=evil.C"],
        ["--trainer.callbacks.help", "evil.C"],
        ["--trainer.logger=evil.C"],
        ["--trainer.logger+={class_path: evil.C}"],
        ["--trainer.strategy=evil.C"],
        ["--trainer.plugins=evil.C"],
        ["--trainer.profiler=evil.C"],
        ["--trainer.accelerator=evil.C"],
        ["--trainer={callbacks: evil.C}"],
        ["--trainer=inner.yaml"],
        ["--trainer", "./inner.yaml"],
        ["--model=inner.yaml"],
        ["--model.class_path=evil.C"],
        ["--model.optim=evil.C"],
        ["--model.optim", "./inner.yaml"],
        ["--model.model_args={a: {class_path: evil.C}}"],
        ["--data=evil.C"],
        ["--data.augment=./inner.yaml"],
        ["--config={trainer: {callbacks: evil.C}}"],
        ["--conf=./inner.yaml"],
        ["-c./inner.yaml"],
        ["-c", "./inner.yaml"],
        ["--config=file://inner.yaml"],
        ["--config", "memory://inner.yaml"],
    ],
    ids=" ".join,
)
def test_the_command_line_cannot_name_code(evil, args):
    write(evil.folder / "inner.yaml", "callbacks: evil.C\nclass_path: evil.C\ntrainer: {callbacks: evil.C}")
    base = write(evil.folder / "base.yaml", BASE)
    with pytest.raises(ValueError, match=r"not an allowed class|unknown key|takes keys|no such file|two dashes"):
        check_arguments(["fit", "--config", base, *args])
    assert not evil.ran()


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:evil.f []", "!!python/name:evil.C ''", "!evil x", "!!python/module:evil ''"]
)
def test_tags_are_refused(evil, tag, capsys):
    said = refused(["--config", write(evil.folder / "bad.yaml", f"seed_everything: {tag}"), "--print_config"], capsys)
    assert "bad.yaml: could not determine a constructor for the tag" in said and "plain values only" in said
    said = refused([f"--seed_everything={tag}"], capsys)
    assert "--seed_everything: could not determine a constructor" in said and not evil.ran()


def test_the_parser_itself_imports_no_other_code(evil, capsys, monkeypatch):
    """The second lock holds where the first would not."""
    monkeypatch.setattr(config_check, "check", lambda *_: None)
    base = write(evil.folder / "base.yaml", BASE)
    for option in ("--trainer.callbacks=evil.C", "--trainer.callbacks.help=evil.C", "--model.optim=evil.C"):
        refused(["--config", base, option], capsys)
        assert not evil.ran()


@pytest.mark.parametrize("option", ["strategy", "accelerator", "profiler"])
def test_no_option_but_config_reads_a_file(evil, option):
    inner = write(evil.folder / "inner.yaml", "class_path: evil.C")
    with pytest.raises((ValueError, MisconfigurationException), match=r"inner\.yaml|`profiler` parameter"):
        run(["fit", "--config", write(evil.folder / "base.yaml", BASE), f"--trainer.{option}={inner}"])
    assert not evil.ran()


def test_no_argument_of_a_class_reads_a_file(evil, capsys):
    inner = write(evil.folder / "inner.yaml", "class_path: lightning.pytorch.plugins.environments.LightningEnvironment")
    args = ["--config", write(evil.folder / "base.yaml", BASE), "--trainer.strategy=DDPStrategy"]
    assert inner in refused([*args, f"--trainer.strategy.cluster_environment={inner}"], capsys)


def test_the_environment_sets_nothing(evil, capsys, monkeypatch):
    base = write(evil.folder / "base.yaml", BASE)
    monkeypatch.setenv("PL_FIT__TRAINER__CALLBACKS", "evil.C")
    monkeypatch.setenv("PL_TRAINER__MAX_EPOCHS", "7")
    with pytest.raises(SystemExit) as stopped:
        run(["fit", "--config", base, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert stopped.value.code == 0 and printed["callbacks"] is None and printed["max_epochs"] == 1
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    assert "unset it" in refused(["--config", base], capsys) and not evil.ran()


@pytest.mark.parametrize(
    "value",
    [
        "{devices: [0], default_root_dir: null}",
        f"{{callbacks: {{class_path: {CALLBACK}, init_args: {{monitor: val/top1, mode: max}}}}}}",
        "{callbacks: [{class_path: EarlyStopping, init_args: {monitor: val/top1}}]}",
        "{strategy: ddp, accelerator: cpu, devices: 2, profiler: simple, logger: false}",
        "{strategy: {class_path: lightning.pytorch.strategies.DDPStrategy, init_args: {find_unused_parameters: true}}}",
        "{strategy: {class_path: FSDPStrategy, init_args: {auto_wrap_policy: [vitrel.layers.Block]}}}",
        "{plugins: [{class_path: lightning.pytorch.plugins.environments.SLURMEnvironment, init_args: {auto_requeue: false}}]}",
        "{logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: ./runs.v2}}}",
        "{default_root_dir: runs.v2, max_time: {days: 1}}",
    ],
)
def test_lightnings_own_may_be_named(evil, value, capsys):
    base = {**BASE, "trainer": yaml.safe_load(value), "data": {**BASE["data"], "augment": {"flip": False}}}
    config = write(evil.folder / "base.yaml", base)
    with pytest.raises(SystemExit) as stopped:
        run(["fit", "--config", config, "--print_config"])
    said = capsys.readouterr()
    assert stopped.value.code == 0, said.err
    # what is printed can be given again
    with pytest.raises(SystemExit) as stopped:
        run(["fit", "--config", write(evil.folder / "again.yaml", said.out), "--print_config"])
    assert stopped.value.code == 0 and capsys.readouterr().out == said.out


def test_every_class_of_the_list_exists_and_every_parameter_that_takes_one_is_known():
    for module, names in config_check.CLASSES.items():
        loaded = __import__(module, fromlist=names)
        assert all(isinstance(getattr(loaded, name), type) for name in names)
    free = {name for name, below in config_check.keys_of(Trainer).items() if below is None}
    assert free - {"max_time", "val_check_interval"} == set(config_check.PLUGS)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--model.optim.warmup=3"], "unknown key model.optim.warmup: did you mean model.optim.warmup_epochs?"),
        (["--trainer.max_epoch=3"], "unknown key trainer.max_epoch: did you mean trainer.max_epochs?"),
        (["--trainer.max_epoch", "3"], "unknown key trainer.max_epoch: did you mean trainer.max_epochs?"),
        (["--data.augment.flips=false"], "unknown key data.augment.flips: did you mean data.augment.flip?"),
        (["--data.augment={flips: false}"], "unknown key data.augment.flips: did you mean data.augment.flip?"),
        (["--model={optim: {betas: [0.9, 0.99], lrr: 1}}"], "unknown key model.optim.lrr: did you mean model.optim.lr?"),
        (["--lr=3"], "unknown key lr: did you mean model.optim.lr?"),
        (["--run.save_evry=3"], "unknown key run.save_evry: did you mean run.save_every?"),
        (["--seed=3"], "unknown key seed: did you mean seed_everything?"),
        (["--optimizer=sgd"], "unknown key optimizer; --help lists the keys"),
        (["--data.size.h=3"], "unknown key data.size.h"),
        (["--weights_only=false"], "unknown key weights_only"),
        (["--data.seed=3"], "leave out data.seed: it is set from seed_everything"),
        (["--config=none.yaml"], "--config none.yaml: no such file"),
        (["stray"], "'stray' is a value without an option"),
    ],
)
def test_unknown_keys_are_named_with_the_nearest(args, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        check_arguments(["fit", *args])


def test_a_file_that_is_no_configuration_is_named(tmp_path, capsys):
    (tmp_path / "image.yaml").write_bytes(bytes(range(256)))
    write(tmp_path / "empty.yaml", "")
    write(tmp_path / "torn.yaml", "a: [1")
    for name, text in (("empty", "holds no keys"), ("image", ""), ("torn", "")):
        with pytest.raises(ValueError, match=rf"{name}\.yaml: {text}"):
            check_arguments(["fit", "--config", str(tmp_path / f"{name}.yaml")])
    with pytest.raises(SystemExit):
        run(["validate"])
    assert "begin with fit, not 'validate'" in capsys.readouterr().err


def _named(node):
    """Dotted names in the texts of an expression."""
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return {name for text in texts for name in re.findall(r"(?<![\w./])[a-z_]+(?:\.[a-z_]+)+", text)}


@pytest.mark.slow
def test_messages_name_options_as_a_configuration_has_them():
    """And not as the class does that speaks: its group is one of the model's."""
    keys = {
        "model": config_check.keys_of(Classifier),
        "data": config_check.keys_of(ImageData),
        "trainer": config_check.keys_of(Trainer),
    }
    known = {*config_check._flat(keys | {"run": config_check.keys_of(Run)})}
    groups = {name.split(".")[1] for name in known if name.startswith("model.") and name.count(".") > 1} | {"schedule"}
    found = set()
    for path in (ROOT / "vitrel" / "train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                found |= {(path.name, name) for name in _named(node.exc) if name.split(".")[0] in {*keys, "run", *groups}}
    assert len(found) > 20
    assert {(file, name) for file, name in found if name not in known} == set()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    config, path = write(tmp_path / "base.yaml", BASE), tmp_path / "last.ckpt"
    torch.save({"state_dict": {}, "x": Bomb(tmp_path / "ran")}, path)
    with pytest.raises(ValueError, match=r"last.ckpt \(.* bytes\) was refused: it holds more than tensors and plain values"):
        run(["fit", "--config", config, f"--ckpt_path={path}", f"--trainer.default_root_dir={tmp_path}/r"])
    assert not (tmp_path / "ran").exists()


def test_a_sharded_checkpoint_is_refused(tmp_path, capsys):
    """torch unpickles it, whatever `weights_only` says."""
    config, folder = write(tmp_path / "base.yaml", BASE), tmp_path / "last.ckpt"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    file = write(tmp_path / "resume.yaml", f"ckpt_path: {folder}")
    for given in (["--ckpt_path", str(folder)], [f"--ckpt_path='{folder}'"], ["--config", file]):
        said = refused(["--config", config, *given], capsys)
        assert f"ckpt_path {folder} is a folder, which torch would unpickle: name a checkpoint file" in said
    assert not (tmp_path / "ran").exists()


NINES = ", ".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))
ENDLESS = {"&a {x: *a}": "in itself", "{x: &a [*a]}": "in itself", "[" * 100_000 + "]" * 100_000: "nested too deeply"}
ENDLESS["[" * 500 + "]" * 500] = "bad.yaml: nested too deeply"
ENDLESS["a" * 1_000_000] = "bad.yaml has 1,000,021 bytes"
ENDLESS[f"{{a0: &a0 [1], {NINES}}}"] = "bad.yaml: more than 100,000 values, aliases counted each time"


@pytest.mark.parametrize("text", ENDLESS, ids=["itself", "itself in a list", "deep", "500 deep", "large", "billions"])
def test_files_that_never_end_are_refused(tmp_path, text):
    bad = write(tmp_path / "bad.yaml", f"model: {{model_args: {text}}}")
    with pytest.raises(ValueError, match=ENDLESS[text]):
        check_arguments(["fit", "--config", bad])


@pytest.mark.parametrize("depth", [500, 100_000])
def test_options_that_are_nested_too_deeply_are_refused(depth, capsys):
    said = refused(["--model.model_args=" + "{a: " * depth + "}" * depth], capsys)
    assert "--model.model_args: nested too deeply" in said and len(said) < 5000


def test_text_within_text_is_refused_as_well(tmp_path, capsys):
    """Each text is read once more, so that quoting cannot hide what is deep."""
    text = "\n".join(f"{' ' * depth}a: |" for depth in range(2, 700))
    assert "nested more than" in refused(["--config", write(tmp_path / "bad.yaml", f"model:\n model_args:\n{text}")], capsys)


@pytest.mark.parametrize("path", ["none.ckpt", "last", "hpc", "registry", "ftp://127.0.0.1/x.ckpt"])
def test_a_checkpoint_is_a_local_file(tmp_path, path):
    config = write(tmp_path / "base.yaml", BASE)
    with pytest.raises(FileNotFoundError, match=f"no checkpoint at {path[:4]}"):
        run(["fit", "--config", config, f"--ckpt_path={path}", f"--trainer.default_root_dir={tmp_path}/r"])
