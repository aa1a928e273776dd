"""Models by their name in timm's registry, ours among them, with weights from a file, ready to be evaluated."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from timm.layers import to_2tuple
from timm.models import clean_state_dict, load_checkpoint
from torch import nn

import vitrel
from vitrel.evaluate.checkpoint import Trained, encoding_of
from vitrel.inspect.any_model import model_name
from vitrel.models.backbone import Backbone
from vitrel.names import nearest
from vitrel.sizes import Size
from vitrel.weights.build import model_for
from vitrel.weights.load import apply_plan, read_file
from vitrel.weights.read import ARRAYS, check_file, guarding

_AVERAGED_FIRST = ("state_dict_ema", "model_ema", "state_dict", "model")  # as timm.models.load_state_dict


def load_model(
    name: str, weights: str | Path | None = None, model_args: Mapping[str, Any] | None = None, **about: Any
) -> Trained:
    """The model `name` with the weights of a file, in eval mode on the CPU, with as many outputs as the file has classes.

    name: of timm's registry, or "local-dir:FOLDER" as timm's save_for_hf and tools/export.py write it, which needs no weights.
    weights: .safetensors, .pth, .bin or .npz as timm or its authors save them, checkpoints of timm's train.py (its averaged
    weights first); for ours, whatever `vitrel.load_pretrained` reads. model_args: of timm.create_model. about: see
    `trained_model`; with `img_size`, a model that is built for a size is built for that one.
    Raises ValueError with the nearest names for an unknown one, for missing weights, for a folder that is damaged, and for
    weights that do not fit, hold NaN or more than tensors; FileNotFoundError for a missing file or folder.
    """
    arguments = dict(model_args or {})
    if about.get("img_size"):
        arguments.setdefault("img_size", about["img_size"])
    if name.startswith("local-dir:"):
        model = _create(name, arguments | {"pretrained": True})
    elif not timm.is_model(name):
        near = nearest(name, timm.list_models(), cutoff=0.0)
        raise ValueError(f"unknown model {name!r}; the nearest are {', '.join(near)}")
    elif weights is None:
        raise ValueError(f"{name} has no weights: give a file of them (--weights), nothing is fetched from the network")
    else:
        model = _build(name, Path(weights), arguments)
    if bad := [key for key, value in model.state_dict().items() if value.is_floating_point() and not value.isfinite().all()]:
        raise ValueError(f"the weights of {name} hold NaN or infinity in {', '.join(bad[:5])}")
    trained = trained_model(model.eval(), name, path=Path(weights or name.partition(":")[2]), **about)
    return replace(trained, model_args=json.dumps(model_args, sort_keys=True, default=str)) if model_args else trained


def trained_model(
    model: nn.Module,
    name: str = "",
    *,
    label: str = "",
    img_size: Size | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    outputs: Mapping[str, int] | None = None,
    restrict: bool = False,
    path: Path = Path(),
) -> Trained:
    """A model in memory with what evaluation has to know of it; what is not given comes from its `pretrained_cfg`.

    img_size: (h, w) in pixels it was trained at. preprocessing: any of mean, std, crop_pct, interpolation. outputs, restrict:
    see `Trained`. ValueError for a model that does not say its number of classes, or a mean or std that is none.
    """
    name = name or model_name(model)
    if not getattr(model, "num_classes", 0):
        raise ValueError(f"{name} is no classifier: it has no num_classes, or none is left")
    known = resolve_model_data_config(model) | dict(preprocessing or {})
    for key in ("mean", "std"):
        if len(known[key]) != 3 or (key == "std" and min(known[key]) <= 0):
            above = " above 0" if key == "std" else ""
            raise ValueError(f"{key} is three numbers{above}, of red, green and blue, got {list(known[key])}")
    built = getattr(getattr(model, "patch_embed", None), "img_size", None)
    height, width = to_2tuple(img_size or built or known["input_size"][-2:])
    return Trained(
        model=model,
        name=name,
        label=label or name,
        encoding=encoding_of(model) if isinstance(model, Backbone) else "timm",
        img_size=(height, width),
        classes=(),
        mean=tuple(known["mean"]),
        std=tuple(known["std"]),
        crop_pct=float(known["crop_pct"]),
        interpolation=known["interpolation"],
        seed=None,
        path=path,
        outputs=outputs,
        restrict=restrict,
    )


def read_class_indices(path: str | Path) -> dict[str, int]:
    """{class: output} of a text file with a class, as the data names it, and the index of its output on every line.

    Further columns are passed over, and a first line that is a heading. FileNotFoundError, or ValueError naming the line.
    """
    found: dict[str, int] = {}
    # names of folders that are no UTF-8 come so from the file system too
    for number, line in enumerate(Path(path).read_text("utf-8", "surrogateescape").splitlines(), 1):
        words = line.split()
        if not words or (number == 1 and len(words) > 1 and not words[1].isdigit()):
            continue
        if len(words) < 2 or not words[1].isdigit() or found.setdefault(words[0], int(words[1])) != int(words[1]):
            raise ValueError(
                f"{path}, line {number}: {line!r} is not a class and the index of its output, such as 'n01440764 0'"
            )
    if not found:
        raise ValueError(f"{path} holds no class")
    return found


def _build(name: str, weights: Path, arguments: dict[str, Any]) -> nn.Module:
    """The model with the file's weights, all of them; as many outputs as the file's classifier has."""
    try:
        if name.startswith("vitrel_"):
            model, plan = model_for(name, arguments, read_file(weights))
            return apply_plan(model, plan)
        if weights.suffix in ARRAYS:  # of the authors' own code, which the model itself reads
            check_file(weights)
            model = _create(name, arguments)
            with guarding(str(weights)):
                load_checkpoint(model, str(weights))
            return model
        state = _read_state(weights)
        head = state.get(f"{timm.get_pretrained_cfg(name).classifier}.weight")
        if isinstance(head, torch.Tensor):
            arguments = {"num_classes": len(head)} | arguments
        model = _create(name, arguments)
        rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)  # of old layouts
        model.load_state_dict(state if rename is None else rename(state, model))
        return model
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{weights} does not fit {name}: {str(error)[:600]}") from error


def _create(name: str, arguments: dict[str, Any]) -> nn.Module:
    with guarding(name, arguments):
        try:
            return vitrel.create_model(name, **arguments)
        except TypeError:  # a network that is built for no size
            return vitrel.create_model(name, **{key: value for key, value in arguments.items() if key != "img_size"})


def _read_state(path: Path) -> dict[str, torch.Tensor]:
    """The weights that timm takes from a file: averaged ones first, names without the prefixes of DDP and torch.compile."""
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}" + (": it is a folder" if path.is_dir() else ""))
    loaded = read_file(path, allowed=(argparse.Namespace,))  # the settings in checkpoints of timm's train.py
    found = [loaded[key] for key in _AVERAGED_FIRST if loaded.get(key) is not None] if isinstance(loaded, dict) else []
    return clean_state_dict(found[0] if found else loaded)
