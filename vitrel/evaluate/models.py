"""Trained models, ready to be evaluated: our checkpoints, timm's names with weights from a file, and models in memory."""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_model_data_config
from timm.layers import to_2tuple
from timm.models import load_checkpoint as load_timm_checkpoint
from torch import nn

from vitrel.convert.saving import load, not_finite, read_checkpoint
from vitrel.files import shown
from vitrel.inspect.any_model import model_name, trained_size
from vitrel.models.backbone import Backbone
from vitrel.models.config import TRUNKS
from vitrel.models.create import check_model_name, create_model
from vitrel.position import POSITIONS, key_of
from vitrel.sizes import Size
from vitrel.weights.build import model_for
from vitrel.weights.load import apply_plan, read_file
from vitrel.weights.read import ARRAYS, check_file, guarding
from vitrel.weights.unwrap import unwrap


@dataclass(frozen=True)
class Trained:
    """A trained model and what it was trained with: `img_size` in pixels, `label` its name in tables and plots.

    classes: names in the order of the outputs, () where they are not known. outputs: {class of the data: index of the output};
    restrict: only the outputs of the data's classes compete. encoding: "timm" for models of another library. model_args: JSON
    of the arguments it was built with, where its weights do not tell them.
    """

    model: nn.Module
    name: str
    label: str
    encoding: str
    img_size: tuple[int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    interpolation: str
    seed: int | None
    path: Path
    outputs: Mapping[str, int] | None = None
    restrict: bool = False
    model_args: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "label"):  # which may hold the path of a file
            object.__setattr__(self, name, shown(getattr(self, name)))


def load_checkpoint(path: str | Path, label: str | None = None, seed: int | None = None) -> Trained:
    """The model of a checkpoint of `vitrel train`, or of a file that `vitrel.save` wrote, in eval mode on the CPU.

    Nothing but this file is read, whatever it says. Raises FileNotFoundError for a missing file and ValueError for one that is
    empty, cut off, not ours, damaged, does not fit its own model, or holds NaN; each message names the path and what is wrong.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        model = load(path)
        classes = tuple(model.pretrained_cfg.get("label_names") or ())
        return replace(trained_model(model, label=label or path.stem, path=path), seed=seed, classes=classes)
    model, about = read_checkpoint(path)
    return Trained(
        model=model,
        name=about["model"],
        label=label or _label_of(about["model"], path),
        encoding=encoding_of(model),
        img_size=tuple(about["img_size"]),
        classes=tuple(about["classes"]),
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
        crop_pct=float(about["crop_pct"]),
        interpolation=about["interpolation"],
        seed=seed if seed is not None else about.get("seed"),
        path=path,
    )


def _label_of(name: str, path: Path) -> str:
    """The name in tables: that of the model, or of the run's folder for one that its name does not describe (vitrel_vit)."""
    if name not in TRUNKS:
        return name
    return path.resolve().parent.parent.name if path.resolve().parent.name == "checkpoints" else path.stem


def load_model(
    name: str,
    weights: str | Path | None = None,
    model_args: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    **about: Any,
) -> Trained:
    """The model `name` with the weights of a file, in eval mode on the CPU, with as many outputs as the file has classes.

    name: of timm's registry, or "local-dir:FOLDER" as timm's save_for_hf and vitrel export write it, which needs no weights.
    weights: .safetensors, .pth, .bin or .npz as timm or its authors save them, checkpoints of timm's train.py (its averaged
    weights first); for ours, whatever `vitrel.load_pretrained` reads. pretrained: in the place of a file, what timm has for
    that name, from its cache or the network. model_args: of timm.create_model. about: see `trained_model`; with `img_size`,
    a model that is built for a size is built for that one.
    Raises ValueError with the nearest names for an unknown one, for missing weights, for a folder that is damaged, and for
    weights that do not fit, hold NaN or more than tensors; FileNotFoundError for a missing file or folder.
    """
    arguments = _arguments(model_args, about)
    if name.startswith("local-dir:"):
        model = _create(name, arguments | {"pretrained": True})
    else:
        check_model_name(name)
        if weights is not None:
            model = _build_from_weights(name, Path(weights), arguments)
        elif pretrained:
            model = _create(name, arguments | {"pretrained": True})
        else:
            raise ValueError(f"{name} has no weights: give a file of them (--weights), or --pretrained for those that timm has")
    if bad := not_finite(model):
        raise ValueError(f"the weights of {name} hold NaN or infinity in {bad}")
    trained = trained_model(model.eval(), name, path=Path(weights or name.partition(":")[2]), **about)
    return replace(trained, model_args=json.dumps(model_args, sort_keys=True, default=str)) if model_args else trained


