"""The wheel alone, in a fresh environment: what it needs, what it can do, and what the extras are for."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import ROOT
from vitrel.common.extras import EXTRAS
from vitrel.version import __version__

USE = """
import contextlib, io, re, timm, torch, vitrel
model = timm.create_model("vitrel_swin_n", num_classes=3).eval()
image = torch.randn(1, 3, 40, 72)
vitrel.save(model, "swin.safetensors")
again = timm.create_model("vitrel_swin_n", num_classes=3).eval()
vitrel.load_pretrained(again, "swin.safetensors")
assert torch.equal(model(image), again(image))
try:
    import vitrel.train
except ImportError as error:
    assert "lightning is not installed: pip install" in str(error) and "tensorboard" in str(error), error
else:
    raise AssertionError("lightning is no part of the base installation")
from vitrel.cli import main
def said(*arguments, status=None):
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            main([*arguments])
    except SystemExit as ended:
        assert not ended.code or status, ended.code
        text.write(str(ended.code))
    return text.getvalue()
table = said("diagnose", "test_vit", "--size", "192")
assert "192x192" in table and "replaced at 192x192: pos_embed bicubic" in table, table
report = said("doctor")
assert "lacks lightning" in report and re.search('pip install .*"lightning>=', report), report
assert "pandas" in said("compare", "quickstart", status=1) and "study_imagenet" in said("compare", "--help")
assert "lightning" in said("train", "--data.data", "shapes", status=1)
from vitrel.cli.options import packaged
assert "quickstart" in packaged() and {"imagenet_swin_t", "scratch"} < packaged("train").keys()
said("export", "vitrel_swin_n", "--weights", "swin.safetensors", "--format", "safetensors", "--out", "folder")
"""


def test_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", text)[0] for texts in project["optional-dependencies"].values() for text in texts}
    names = {"cv2": "opencv-python-headless", "segmentation_models_pytorch": "segmentation-models-pytorch"}
    for extra, modules in EXTRAS.items():
        assert {names.get(module, module) for module in modules} <= declared, extra
    assert {re.match(r"\w+", text)[0] for text in project["dependencies"]} == {"torch", "timm", "numpy", "filelock"}


def test_the_citation_has_the_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def link_requirements(site):
    """Puts links into an environment that holds vitrel alone: to the installed packages it requires, and those they require."""
    todo, seen = [*next(metadata.distributions(name="vitrel", path=[str(site)])).requires], set()
    while todo:
        requirement = Requirement(todo.pop())
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        distribution = metadata.distribution(name)
        todo += distribution.requires or []
        for part in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(distribution.locate_file(part))


@pytest.mark.slow(seconds=9)
def test_the_wheel_alone(tmp_path):
    """Built from the source distribution, installed in an environment of what it requires, used in an empty folder."""
    pytest.importorskip("hatchling")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_TARGET"))}

    def run(*command, status=0, cwd=tmp_path):
        done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == status, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout + done.stderr

    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", tmp_path, cwd=ROOT)
    [sdist] = tmp_path.glob("vitrel-*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, sdist)
    sdist.unlink()
    [wheel] = tmp_path.glob("vitrel-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    here = tmp_path / "venv" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", here / "python")
    run(*pip, "install", "--quiet", "--no-deps", wheel)
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    link_requirements(site)
    run(*pip, "check")
    assert "benchmark" not in run(here / "python", "-m", "zipfile", "--list", wheel)
    assert run(here / "vitrel", "--version").startswith("vitrel ")
    (tmp_path / "use.py").write_text(USE)
    run(here / "python", "use.py")
    assert (tmp_path / "folder" / "config.json").is_file()
