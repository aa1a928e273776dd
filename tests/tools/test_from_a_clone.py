"""tools/train.py and tools/evaluate.py use the package of their clone, from any folder and whatever is installed."""

import os
import shutil
import subprocess
import sys

import pytest

from helpers import ROOT


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_the_package_beside_the_script_is_used(name, tmp_path):
    """With a package that only says what it was asked for; another one, earlier on the path, cannot be imported."""
    clone, installed = tmp_path / "clone", tmp_path / "installed"
    for folder in (clone / "tools", clone / "vitrel", installed / "vitrel"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "tools" / f"{name}.py", clone / "tools")
    (clone / "vitrel" / "__init__.py").touch()
    (clone / "vitrel" / "cli.py").write_text("import sys\ndef main(given=None): print(*(given or sys.argv[1:]))\n")
    (installed / "vitrel" / "__init__.py").write_text("raise ImportError('another installation')")
    command = [sys.executable, str(clone / "tools" / f"{name}.py"), "--size", "64"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == f"{name} --size 64\n"
