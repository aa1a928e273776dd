"""vitrel: two-dimensional position in vision transformers, every encoding behind one interface, at any resolution.

Importing it registers the models with timm: `import timm, vitrel; timm.create_model("vitrel_swin_t")`.
"""

import importlib
from pathlib import Path
from types import ModuleType

import timm
from torch import nn

from vitrel.convert import relativize
from vitrel.cpu.optimize import optimize
from vitrel.grid import Grid
from vitrel.inputs import tiled_features
from vitrel.inspect.diagnose import diagnose
from vitrel.inspect.explain import explain
from vitrel.inspect.resolution_report import resolution_report
from vitrel.layers import RelativeAttention
from vitrel.models import Backbone  # noqa: F401  registers the models with timm
from vitrel.names import nearest
from vitrel.position import POSITIONS, PositionEncoding, Table, Terms, combine, create_position
from vitrel.weights.folder import from_folder
from vitrel.weights.load import load_pretrained, save_pretrained

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
    "explain",
    "load_pretrained",
    "optimize",
    "relativize",
    "resolution_report",
    "save_pretrained",
    "tiled_features",
]


def create_model(name: str, **kwargs) -> nn.Module:
    """timm.create_model, after this package has registered its models.

    Raises ValueError with the nearest names for an unknown one; for "local-dir:FOLDER" ValueError that says what of the folder
    is damaged, FileNotFoundError where there is none.
    """
    if name.startswith("local-dir:"):
        return from_folder(Path(name.partition(":")[2]), kwargs)
    if not (timm.is_model(name) or ":" in name or "/" in name):  # local-dir:folder, hf-hub:repository
        near = nearest(name, timm.list_models(), cutoff=0.5)
        raise ValueError(f"unknown model {name!r}; nearest: {', '.join(near) or 'none'} (timm.list_models lists all)")
    return timm.create_model(name, **kwargs)


def __getattr__(name: str) -> ModuleType:
    if name == "evaluate":  # not at import: it brings pandas
        return importlib.import_module("vitrel.evaluate")
    raise AttributeError(f"module 'vitrel' has no attribute {name!r}")
