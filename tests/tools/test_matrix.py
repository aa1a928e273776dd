""".ci/matrix.py: lower bounds, processors with and without AVX-512, the table of what passed and failed."""

import json
import sys
from pathlib import Path

import pytest

from helpers import script

SUITE = """
import os, pytest
def test_passes(): assert os.environ.get("ATEN_CPU_CAPABILITY") == {capability!r}
def test_fails(): assert {passes}
def test_skips(): pytest.skip("it needs something")
"""


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """The script in a folder of its own, whose environments are this one."""
    tool = script(".ci/matrix.py")
    monkeypatch.setattr(tool, "environment", lambda version, folder: Path(sys.executable))
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    return tool


def run(tool, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["matrix.py", *arguments])
    return tool.main()


def test_lowest_is_every_lower_bound():
    pins = dict(pin.split("==") for pin in script(".ci/matrix.py").pins("lowest"))
    assert {"torch", "timm", "lightning", "jsonargparse"} <= set(pins) and all(pins.values())


@pytest.mark.parametrize(
    ("info", "names"),
    [
        ("model name\t: A\nflags\t: avx2 avx512f avx512bw\n", ["A, AVX-512", "A, AVX-512 off"]),
        ("model name\t: B\nflags\t: avx2\n", ["B, AVX2"]),
    ],
)
def test_processors(info, names, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path: info)
    found = script(".ci/matrix.py").processors()
    assert [name for name, _ in found] == names
    assert [bool(own) for _, own in found] == [False, True][: len(names)]


@pytest.mark.parametrize("passes", [True, False])
def test_the_table(passes, tool, tmp_path, monkeypatch, capsys):
    (tmp_path / "test_it.py").write_text(SUITE.format(capability="avx2", passes=passes))
    monkeypatch.setattr(tool, "processors", lambda: [("some processor", tool.WITHOUT_AVX512)])
    assert run(tool, monkeypatch, "2.99", "--", "-p", "no:xdist", "test_it.py") == (0 if passes else 1)
    head, row = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert head == [*tool.COLUMNS]
    assert row[-4:-1] == (["2", "0", "1"] if passes else ["1", "1", "1"])


def test_what_cannot_run_is_a_failure(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool, "processors", lambda: [("some processor", {})])
    assert run(tool, monkeypatch, "2.99", "--", "-p", "no:xdist", "no_such_test.py") == 1
    assert "pytest ended with" in capsys.readouterr().out

    def none(version, folder):
        raise tool.subprocess.CalledProcessError(1, json.dumps(["pip", version]))

    monkeypatch.setattr(tool, "environment", none)
    assert run(tool, monkeypatch, "2.99") == 1
    assert "no environment" in capsys.readouterr().out
