"""Helpers of the tests: the repository root, golden files, and optional real data beside the checkout."""

import functools
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vitrel import cli
from vitrel.cli import COMMANDS, build_parser

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"


def each(names: str | Sequence[str], cases: Iterable, ids: object = None) -> Callable:
    """As `pytest.mark.parametrize`, in one test: for cheap cases of one property, of which collecting would cost more.

    Every case starts from the same seed; a failure names its case. A case may skip itself, but not all of them.
    """
    names, cases = names.split(",") if isinstance(names, str) else list(names), list(cases)
    assert cases, "a loop over nothing tests nothing"
    parameters = type(pytest.param())
    assert not any(case.marks for case in cases if isinstance(case, parameters)), "a case in a loop has no marks of its own"

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)
        assert set(names) <= set(signature.parameters), f"{test.__name__} does not take {names}"

        @functools.wraps(test)
        def run(**fixtures: object) -> None:
            skipped = []
            for case in cases:
                values = case.values if isinstance(case, parameters) else case if len(names) > 1 else (case,)
                torch.manual_seed(0)
                try:
                    test(**fixtures, **dict(zip(names, values, strict=True)))
                except pytest.skip.Exception as skip:
                    skipped.append(str(skip))
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"in the case {', '.join(f'{n}={v!s:.200}' for n, v in zip(names, values, strict=True))}")
                    raise
            if len(skipped) == len(cases):
                pytest.skip(skipped[0])

        left = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=left)
        return run

    return decorate


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
