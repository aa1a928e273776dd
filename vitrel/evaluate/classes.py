"""Which output of a model stands for which class of the data."""

import re
from collections.abc import Sequence

from timm.data import ImageNetInfo, infer_imagenet_subset

from vitrel.common.warn import warn_once
from vitrel.data.readers.classes import order_note
from vitrel.evaluate.checkpoint import TrainedModel


def class_outputs(trained: TrainedModel, classes: Sequence[str], data: str) -> tuple[int, ...]:
    """Return the index of the model's output for each class of the data, in the data's order.

    They are `trained.outputs` where it is given. A model that knows its classes has to know all classes of the data, by name,
    and may know more. For other models: the outputs of an ImageNet head if the classes are named by WordNet IDs (n01440764);
    else 0, 1, 2, ..., which needs as many outputs as classes, and warns if timm's readers would sort the classes otherwise.
    ValueError where classes and outputs do not match; `data` names the data in messages.
    """
    count = trained.model.num_classes
    if trained.outputs is not None:
        if missing := [name for name in classes if name not in trained.outputs]:
            raise ValueError(f"the class indices of {trained.label} lack {', '.join(missing[:5])}, classes of {data}")
        if invalid := [name for name in classes if not 0 <= trained.outputs[name] < count]:
            mapping = f"{invalid[0]} to output {trained.outputs[invalid[0]]}"
            raise ValueError(f"{trained.label} has outputs 0 to {count - 1}, but its class indices map {mapping}")
        return tuple(trained.outputs[name] for name in classes)
    if trained.classes:
        return _by_name(trained, classes, data)
    if (outputs := _by_wordnet(count, classes)) is not None:
        return outputs
    if count != len(classes):
        raise ValueError(
            f"{trained.label} has {count} outputs, but {data} has {len(classes)} classes: give the output of each class "
            "(--class-indices FILE, a class, a tab and its index per line)"
        )
    if note := order_note(classes):
        warn_once(
            f"{trained.label} has no class names, so its outputs are taken in the order of the classes of {data}, {note}; "
            "--class-indices FILE, a class, a tab and its index per line, gives any other order"
        )
    return tuple(range(count))


def output_names(trained: TrainedModel) -> list[str]:
    """Return the name of each output, for people: the model's classes, descriptions for ImageNet heads, else "0", "1", ..."""
    count = trained.model.num_classes
    names = trained.classes or (getattr(trained.model, "pretrained_cfg", None) or {}).get("label_names") or ()
    if len(names) == count:
        return [*names]
    subset = infer_imagenet_subset({"num_classes": count})
    return [*map(ImageNetInfo(subset).index_to_description if subset else str, range(count))]


def _by_wordnet(count: int, classes: Sequence[str]) -> tuple[int, ...] | None:
    """Return the output of each class in an ImageNet head of `count` outputs.

    None where no ImageNet head of timm has `count` outputs, or a class is not one of its WordNet IDs.
    """
    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None or not all(re.fullmatch(r"n\d{8}", name) for name in classes):
        return None
    index = {name: i for i, name in enumerate(ImageNetInfo(subset).label_names())}
    return tuple(index[name] for name in classes) if all(name in index for name in classes) else None


def _by_name(trained: TrainedModel, classes: Sequence[str], data: str) -> tuple[int, ...]:
    """Return the model's output of each class of the data, by its name.

    ValueError where the model lacks a name, or where it has one twice and its classes are not those of the data in their order.
    """
    if list(trained.classes) == list(classes):
        return tuple(range(len(classes)))
    index = {name: i for i, name in enumerate(trained.classes)}
    if unknown := [name for name in classes if name not in index]:
        raise ValueError(
            f"{trained.path} was trained on {len(trained.classes)} classes ({_listed(trained.classes)}), which lack "
            f"{len(unknown)} of the {len(classes)} classes of {data}: {_listed(unknown)}. Evaluate on data with classes of the "
            "training data alone, under the same names"
        )
    if len(index) < len(trained.classes):
        twice = next(name for name in trained.classes if trained.classes.count(name) > 1)
        raise ValueError(f"{trained.path} has several outputs named {twice}: evaluate on data with its classes in its order")
    return tuple(index[name] for name in classes)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
