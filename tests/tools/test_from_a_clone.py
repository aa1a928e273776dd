"""tools/train.py and tools/evaluate.py use the package of their clone, from any folder and whatever is installed."""

import os
import subprocess
import sys

import pytest

from helpers import ROOT


@pytest.mark.slow(seconds=10)
def test_the_package_beside_the_script_is_used(tmp_path):
    """Of evaluate.py; train.py takes the same way."""
    train, evaluate = ((ROOT / "tools" / f"{name}.py").read_text() for name in ("train", "evaluate"))
    for text in (train, evaluate):
        assert "sys.path[0] = str(Path(__file__).parents[1])" in text
    (tmp_path / "vitrel").mkdir()
    (tmp_path / "vitrel" / "__init__.py").write_text("raise ImportError('another installation')")
    command = [sys.executable, str(ROOT / "tools" / "evaluate.py"), "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage: vitrel evaluate" in done.stdout
