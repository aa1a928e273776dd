"""Inspection of what a model, ours or timm's, does with position; the model itself stays unchanged.

`vitrel.diagnose`, `vitrel.explain` and `vitrel.resolution_report`, recorded attention and gradient footprints of blocks, and in
`vitrel.inspect.plot` the pictures.
"""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name == "plot":  # not at import: it brings matplotlib
        return importlib.import_module("vitrel.inspect.plot")
    raise AttributeError(f"module 'vitrel.inspect' has no attribute {name!r}")
