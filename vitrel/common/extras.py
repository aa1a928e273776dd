"""Optional packages: the extra that each belongs to, and the error with the install command if one is missing."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec

from vitrel.common.files import CHECKOUT

EXTRAS = {  # extra: its modules, in addition to torch, torchvision, timm, numpy and their dependencies
    "train": (
        "lightning", "jsonargparse", "rich", "tensorboard", "torchmetrics", "albumentations", "cv2",
    ),
    "evaluate": ("pandas", "scipy", "torchmetrics", "matplotlib", "jinja2"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "datasets": ("datasets",),
    "segmentation": ("segmentation_models_pytorch",),
}  # fmt: skip


TRAINING = ("lightning", "jsonargparse", "tensorboard", "torchmetrics")  # what every training imports


class MissingExtra(ImportError):
    """Raised if a package of an extra (optional dependencies, see EXTRAS) is missing; the message has the install command."""


@contextmanager
def optional_import() -> Iterator[None]:
    """Context manager for importing packages of an extra: raises `MissingExtra`, with the install command, if one is missing.

    A ModuleNotFoundError for a module of no extra stays as it is.

    >>> with optional_import():
    ...     import pandas as pd
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if not any(module in modules for modules in EXTRAS.values()):
            raise
        raise _missing([module]) from error


def require(*modules: str) -> None:
    """Raise `MissingExtra` unless all these modules, named as in EXTRAS, are installed; none is imported, so it is quick."""
    if missing := absent(*modules):
        raise _missing(missing)


def absent(*modules: str) -> list[str]:
    """Return those of the modules that are not installed, in their order; none is imported."""
    return [module for module in modules if find_spec(module) is None]


def install_command(*extras: str) -> str:
    """Return the pip command that installs extras, keys of EXTRAS: `pip install -e` of the folder in a checkout of vitrel.

    For an installed wheel it names their packages, since no index holds vitrel under its name.
    """
    project = CHECKOUT / "pyproject.toml"
    if project.is_file() and 'name = "vitrel"' in project.read_text("utf-8", "replace"):
        return f'pip install -e "{CHECKOUT}[{",".join(extras)}]"'
    packages = dict.fromkeys(package for extra in extras for package in _packages(extra))
    return "pip install " + " ".join(f'"{text}"' if re.search(r"[<>=!~\[]", text) else text for text in packages)


def _missing(modules: list[str]) -> MissingExtra:
    """Return the error for missing modules; its command installs as few extras as have them, of several the smallest."""
    owners = [[extra for extra, own in EXTRAS.items() if module in own] for module in modules]
    extras: list[str] = []
    for possible in sorted(owners, key=len):
        if not {*possible} & {*extras}:
            extras.append(min(possible, key=lambda extra: len(EXTRAS[extra])))
    command = install_command(*extras)
    return MissingExtra(f"{', '.join(modules)} {'is' if len(modules) == 1 else 'are'} not installed: {command}")


def _packages(extra: str) -> list[str]:
    """Return the requirements of an extra, such as "onnx" or "lightning>=2.6", from the metadata of the installed wheel."""
    lines = [line.partition(";") for line in metadata.requires("vitrel") or ()]
    return [name.strip() for name, _, marker in lines if re.search(rf"extra *== *['\"]{extra}['\"]", marker)]
