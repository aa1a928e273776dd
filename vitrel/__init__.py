"""vitrel: two-dimensional position in vision transformers, with every encoding behind one interface, at any image size.

Importing it registers the models with timm: `import timm, vitrel; timm.create_model("vitrel_swin_t")`.
"""

import sys
from pathlib import Path

__version__ = "0.1.0"
__all__ = [
    "POSITIONS",
    "Grid",
    "PositionEncoding",
    "RelativeAttention",
    "Table",
    "Terms",
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
    "relativize",
    "resolution_report",
    "save",
    "tiled_features",
]


def _is_command() -> bool:
    """True if this process is the `vitrel` command or `python -m vitrel`, for which sys.argv[0] is -m while Python finds the
    module.
    """
    program = (sys.argv or [""])[0]
    by_module = program == "-m" and ("-m", "vitrel") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return by_module or Path(program).stem == "vitrel"


_COMMAND = _is_command()

# The command imports torch and timm, which take seconds, only after reading its options, so that --help is fast.
if not _COMMAND:
    from vitrel import evaluate
    from vitrel.convert import from_timm, load, relativize, save
    from vitrel.cpu.optimize import optimize
    from vitrel.grid import Grid
    from vitrel.inputs import tiled_features
    from vitrel.inspect.diagnose import diagnose
    from vitrel.inspect.explain import explain
    from vitrel.inspect.resolution_report import resolution_report
    from vitrel.layers import RelativeAttention
    from vitrel.models.create import create_model
    from vitrel.position import POSITIONS, PositionEncoding, Table, Terms, combine, create_position
    from vitrel.weights.load import load_pretrained
