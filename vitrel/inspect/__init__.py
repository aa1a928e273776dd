"""What a model does with position, seen from outside: any model of ours or of timm, unchanged.

`vitrel.diagnose`, `vitrel.explain` and `vitrel.resolution_report` are here, attention maps and footprints, and in
`vitrel.inspect.plot` the pictures of all of it.
"""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name == "plot":  # not at import: it brings matplotlib
        return importlib.import_module("vitrel.inspect.plot")
    raise AttributeError(f"module 'vitrel.inspect' has no attribute {name!r}")
