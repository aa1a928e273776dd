"""`vitrel.create_model`: timm.create_model with helpful errors, for names and for folders with config.json and weights."""

import json
from pathlib import Path
from typing import Any

import timm
from torch import nn

from vitrel.common.names import nearest
from vitrel.weights.read import check_file

# arguments of timm.create_model that name a source of weights; refused where a checkpoint brings its own weights
WEIGHT_ARGUMENTS = frozenset({"pretrained", "checkpoint_path", "cache_dir"})
_WEIGHTS = (".safetensors", ".pth", ".bin", ".tar")  # suffixes of the files of which timm reads one


def create_model(name: str, **kwargs) -> nn.Module:
    """Build a model by timm.create_model, with this package's models registered.

    Raises ValueError for an unknown name, with the nearest known names. For "local-dir:FOLDER" raises FileNotFoundError if
    there is no such folder, ValueError if its files are damaged.
    """
    if name.startswith("local-dir:"):
        return _from_folder(Path(name.partition(":")[2]), kwargs)
    check_model_name(name, allow_sources=True)
    return timm.create_model(name, **kwargs)


def create_sized(name: str, img_size: tuple[int, int] | None = None, **kwargs) -> nn.Module:
    """Build a model as `create_model`, for images of `img_size` (h, w) pixels where its architecture takes a size.

    One without position, such as a ResNet, takes none. With None, the model keeps its default. Raises as `create_model`, and
    ValueError for a wrong argument.
    """
    try:
        try:
            return create_model(name, **kwargs | ({} if img_size is None else {"img_size": img_size}))
        except TypeError as error:
            if img_size is None or "img_size" not in str(error):
                raise
        return create_model(name, **kwargs)
    except TypeError as error:
        raise ValueError(f"wrong argument of the model {name}: {error}") from error


def check_model_name(name: str, allow_sources: bool = False) -> None:
    """ValueError, with the nearest names, for a model that is not in timm's registry.

    allow_sources: accept sources such as local-dir:folder and hf-hub:repository, without looking into them.
    """
    if not (timm.is_model(name) or (allow_sources and (":" in name or "/" in name))):
        near = nearest(name, timm.list_models(), cutoff=0.5)
        raise ValueError(f"unknown model {name!r}; nearest: {', '.join(near) or 'none'} (timm.list_models lists all)")


def _from_folder(folder: Path, arguments: dict[str, Any]) -> nn.Module:
    """Return timm.create_model("local-dir:FOLDER", **arguments); with `pretrained`, the weight files are checked first.

    FileNotFoundError if there is no folder; ValueError that names the damage, the files in the folder and the fix.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: local-dir: takes one that holds a model's config.json and its weights")
    try:
        try:
            is_model = timm.is_model(str(json.loads((folder / "config.json").read_text("utf-8"))["architecture"]))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"its config.json is damaged ({type(error).__name__}: {error})") from error
        if not is_model:
            raise ValueError("its config.json names an architecture that neither timm nor vitrel has")
        for file in sorted(folder.iterdir()) if arguments.get("pretrained") else ():
            if file.suffix in _WEIGHTS:
                check_file(file)
        return timm.create_model(f"local-dir:{folder}", **arguments)
    except (MemoryError, TypeError):  # the arguments are wrong, not the file
        raise
    except Exception as error:  # a damaged file raises almost anything
        reason = " ".join(str(error).split())[:300].rstrip(".") or "a file is cut off"
        files = ", ".join(f"{path.name} ({path.stat().st_size:,} bytes)" for path in sorted(folder.iterdir())[:6]) or "nothing"
        fix = "Copy the folder again, or write it again with vitrel export or timm's save_for_hf"
        raise ValueError(f"no model can be built from {folder}: {reason}; it contains {files}. {fix}") from error
