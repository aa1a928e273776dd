"""Inspection of position in a model, vitrel's or timm's, without changing the model.

Here are `vitrel.diagnose` and `vitrel.explain`, recorded attention, gradient footprints of blocks and, in
`vitrel.inspect.plot`, figures.
"""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name == "plot":  # not at import: it brings matplotlib
        return importlib.import_module("vitrel.inspect.plot")
    raise AttributeError(f"module 'vitrel.inspect' has no attribute {name!r}")
