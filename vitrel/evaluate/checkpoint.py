"""From a training checkpoint back to its model, with every reason it may be refused."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from vitrel.files import shown
from vitrel.models.backbone import Backbone
from vitrel.position import POSITIONS, key_of  # importing vitrel registers the models with timm
from vitrel.weights.load import apply_plan, plan_weights, read_file

# arguments of timm.create_model that say where weights come from and go to: here they are the file's
_ELSEWHERE = {"pretrained", "checkpoint_path", "cache_dir", "device"}
_ONE = {"model": str, "model_args": dict, "crop_pct": (int, float), "interpolation": str}
_SEVERAL = {"classes": str, "img_size": int, "mean": (int, float), "std": (int, float)}


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
    """Builds the model a checkpoint of `tools/train.py` names and loads every weight of it, in eval mode on the CPU.

    Nothing but this file is read, whatever it says. Raises FileNotFoundError for a missing file and ValueError for one that is
    empty, cut off, not ours, damaged, does not fit its own model, or holds NaN; each message names the path and what is wrong.
    """
    path = Path(path)
    stored = _read(path)
    about = stored["vitrel"]
    model = _build(about, path)
    own = isinstance(model, Backbone)
    _load_weights(model, stored, path) if own else _load_foreign(model, stored, path)
    return Trained(
        model=model.eval(),
        name=about["model"],
        label=label or about["model"],
        encoding=encoding_of(model) if own else "timm",
        img_size=tuple(about["img_size"]),
        classes=tuple(about["classes"]),
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
        crop_pct=float(about["crop_pct"]),
        interpolation=about["interpolation"],
        seed=seed if seed is not None else about.get("seed"),
        path=path,
    )


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


def _read(path: Path) -> dict[str, Any]:
    stored = read_file(path)
    if not isinstance(stored, dict) or not {"vitrel", "state_dict"} <= stored.keys() or not isinstance(stored["vitrel"], dict):
        held = ", ".join(sorted(map(str, stored))[:6]) if isinstance(stored, dict) else type(stored).__name__
        raise ValueError(f"{path} is not a checkpoint of tools/train.py: it needs 'vitrel' and 'state_dict', it holds {held}")
    _check_entry(stored["vitrel"], path)
    return stored


def _check_entry(about: dict[str, Any], path: Path) -> None:
    for name, kind in (_ONE | _SEVERAL).items():
        value = about.get(name)
        parts = [value] if name in _ONE else value
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, kind) for part in parts):
            raise ValueError(f"{path} is damaged: {name} in its 'vitrel' is {value!r:.60}; train or copy it again")


def _build(about: dict[str, Any], path: Path) -> nn.Module:
    if not timm.is_model(about["model"]):  # for hf-hub:... and local-dir:... timm would ask the network, or another file
        raise ValueError(f"{path} asks for {about['model']!r}, which cannot be built: it is no model of vitrel's")
    arguments = {key: value for key, value in about["model_args"].items() if key not in _ELSEWHERE}
    arguments.update(num_classes=len(about["classes"]), img_size=tuple(about["img_size"]))
    try:
        return timm.create_model(about["model"], **arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} asks for {about['model']} with {arguments}, which cannot be built: {error}") from error


def _load_weights(model: nn.Module, stored: dict[str, Any], path: Path) -> None:
    try:
        plan = plan_weights(model, stored)
        resized = [row for row in plan.rows if row.resized]
        if resized:  # its own model has its very grids
            raise ValueError(f"{resized[0].target} is of another grid ({resized[0].resized})")
        apply_plan(model, plan)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} does not fit its model: {error}") from error
    except (AttributeError, LookupError, TypeError) as error:  # of names and records that are none
        raise ValueError(f"{path} is damaged: its weights or its record of positions are none ({error!r})") from error


def _load_foreign(model: nn.Module, stored: dict[str, Any], path: Path) -> None:
    try:
        model.load_state_dict({name.removeprefix("model."): value for name, value in stored["state_dict"].items()})
    except (RuntimeError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} does not fit its model: {str(error)[:600]}") from error
    if bad := [name for name, value in model.state_dict().items() if value.is_floating_point() and not value.isfinite().all()]:
        raise ValueError(f"{path} does not fit its model: the weights hold NaN or infinity in {', '.join(bad[:5])}")


def encoding_of(model: nn.Module) -> str:
    """The keys of the position encodings in a model, joined by '+'; "none" where there is none."""
    known = set(POSITIONS.values())
    found = dict.fromkeys(key_of(module) for module in model.modules() if type(module) in known)
    return "+".join(key for key in found if key != "none") or "none"
