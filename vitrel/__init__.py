"""vitrel: two-dimensional position in vision transformers, every encoding behind one interface, at any resolution.

Importing it registers the models with timm: `import timm, vitrel; timm.create_model("vitrel_swin_t")`.
"""

import importlib
import json
from pathlib import Path
from types import ModuleType

import timm
from torch import nn

from vitrel.convert import relativize
from vitrel.grid import Grid
from vitrel.layers import RelativeAttention
from vitrel.models import load_pretrained, save_pretrained
from vitrel.models.optimize import optimize
from vitrel.models.tiles import tiled_features
from vitrel.names import nearest
from vitrel.position import POSITIONS, PositionEncoding, Table, Terms, combine, create_position
from vitrel.probe.diagnose import diagnose
from vitrel.probe.explain import explain

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
    "save_pretrained",
    "tiled_features",
]


def create_model(name: str, **kwargs) -> nn.Module:
    """timm.create_model, after this package has registered its models.

    Raises ValueError with the nearest names for an unknown one; for "local-dir:FOLDER" ValueError that says what of the folder
    is damaged, FileNotFoundError where there is none.
    """
    if name.startswith("local-dir:"):
        return _from_folder(Path(name.partition(":")[2]), kwargs)
    if not (timm.is_model(name) or ":" in name or "/" in name):  # local-dir:folder, hf-hub:repository
        near = nearest(name, timm.list_models(), cutoff=0.5)
        raise ValueError(f"unknown model {name!r}; nearest: {', '.join(near) or 'none'} (timm.list_models lists all)")
    return timm.create_model(name, **kwargs)


def _from_folder(folder: Path, arguments: dict) -> nn.Module:
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: local-dir: takes one with a model's config.json and its weights")
    try:
        try:
            known = timm.is_model(str(json.loads((folder / "config.json").read_text("utf-8"))["architecture"]))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"its config.json is damaged ({type(error).__name__}: {error})") from error
        if not known:
            raise ValueError("its config.json names an architecture that neither timm nor vitrel knows")
        return timm.create_model(f"local-dir:{folder}", **arguments)
    except (MemoryError, TypeError):  # of the arguments
        raise
    except Exception as error:  # a damaged file raises almost anything
        what = " ".join(str(error).split())[:300].rstrip(".") or "a file is empty or cut off"
        way_out = "Copy the folder again, or write it anew with tools/export.py or timm's save_for_hf"
        raise ValueError(f"no model can be built from {folder}: {what}. {way_out}") from error


def __getattr__(name: str) -> ModuleType:
    if name in ("plot", "transfer"):  # not at import: they bring pandas and plotting
        return importlib.import_module(f"vitrel.{name}")
    raise AttributeError(f"module 'vitrel' has no attribute {name!r}")
