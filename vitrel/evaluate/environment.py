"""What an evaluation ran on: versions, the commit of the code, how images were decoded and resized."""

import platform
from importlib.metadata import version
from pathlib import Path

import timm
import torch
import torchvision

from vitrel.data import SHAPES, Reading
from vitrel.evaluate.settings import Row
from vitrel.files import commit


def environment(data: str, own: bool = False) -> Row:
    """Columns that are the same for all rows. own: images come from the user's own data set, prepared there."""
    drawn, custom = data in SHAPES, "the data set's own" if own else ""
    return {
        "decoder": custom or ("drawn" if drawn else Reading().decoder),
        "resize_backend": custom or ("drawn" if drawn else "torchvision antialiased"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "vitrel": version("vitrel"),
        "commit": commit(Path(__file__).parents[2]),
    }
