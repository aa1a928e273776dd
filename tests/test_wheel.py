"""The wheel alone, in a fresh process: what it needs and can do, what it imports when, and what the extras are for."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import ROOT
from vitrel.common.extras import EXTRAS
from vitrel.version import __version__

USE = """
import contextlib, io, re, sys, timm, torch
heavy, asked = {"lightning", "pytorch_lightning", "albumentations", "cv2", "pandas", "matplotlib"}, set()
class Asked:
    def find_spec(name, path=None, target=None):
        asked.update({name} & heavy)
sys.meta_path.insert(0, Asked)
import vitrel
model = timm.create_model("vitrel_swin_n", num_classes=3).eval()
image = torch.randn(1, 3, 40, 72)
vitrel.save(model, "swin.safetensors")
again = timm.create_model("vitrel_swin_n", num_classes=3).eval()
vitrel.load_pretrained(again, "swin.safetensors")
assert torch.equal(model(image), again(image))
from PIL import Image
from vitrel.data import Augmentation, Prepare, decode
how = (32, 32), (0.5,) * 3
Image.new("RGB", (40, 40)).save("0.png")
Prepare(*how, (0.5,) * 3)(decode("0.png"))
assert not asked, f"{asked} are not for models and their inputs"
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
# with the extras; albumentations would ask the network for its newest version, and keep any error to itself
import socket
sys.path.append(sys.argv[1])
asked.clear()
network = []
socket.getaddrinfo = socket.socket.connect = socket.socket.connect_ex = lambda *args, **how: network.append(args)
from vitrel.data.augment import Augmenter
Augmenter(Augmentation(), *how)
assert asked == {"albumentations", "cv2"} and not network, (asked, network)
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


@pytest.mark.slow(seconds=12)
def test_the_wheel_alone(tmp_path, monkeypatch):
    """Built from the source distribution, installed in an environment of what it requires, used in an empty folder."""
    backend = pytest.importorskip("hatchling.build")
    ours = ("PYTHON", "PIP_TARGET", "NO_ALBUMENTATIONS_UPDATE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}

    def run(*command):
        done = subprocess.run([*map(str, command)], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    monkeypatch.chdir(ROOT)
    sdist = tmp_path / backend.build_sdist(str(tmp_path))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path / sdist.name.removesuffix(".tar.gz"))
    wheel = tmp_path / backend.build_wheel(str(tmp_path))
    assert not any("benchmark" in name for name in zipfile.ZipFile(wheel).namelist())
    venv.create(tmp_path / "venv", symlinks=True)
    here = tmp_path / "venv" / "bin"
    run(sys.executable, "-m", "pip", "--python", here / "python", "install", "--quiet", "--no-deps", wheel)
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    link_requirements(site)
    assert run(here / "vitrel", "--version").startswith("vitrel ")
    (tmp_path / "use.py").write_text(USE)
    run(here / "python", "use.py", sysconfig.get_path("purelib"))
    assert (tmp_path / "folder" / "config.json").is_file()
