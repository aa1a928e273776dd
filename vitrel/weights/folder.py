"""Models from a folder with config.json and weights, as written by timm's `save_for_hf` or vitrel export."""

import json
from pathlib import Path
from typing import Any

import timm
from torch import nn

from vitrel.weights.read import check_file

_WEIGHTS = (".safetensors", ".pth", ".bin", ".tar")  # timm reads one of them


def from_folder(folder: Path, arguments: dict[str, Any]) -> nn.Module:
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
