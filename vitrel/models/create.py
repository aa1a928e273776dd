"""`vitrel.create_model`: timm.create_model with helpful errors, and a check of model names."""

from pathlib import Path

import timm
from torch import nn

from vitrel.names import nearest
from vitrel.weights.folder import from_folder

# arguments of timm.create_model that name a source of weights; refused where a checkpoint brings its own weights
WEIGHT_ARGUMENTS = frozenset({"pretrained", "checkpoint_path", "cache_dir"})


def create_model(name: str, **kwargs) -> nn.Module:
    """Build a model by timm.create_model, with this package's models registered.

    Raises ValueError for an unknown name, with the nearest known names. For "local-dir:FOLDER" raises FileNotFoundError if
    there is no such folder, ValueError if its files are damaged.
    """
    if name.startswith("local-dir:"):
        return from_folder(Path(name.partition(":")[2]), kwargs)
    check_model_name(name, allow_sources=True)
    return timm.create_model(name, **kwargs)


def check_model_name(name: str, allow_sources: bool = False) -> None:
    """ValueError, with the nearest names, for a model that is not in timm's registry.

    allow_sources: accept sources such as local-dir:folder and hf-hub:repository, without looking into them.
    """
    if not (timm.is_model(name) or (allow_sources and (":" in name or "/" in name))):
        near = nearest(name, timm.list_models(), cutoff=0.5)
        raise ValueError(f"unknown model {name!r}; nearest: {', '.join(near) or 'none'} (timm.list_models lists all)")
