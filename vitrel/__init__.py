"""vitrel: two-dimensional position in vision transformers, with every encoding behind one interface, at any image size.

Importing it registers the models with timm: `import timm, vitrel; timm.create_model("vitrel_swin_t")`.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "POSITIONS",
    "Grid",
    "PositionEncoding",
    "RelativeAttention",
    "Table",
    "Terms",
    "assert_position_conforms",
    "check",
    "combine",
    "create_model",
    "create_position",
    "diagnose",
    "evaluate",
    "explain",
    "from_timm",
    "load",
    "load_pretrained",
    "optimize",
    "pad_prefix",
    "position_bias",
    "pyramid",
    "register_position",
    "relativize",
    "resolution_report",
    "save",
    "tiled_features",
]


def _is_command() -> bool:
    """Return whether this process is the `vitrel` command or `python -m vitrel`.

    For the latter sys.argv[0] is -m while Python finds the module.
    """
    program = (sys.argv or [""])[0]
    by_module = program == "-m" and ("-m", "vitrel") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return by_module or Path(program).stem == "vitrel"


_COMMAND = _is_command()

# The command imports torch and timm, which take seconds, only after reading its options, so that --help is fast.
if not _COMMAND:
    from vitrel.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Return a public name in the process of the command, where a module of the user's own imports vitrel."""
    if name not in __all__:
        raise AttributeError(f"module 'vitrel' has no attribute {name!r}")
    return getattr(importlib.import_module("vitrel.public"), name)
