"""Optional dependencies: which package belongs to which extra, and the error if it is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

EXTRAS = {  # extra: its modules, in addition to torch, torchvision, timm, numpy and their dependencies
    "train": (
        "lightning", "jsonargparse", "rich", "tensorboard", "torchmetrics", "albumentations", "cv2", "webdataset", "matplotlib",
    ),
    "evaluate": ("pandas", "matplotlib", "plotly", "webdataset"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "completion": ("shtab",),
}  # fmt: skip


class MissingExtra(ImportError):
    """A package of an extra is not installed; the message names the command that installs it."""


@contextmanager
def optional_import() -> Iterator[None]:
    """Context manager for the import of a package of an extra: raises `MissingExtra`, with the install command, if it is not
    installed.

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
        command = f"pip install 'vitrel[{extras[0]}]', or 'vitrel[all]' for everything"
        raise MissingExtra(f"{module} is not installed: {command}") from error


def absent(extra: str) -> list[str]:
    """Return the modules of an extra that are not installed."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]
