"""What an evaluation ran on: versions, the commit of the code, how images were decoded and resized."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import timm
import torch
import torchvision

from vitrel.data import SHAPES, Reading
from vitrel.transfer.settings import Row


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


def commit(checkout: Path) -> str:
    """The commit of a git checkout, "-dirty" after it where a tracked file has changed; "" where it is none."""
    if not (checkout / ".git").exists():
        return ""
    try:
        head = _git(checkout, "rev-parse", "--short=12", "HEAD")
        return f"{head}-dirty" if _git(checkout, "status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