def random_model(name: str, model_args: Mapping[str, Any] | None = None, **about: Any) -> Trained:
    """The model `name` with the random weights of a fixed seed, in eval mode on the CPU; see `load_model`."""
    arguments = _arguments(model_args, about)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = _create(name, arguments)
        except RuntimeError as error:
            raise ValueError(f"{name} cannot be built: {error}") from error
    return trained_model(model.eval(), name, **about)


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
    return Trained(
        model=model,
        name=name,
        label=label or name,
        encoding=encoding_of(model),
        img_size=to_2tuple(img_size or trained_size(model)),
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


def encoding_of(model: nn.Module) -> str:
    """The keys of the position encodings in a model, joined by '+': "none" without one, "timm" for another library's model."""
    if not isinstance(model, Backbone):
        return "timm"
    known = set(POSITIONS.values())
    found = dict.fromkeys(key_of(module) for module in model.modules() if type(module) in known)
    return "+".join(key for key in found if key != "none") or "none"


def class_outputs(trained: Trained, classes: Sequence[str], data: str) -> tuple[int, ...]:
    """The output that stands for each class of the data, in their order.

    Refuses data whose class list, order included, is not the one the head was trained on: labels would be shifted. Where that
    list is not known: as `trained.outputs` says; else the number of outputs must be that of the classes; ImageNet's heads find
    classes that are named by WordNet's numbers (n01440764).
    """
    if trained.classes:
        _check_classes(trained, classes, data)
        return tuple(range(len(classes)))
    count = trained.model.num_classes
    if trained.outputs is not None:
        if lacking := [name for name in classes if name not in trained.outputs]:
            raise ValueError(f"the class indices of {trained.label} lack {', '.join(lacking[:5])}, which {data} has")
        if beyond := [name for name in classes if not 0 <= trained.outputs[name] < count]:
            where = f"{beyond[0]} is output {trained.outputs[beyond[0]]}"
            raise ValueError(f"{trained.label} has {count} outputs, from 0, but by the class indices {where}")
        return tuple(trained.outputs[name] for name in classes)
    if (found := _by_wordnet(count, classes)) is not None:
        return found
    if count != len(classes):
        raise ValueError(
            f"{trained.label} has {count} outputs, but {data} has {len(classes)} classes: say which output is which class "
            "(--class-indices FILE, a class and its index per line)"
        )
    return tuple(range(count))


def class_map(trained: Trained, classes: Sequence[str]) -> str:
    """How `class_outputs` finds the output of each class: "order", "wordnet" (by the numbers ImageNet's classes have there), or
    "file" with a digest of `outputs`; "restricted" if only they compete.
    """
    if trained.outputs is not None and not trained.classes:
        pairs = repr(sorted(trained.outputs.items()))
        where = f"file {hashlib.sha256(pairs.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
    else:
        by_number = not trained.classes and _by_wordnet(trained.model.num_classes, classes) is not None
        where = "wordnet" if by_number else "order"
    return f"{where}, restricted" if trained.restrict else where


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


def _by_wordnet(count: int, classes: Sequence[str]) -> tuple[int, ...] | None:
    """The outputs of classes named by WordNet's numbers, of an ImageNet head of `count`; None for other names or heads."""
    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None or not all(re.fullmatch(r"n\d{8}", name) for name in classes):
        return None
    place = {name: i for i, name in enumerate(ImageNetInfo(subset).label_names())}
    return tuple(place[name] for name in classes) if all(name in place for name in classes) else None


def _check_classes(trained: Trained, classes: Sequence[str], data: str) -> None:
    ours, theirs = list(trained.classes), list(classes)
    if ours == theirs:
        return
    missing, extra = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    parts = [f"{word} {', '.join(names[:5])}" for word, names in (("lacks", missing), ("adds", extra)) if names]
    raise ValueError(
        f"{trained.path} was trained on {len(ours)} classes, but {data} has {len(theirs)}: "
        f"it {' and '.join(parts) or 'lists them in another order'}. Evaluate on data with the very classes of training."
    )


def _build_from_weights(name: str, weights: Path, arguments: dict[str, Any]) -> nn.Module:
    """The model with the file's weights, all of them; as many outputs as the file's classifier has."""
    try:
        if name.startswith("vitrel_"):
            model, plan = model_for(name, arguments, read_file(weights))
            return apply_plan(model, plan)
        if weights.suffix in ARRAYS:  # of the authors' own code, which the model itself reads
            check_file(weights)
            model = _create(name, arguments)
            with guarding(str(weights)):
                load_timm_checkpoint(model, str(weights))
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


def _arguments(model_args: Mapping[str, Any] | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """What the model is built with: `model_args`, and the size of training where they name none."""
    given = {"img_size": about["img_size"]} if about.get("img_size") else {}
    return given | dict(model_args or {})


def _create(name: str, arguments: dict[str, Any]) -> nn.Module:
    with guarding(name, arguments):
        try:
            return create_model(name, **arguments)
        except TypeError:  # a network that is built for no size
            return create_model(name, **{key: value for key, value in arguments.items() if key != "img_size"})


def _read_state(path: Path) -> dict[str, torch.Tensor]:
    """The weights in a file of timm's or of its train.py, averaged ones first; see `vitrel.weights.unwrap`."""
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}" + (": it is a folder" if path.is_dir() else ""))
    loaded = read_file(path, allowed=(argparse.Namespace,))  # the settings in checkpoints of timm's train.py
    found = unwrap(loaded, str(path))
    if found.beside:
        raise ValueError(f"{path} holds {', '.join(found.beside[:5])} beside the weights of a model")
    return found.state
