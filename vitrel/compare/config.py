"""The YAML file of a comparison: models, seeds, how they are trained, how they are evaluated."""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import timm

from vitrel.common.names import nearest
from vitrel.common.plain_yaml import read_yaml
from vitrel.data import SHAPES
from vitrel.evaluate.sweep import Settings

KEYS = ("name", "data", "models", "seeds", "train", "evaluate")
MODEL_KEYS = ("name", "label", "position", "model_args", "weights_of", "tuned_from", "seeds", "train")
EVALUATE_KEYS = (*(one.name for one in fields(Settings)), "data", "checkpoint")


@dataclass(frozen=True)
class Run:
    """A model and a seed.

    Args:
        label: of the model in tables.
        seed: of training.
        checkpoint: file from which it is evaluated, in the folder of the run: that of `checkpoint`'s folder.
        training: its configuration as `vitrel train --config` reads it; of a run that has the weights of another, that run's.
        options: arguments of the model that differ from those in its weights; None for a run that is trained.
        tuned: whether its training starts from the weights of another run.
    """

    label: str
    seed: int
    checkpoint: Path
    training: dict[str, Any]
    options: dict[str, Any] | None
    tuned: bool

    @property
    def folder(self) -> Path:
        """The folder of its training."""
        return self.checkpoint.parent.parent


@dataclass(frozen=True)
class Comparison:
    """A comparison on one data set.

    Args:
        name: title of the report.
        folder: of the evaluation; those of the runs are in it.
        data: that the models are trained on.
        evaluated: that they are evaluated on.
        runs: that are evaluated, model by model.
        settings: arguments of `vitrel.evaluate.at_sizes`.
    """

    name: str
    folder: Path
    data: str
    evaluated: str
    runs: tuple[Run, ...]
    settings: dict[str, Any]


def load_comparison(path: Path, out: Path, data: str | None = None) -> list[Comparison]:
    """Read a YAML configuration; return one comparison per data set, each with a folder in `out`. Nothing in it is executed.

    Where the key `data` is a list, each of its data sets gives a comparison <name>/<data set>; an item may be
    {data: ..., models: [...], evaluate: {...}} with what differs for this data set. Models are evaluated on the data set that
    they are trained on, or on evaluate.data. A relative data folder is searched in the working directory, then beside the file.

    Args:
        data: use only the data set of this name (the last part of its path); a path, such as ./flowers256, replaces the folder
            in the file. If the file has only one data set, the names may differ.

    Raises:
        FileNotFoundError: a missing file or data folder.
        ValueError: unknown, missing or invalid settings.
    """
    config = _section(read_yaml(path), KEYS, str(path))
    if missing := [key for key in KEYS if not config.get(key)]:
        raise ValueError(f"{path}: {missing[0]} is missing or empty; a comparison needs {', '.join(KEYS)}")
    given = config["data"] if isinstance(config["data"], list) else [config["data"]]
    items = [_section(item if isinstance(item, Mapping) else {"data": item}, KEYS[1:], f"{path}, data") for item in given]
    names = [Path(str(item.get("data"))).name for item in items]
    if data is not None:
        is_name = data == Path(data).name
        only = len(names) == 1 and not is_name  # a path replaces the only data set, whatever its name
        items = [item for item, name in zip(items, names, strict=True) if only or name == Path(data).name]
        if not items or not (is_name or Path(data).is_dir()):
            raise ValueError(f"--data {data}: no such folder, or none of the data sets of {path}, which are {', '.join(names)}")
        items = items if is_name else [{**items[0], "data": data}]
    name = _plain(config["name"], path)
    several = isinstance(config["data"], list)
    return [_comparison(merged(config, item), name, several, path, out) for item in items]


