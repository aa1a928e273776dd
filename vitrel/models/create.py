"""`vitrel.create_model`: timm.create_model with errors that name the way out; and the check of a name alone."""

from pathlib import Path

import timm
from torch import nn

from vitrel.names import nearest
from vitrel.weights.folder import from_folder

# arguments of timm.create_model that say where weights come from: a checkpoint holds its own
WEIGHT_ARGUMENTS = frozenset({"pretrained", "checkpoint_path", "cache_dir"})


def create_model(name: str, **kwargs) -> nn.Module:
    """timm.create_model, after this package has registered its models.

    Raises ValueError with the nearest names for an unknown one; for "local-dir:FOLDER" ValueError that says what of the folder
    is damaged, FileNotFoundError where there is none.
    """
    if name.startswith("local-dir:"):
        return from_folder(Path(name.partition(":")[2]), kwargs)
    check_model_name(name, elsewhere=True)
    return timm.create_model(name, **kwargs)


def check_model_name(name: str, elsewhere: bool = False) -> None:
    """ValueError with the nearest names for a model that is not in timm's registry.

    elsewhere: folders and repositories, as local-dir:folder and hf-hub:repository, pass too; they are not looked at.
    """
    if not (timm.is_model(name) or (elsewhere and (":" in name or "/" in name))):
        near = nearest(name, timm.list_models(), cutoff=0.5)
        raise ValueError(f"unknown model {name!r}; nearest: {', '.join(near) or 'none'} (timm.list_models lists all)")
