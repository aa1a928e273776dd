"""What importing the package and its parts brings, in fresh processes: few of them, since each imports torch and timm anew."""

import os
import subprocess
import sys

import pytest
from PIL import Image

HEAVY = ("lightning", "pytorch_lightning", "albumentations", "cv2", "pandas", "matplotlib")


def printed(code, *arguments):
    """The lines that a fresh process prints; it has `seen`, the heavy modules imported so far."""
    first = f"import sys\ndef seen(): return [name for name in {HEAVY} if name in sys.modules]\n"
    environment = {name: value for name, value in os.environ.items() if name != "NO_ALBUMENTATIONS_UPDATE"}
    done = subprocess.run([sys.executable, "-c", first + code, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_package_is_light_and_its_parts_bring_what_they_need(tmp_path):
    """Models run where only torch and timm are; albumentations is imported only to
    augment, and without the network: at import it would ask for its newest version, and keep any error to itself.
    """
    Image.new("RGB", (40, 40)).save(tmp_path / "0.png")
    code = """
import timm, vitrel
assert timm.is_model("vitrel_swin_t") and vitrel.relativize and vitrel.inspect.diagnose
timm.create_model("vitrel_vit_n8_table")
print("models", seen())
import vitrel.data as d
how = (32, 32), (0.5,) * 3, (0.5,) * 3
d.Prepare(*how)(d.decode(sys.argv[1]))
print("evaluation", seen())
import socket
asked = []
socket.getaddrinfo = socket.socket.connect = socket.socket.connect_ex = lambda *args, **how: asked.append(args)
from vitrel.data.augment import Augmenter
Augmenter(d.Augmentation(), *how[:2])
print("albumentations", seen(), asked)
vitrel.evaluate.at_sizes
print("evaluations", "pandas" in seen())
"""
    assert printed(code, str(tmp_path / "0.png")) == [
        "models []",
        "evaluation []",
        "albumentations ['albumentations', 'cv2'] []",
        "evaluations True",
    ]
