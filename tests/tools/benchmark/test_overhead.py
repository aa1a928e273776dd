"""Python's share of a call of the window kernels: the command prints it, within wide bounds."""

import subprocess
import sys

import pytest

from helpers import ROOT

pytest.importorskip("triton")


@pytest.mark.slow(seconds=12)
def test_a_call_costs_little_python():
    """In a process of its own, since the interpreter is chosen before Triton is imported; by the processor's time."""
    command = [sys.executable, "-m", "tools.benchmark.overhead", "--rounds", "10"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {mode: float(us) for mode, _, us in (line.strip("| ").split(" | ") for line in printed.splitlines()[2:])}
    assert set(found) == {"forward", "training"}
    assert 0 < found["forward"] < 120 and found["forward"] < found["training"] < 500
