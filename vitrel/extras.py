"""The optional parts of an installation: which package belongs to which extra, and what to say where it is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

EXTRAS = {  # extra: the modules that it brings, beside torch, torchvision, timm, numpy and what these bring
    "train": (
        "lightning",
        "jsonargparse",
        "rich",
        "tensorboard",
        "torchmetrics",
        "albumentations",
        "cv2",
        "webdataset",
        "matplotlib",
    ),
    "evaluate": ("pandas", "matplotlib", "plotly", "webdataset"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "completion": ("shtab",),
}


class MissingExtra(ImportError):
    """A package is not installed that belongs to an extra; the message names the command that installs it."""


@contextmanager
def optional_import() -> Iterator[None]:
    """Around the import of a package that an extra brings: where it is not installed, a `MissingExtra` says what installs it.

    >>> with optional_import():
    ...     import pandas as pd
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extras = [extra for extra, modules in EXTRAS.items() if module in modules]
        if not extras:
            raise
        way_out = f"pip install 'vitrel[{extras[0]}]', or 'vitrel[all]' for everything"
        raise MissingExtra(f"{module} is not installed: {way_out}") from error


def absent(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]
