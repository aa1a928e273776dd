"""Inspection of position in any model, without changing it.

`recorder` sees the attention of a model; `any_model` brings a model to a size and traces it there; `vitrel.diagnose`, recorded
attention (`attention`), leaks of windows and figures (`plot`) read what is seen. `vitrel.explain` shows the terms of attention.
"""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name == "plot":  # not at import: it brings matplotlib
        return importlib.import_module("vitrel.inspect.plot")
    raise AttributeError(f"module 'vitrel.inspect' has no attribute {name!r}")
