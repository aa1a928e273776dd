"""Models from a folder that timm's `save_for_hf` or vitrel export wrote: config.json and the weights beside it."""

import json
from pathlib import Path
from typing import Any

import timm
from torch import nn

from vitrel.weights.read import check_file

_WEIGHTS = (".safetensors", ".pth", ".bin", ".tar")  # timm takes one of them


def from_folder(folder: Path, arguments: dict[str, Any]) -> nn.Module:
    """timm.create_model of "local-dir:FOLDER" with these arguments; with `pretrained`, the files of weights are checked first.

    FileNotFoundError where there is no folder; ValueError that says what of it is damaged, what there is, and the way out.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: local-dir: takes one that holds a model's config.json and its weights")
    try:
        try:
            known = timm.is_model(str(json.loads((folder / "config.json").read_text("utf-8"))["architecture"]))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"its config.json is damaged ({type(error).__name__}: {error})") from error
        if not known:
            raise ValueError("its config.json names an architecture that neither timm nor vitrel knows")
        for file in sorted(folder.iterdir()) if arguments.get("pretrained") else ():
            if file.suffix in _WEIGHTS:
                check_file(file)
        return timm.create_model(f"local-dir:{folder}", **arguments)
    except (MemoryError, TypeError):  # of the arguments
        raise
    except Exception as error:  # a damaged file raises almost anything
        what = " ".join(str(error).split())[:300].rstrip(".") or "a file is cut off"
        files = ", ".join(f"{path.name} ({path.stat().st_size:,} bytes)" for path in sorted(folder.iterdir())[:6]) or "nothing"
        way_out = "Copy the folder again, or write it anew with vitrel export or timm's save_for_hf"
        raise ValueError(f"no model can be built from {folder}: {what}; there is {files}. {way_out}") from error