def _comparison(config: Mapping[str, Any], name: str, several: bool, path: Path, out: Path) -> Comparison:
    """The comparison of a configuration whose data is one data set; `several`: it is one of several in the file."""
    data, settings = _data(config["data"], path), _section(config["evaluate"], EVALUATE_KEYS, f"{path}, evaluate")
    name = f"{name}/{_plain(Path(data).name, path)}" if several else name
    evaluated, best = settings.pop("data", None), settings.pop("checkpoint", "last")
    try:
        Settings(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, evaluate: {error}") from error
    models = config["models"] if isinstance(config["models"], list) else [config["models"]]
    entries = [_entry(one, path) for one in models]
    by_label = {entry["label"]: entry for entry in entries}
    if len(by_label) < len(entries):
        raise ValueError(f"{path}: two models have the same label: give each its own")
    seeds, runs = config["seeds"], list[Run]()
    for entry in entries:
        if unknown := {entry["weights_of"], entry["tuned_from"]} - {*by_label, None}:
            raise ValueError(
                f"{path}: {entry['label']} needs the weights of {unknown.pop()}, which is no label of a model here"
            )
        own = by_label[entry["weights_of"] or entry["label"]]  # the entry that is trained
        source, train = by_label.get(own["tuned_from"], {}), merged(config["train"], own["train"])
        if not all((train.get(part) or {}).get(key) for part, key in (("trainer", "max_epochs"), ("data", "size"))):
            raise ValueError(f"{path}: {own['label']} needs train.trainer.max_epochs and train.data.size, its training size")
        model = train.get("model") or {}
        arguments = {**(model.get("model_args") or {}), **source.get("model_args", {}), **own["model_args"]}
        for seed in entry["seeds"] or own["seeds"] or source.get("seeds") or (seeds if isinstance(seeds, list) else [seeds]):
            place, start = (
                out / name / f"{one}-seed{seed}" / "checkpoints" / f"{best}.ckpt" for one in (own["label"], own["tuned_from"])
            )
            tuning = {"tuning": {**(model.get("tuning") or {}), "init_from": str(start)}} if source else {}
            training = {
                "seed_everything": seed,
                "trainer": {**train["trainer"], "default_root_dir": str(place.parent.parent)},
                "data": {**train["data"], "data": data},
                "model": {**model, **tuning, "model": own["name"], "model_args": arguments},
            }
            options = entry["model_args"] if entry["weights_of"] else None
            runs.append(Run(entry["label"], seed, place, training, options, bool(source)))
    return Comparison(name, out / name, data, _data(evaluated, path) if evaluated else data, tuple(runs), settings)


def _entry(given: Any, path: Path) -> dict[str, Any]:
    """A model of the file with all keys but position, which is one of its arguments."""
    entry = _section({"name": given} if isinstance(given, str) else given, MODEL_KEYS, f"{path}, models")
    entry = dict.fromkeys(MODEL_KEYS) | {"label": entry.get("name"), "train": {}} | entry
    if not isinstance(entry["name"], str) or not timm.is_model(entry["name"]):
        near = ", ".join(nearest(str(entry["name"]), timm.list_models("vitrel*"), cutoff=0.0))
        raise ValueError(f"{path}: unknown model {entry['name']!r}; the nearest are {near}")
    position = entry.pop("position")
    arguments = {**(entry["model_args"] or {}), **({"position": position} if position else {})}
    return entry | {"label": _plain(entry["label"], path), "model_args": arguments}


def _data(data: Any, path: Path) -> str:
    """The name of generated data, or the path of the data folder from the working directory."""
    if data in SHAPES:
        return data
    beside = os.path.relpath(path.parent / str(data))
    for folder in (str(data), beside):
        if Path(folder).is_dir():
            return folder
    raise FileNotFoundError(
        f"{path}: there is no data folder {data} in {Path.cwd()}, nor {beside}: give --data path/to/{Path(str(data)).name}, or "
        f"in the file a folder with train/<class>/ and val/<class>/, or a built-in data set: {', '.join(SHAPES)}"
    )


def _section(value: Any, allowed: Collection[str], where: str) -> dict[str, Any]:
    """A section of the file as a dict; ValueError where it is not a mapping or has unknown keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: keys and values are expected ({', '.join(allowed)}), got {value!r}")
    for key in value:
        if key not in allowed:
            near = nearest(str(key), allowed, 1, 0.0)[0]
            raise ValueError(f"{where}: unknown key {key!r}; did you mean {near!r}? The keys are {', '.join(allowed)}")
    return dict(value)


def merged(common: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Return `common` updated recursively with `update`."""
    in_both = (key for key in update if isinstance(common.get(key), Mapping) and isinstance(update[key], Mapping))
    return {**common, **update, **{key: merged(common[key], update[key]) for key in in_both}}


def _plain(text: Any, path: Path) -> str:
    """Return the text, checked to be usable as a folder's name; ValueError otherwise."""
    if not isinstance(text, str) or not re.fullmatch(r"[\w+-][\w.+-]*", text):
        raise ValueError(f"{path}: {text!r} names a folder: letters, digits and . _ + - are allowed")
    return text
