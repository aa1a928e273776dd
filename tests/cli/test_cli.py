"""The `vitrel` command as a whole: help and usage errors at once, exit statuses, and subcommands without a file of tests."""

import inspect
import json
import re
import resource
import shlex
import subprocess
import sys
import tomllib

import pytest

import vitrel
from helpers import ROOT, each
from vitrel import cli
from vitrel.cli import train
from vitrel.common import extras
from vitrel.common.extras import EXTRAS, MissingExtra, absent, install_command, optional_import, require

HEAVY = ("torch", "timm", "numpy", "pandas", "lightning", "matplotlib")


LACKING = "import sys; sys.modules[sys.argv.pop(1)] = None; import vitrel_command; vitrel_command.main()"


def started(*arguments, lacking=None):
    """(finished process, seconds of processor time, heavy modules that it imported) of the `vitrel` command.

    lacking: name of a module that is not installed for it.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = ["-m", "vitrel_command"] if lacking is None else ["-c", LACKING, lacking]
    command = [sys.executable, "-X", "importtime", *program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, modules & set(HEAVY)


@pytest.mark.slow
@each(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["nonsense"], 2),
        (["evaluate", "a.ckpt", "--size", "96", "--data", "shapes"], 1),
        (["evaluate", "a", "--pretrained", "--size", "96", "--data", "shapes", "--class-indices", "nowhere"], 1),
        (["export", "vitrel_swin_n", "--format", "exported"], 1),
        (["train", "--help"], 0),
        (["train", "--data.data", "nowhere"], 1),
        (["compare", "nowhere"], 1),
        (["diagnose", "a", "--size", "96", "--json", "no/such/file.json"], 1),
    ],
)
def test_help_and_mistakes_answer_at_once(arguments, status):
    done, seconds, heavy = started(*arguments)
    assert done.returncode == status and heavy == set() and seconds < 1
    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    assert "Traceback" not in said and (said if status else done.stdout)


@pytest.mark.slow
@each(
    ("module", "arguments"),
    [
        ("pandas", ["evaluate", "a", "--data", "shapes", "--size", "96"]),
        ("lightning", ["compare", "quickstart"]),
        ("matplotlib", ["diagnose", "test_vit", "--size", "96", "--plot", "a.png"]),
        ("onnx", ["export", "a", "--format", "onnx"]),
        ("lightning", ["train", "--data", "shapes"]),
    ],
)
def test_a_missing_package_is_named_at_once(module, arguments):
    done, seconds, heavy = started(*arguments, lacking=module)
    assert done.returncode == 1 and heavy == set() and seconds < 1
    assert f"{module} is not installed: pip install" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow(seconds=4)
def test_a_list_and_a_module_of_the_users_own_import_no_more_than_they_need(tmp_path, monkeypatch):
    """The module finds the names and the registered models in a command that has imported neither."""
    own = "import sys\nprint('torch' in sys.modules)\nfrom vitrel import RelativeAttention\nimport timm, vitrel\n"
    own += "print(timm.is_model('vitrel_swin_t'), vitrel.diagnose.__name__, hasattr(vitrel, 'nonsense'))\n"
    (tmp_path / "own.py").write_text(own)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    done, _, heavy = started("list", "vitrel_vit_n8_none", "--import", "own")
    first, second, *table = done.stdout.splitlines()
    assert (done.returncode, first, second) == (0, "False", "True diagnose False"), done.stderr
    assert heavy == {"torch", "timm", "numpy"} and any("vitrel_vit_n8_none" in line for line in table)


def test_a_misspelt_command_or_option_gets_a_suggestion(capsys):
    for arguments, said in (
        (["evalute", "runs/a"], "there is no command 'evalute': did you mean evaluate?"),
        (["list", "--weights-onyl"], "there is no option --weights-onyl: did you mean --weights-only?"),
        (["doctor", "c"], "unexpected argument c"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2 and capsys.readouterr().err.rstrip().endswith(said)


@each("name", [name for name in cli.COMMANDS if name != "train"])
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and f"usage: vitrel {name}" in text and f"vitrel {name} " in text.partition("\n\n")[2]


def test_the_same_thing_has_the_same_option_everywhere():
    [commands] = cli.build_parser(cli.COMMANDS)._subparsers._group_actions
    options = {}
    for name, parser in commands.choices.items():
        for action in parser._actions:
            for option in action.option_strings:
                options.setdefault(option, {})[name] = (type(action).__name__, action.metavar)
    assert not {"--sizes", "--checkpoint", "--model", "--runs"} & set(options)
    assert options["-o"] == options["--out"]
    for option in ("--json", "--model-args", "--pretrained"):
        assert len(options[option]) > 1 and len(set(options[option].values())) == 1, option
    assert set(options["--size"]) >= {"diagnose", "evaluate", "export"}


def test_the_screen_of_train_names_keys_that_exist_and_all_sections():
    from vitrel.train import Classifier, ImageData
    from vitrel.train.running.command import Run

    known = {"data": ImageData.__init__, "model": Classifier.__init__, "run": Run.__init__}
    named = {(section, key) for section, key in re.findall(r"--(data|model|run)\.(\w+)", train.HELP)}
    for section, key in named:
        assert key in inspect.signature(known[section]).parameters, f"{section}.{key}"
    decided = {"self", "seed", "num_classes", "img_size"}  # by the data and by seed_everything
    assert {key for section, key in named if section == "model"} == set(inspect.signature(known["model"]).parameters) - decided
    assert len(train.HELP.splitlines()) <= 50


def test_doctor_prints_what_a_bug_report_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(EXTRAS, "onnx", ("onnx_of_nobody",))
    cli.main(["doctor", "--json", str(tmp_path / "found.json")])
    text, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert found["versions"]["torch"] in text and found["versions"]["vitrel"] == vitrel.__version__
    assert f"onnx: lacks onnx_of_nobody: {install_command('onnx')}" in text
    assert set(found["extras"]) == set(EXTRAS) and found["system"]["python"] in text
    serves = found["attention"]["cpu, inference"]
    assert sum(line.lstrip()[0].isdigit() for line in serves) == 2 and any("triton: " in line for line in serves)


def test_explain_an_encoding_and_a_model(capsys):
    command = ["explain", "log_decay", "--grid", "1x3", "--query", "0", "--options", "{decay: 0.3}"]
    cli.main(command)
    first = capsys.readouterr().out
    assert "attention on a 1x3 grid, position: log_decay" in first and "query minus key" in first
    cli.main(["explain", "vitrel_vit_n8_table", "--grid", "2x2", "--query", "1", "--layer", "-1"])
    assert "attention on a 2x2 grid" in capsys.readouterr().out
    for arguments, message in (
        (["tabel"], "unknown model 'tabel'"),
        (["vitrel_vit_n8_table", "--layer", "9"], "there is no layer 9"),
        (["resnet18"], "has no attention layers of vitrel"),
        (["table", "--options", "{x: 1}"], "error: --options: position 'table' has no option 'x'"),
        (["vitrel_vit_n8_table", "--model-args", "{dpth: 1}"], "error: --model-args: .*did you mean 'depth'"),
    ):
        with pytest.raises(SystemExit, match=message):
            cli.main(["explain", *arguments])


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch):
    with pytest.raises(MissingExtra, match=r"pandas is not installed: pip install -e .*\[evaluate\]"), optional_import():
        raise ModuleNotFoundError("No module named 'pandas'", name="pandas.core")
    with pytest.raises(ModuleNotFoundError, match="mine"), optional_import():
        raise ModuleNotFoundError("No module named 'mine'", name="mine")
    require(*EXTRAS["evaluate"])
    for name in ("lightning", "scipy", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    assert absent(*EXTRAS["evaluate"]) == ["scipy", "matplotlib"]
    with pytest.raises(MissingExtra, match=r"^scipy, matplotlib are not installed: .*\[evaluate\]"):
        require(*EXTRAS["evaluate"])
    with pytest.raises(MissingExtra, match=r"\[(train,evaluate|evaluate,train)\]"):
        require("scipy", "lightning")


def test_the_command_that_installs_an_extra_needs_no_index_with_this_package(monkeypatch, tmp_path):
    """In a checkout it names the folder, where the package is a wheel, the packages."""
    assert install_command("train") == f'pip install -e "{ROOT}[train]"'
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    command = shlex.split(install_command("onnx", "train"))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert command[:2] == ["pip", "install"] and set(command[2:]) == {*declared["onnx"], *declared["train"]}
