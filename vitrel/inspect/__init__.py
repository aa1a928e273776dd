"""Inspection of position in any model, without changing it.

`recorder` sees the attention of a model; `any_model` brings a model to a size and traces it there; `vitrel.diagnose`, recorded
attention (`attention`), leaks of windows and figures (`plot`) read what is seen. One attention is a `recorder.Attention` as its
operators show it, an `any_model.LocatedCall` once its tokens are located, and an `attention.Layer` with its weights.
`vitrel.explain` shows the terms of attention.
"""

import importlib
from types import ModuleType

_MODULES = ("any_model", "attention", "features", "leaks", "plot", "recorder")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:  # not at import: `plot` brings matplotlib
        return importlib.import_module(f"vitrel.inspect.{name}")
    raise AttributeError(f"module 'vitrel.inspect' has no attribute {name!r}")
