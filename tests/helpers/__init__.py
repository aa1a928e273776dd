"""Helpers of the tests: the repository root, golden files, and optional real data beside the checkout."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from vitrel import cli
from vitrel.cli import COMMANDS, build_parser

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"


def golden(key: str) -> dict:
    """Return the golden file of an encoding; fail with a clear message if it has none."""
    path = GOLDEN / f"{key}.json"
    assert path.is_file(), f"encoding {key!r} has no golden file: add its oracle and run tests/golden/make.py"
    return json.loads(path.read_text())


def script(path: str) -> ModuleType:
    """Import a file outside the package, e.g. ".ci/matrix.py"."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_script", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(name: str) -> SimpleNamespace:
    """A subcommand of vitrel: `command("compare").main(arguments)` runs it in this process."""
    return SimpleNamespace(main=lambda arguments: cli.main([name, *map(str, arguments)]))


def shared(name: str) -> Path:
    """Return a folder of real data or weights beside the checkout; skip the test if it is missing."""
    path = ROOT.parent / "shared" / name
    if not path.exists():
        pytest.skip(f"../shared/{name} does not exist: this test needs real data")
    return path


def run_in_the_interpreter(*modules: str) -> None:
    """Runs test modules in Triton's interpreter, in a new process: it must be chosen before triton is imported."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", *modules]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-1000:]


def printed_commands(text):
    """The parsed arguments of every line of `text` that is a command of vitrel other than train."""
    lines = [line.strip() for line in text.splitlines()]
    words = [shlex.split(line)[1:] for line in lines if line.startswith("vitrel ")]
    return [build_parser(COMMANDS).parse_args(line) for line in words]
