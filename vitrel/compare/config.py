"""The YAML file of a comparison: models, seeds, how they are trained, how they are evaluated."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vitrel.common.names import did_you_mean
from vitrel.common.plain_yaml import read_yaml
from vitrel.evaluate.sweep import Settings

KEYS = ("name", "data", "models", "seeds", "train", "evaluate")
MODEL_KEYS = ("name", "label", "model_args", "weights_of", "tuned_from", "seeds", "train")


@dataclass(frozen=True)
class Run:
    """One model of a comparison with one seed: it is trained, or has the weights of another run and other arguments.

    Args:
        label: name of the model in tables.
        seed: seed of the training.
        folder: folder of the training, its own or that of the run whose weights it has.
        training: configuration of the training in `folder`, as `vitrel train --config` reads it.
        options: arguments of the model that differ from those of the weights; None for a run that is trained.
        tuned: whether its training starts from the weights of another run.
    """

    label: str
    seed: int
    folder: Path
    training: dict[str, Any]
    options: dict[str, Any] | None
    tuned: bool

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint that is evaluated, the last one of the training."""
        return self.folder / "checkpoints" / "last.ckpt"

    @property
    def images(self) -> float:
        """Number of training images (data.n_train) times epochs; infinite where the configuration does not give both."""
        epochs, images = self.training["trainer"]["max_epochs"], self.training["data"].get("n_train")
        return epochs * images if isinstance(epochs, int) and isinstance(images, int) else math.inf


@dataclass(frozen=True)
class Comparison:
    """A comparison of several models on one data set, as `load_comparison` reads it.

    Args:
        name: title of the report.
        folder: folder of the evaluation, in which those of the runs are.
        data: data set that the models are trained on.
        evaluated: data set that they are evaluated on.
        runs: the runs that are evaluated, model by model.
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
    they are trained on, or on evaluate.data.

    Args:
        path: the YAML file.
        out: folder of the comparisons, which is not created.
        data: in place of that in the file; if that lists several, only the one with the same last part of the path is used.

    Raises:
        FileNotFoundError: a missing file.
        ValueError: unknown, missing or invalid settings.
    """
    config = _section(read_yaml(path), KEYS, KEYS, str(path))
    several = isinstance(config["data"], list)
    items = [one if isinstance(one, dict) else {"data": one} for one in (config["data"] if several else [config["data"]])]
    for item in items:
        if not isinstance(_section(item, KEYS, ("data",), f"{path}, data")["data"], str):
            raise ValueError(f"{path}, data: the name or folder of a data set is expected, got {item['data']!r}")
    names = [Path(item["data"]).name for item in items]
    if data is not None:
        if several and Path(data).name not in names:
            raise ValueError(f"--data {data}: the data sets of {path} are {', '.join(names)}")
        items = [items[names.index(Path(data).name) if several else 0] | {"data": data}]
    return [_comparison(_section(merged(config, item), KEYS, KEYS, str(path)), several, path, out) for item in items]


def _comparison(config: Mapping[str, Any], several: bool, path: Path, out: Path) -> Comparison:
    """Return the comparison of a configuration whose `data` is one data set; ValueError for invalid settings.

    Args:
        config: content of the file.
        several: whether the file has several data sets; name and folder of the comparison then end with this one's name.
        path: the file, for errors.
        out: folder in which that of the comparison is.
    """
    keys = [one.name for one in fields(Settings)]
    data, settings = config["data"], {**_section(config["evaluate"], (*keys, "data"), (), f"{path}, evaluate")}
    evaluated, name = settings.pop("data", None) or data, _folder_name(config["name"], f"{path}, name")
    name = f"{name}/{Path(data).name}" if several else name
    try:
        Settings(**settings)
    except ValueError as error:
        raise ValueError(f"{path}, evaluate: {error}") from error
    except TypeError as error:
        raise ValueError(f"{path}, evaluate: a value has another type than it needs ({error})") from error
    models = config["models"] if isinstance(config["models"], list) else [config["models"]]
    models = [{"name": one} if isinstance(one, str) else one for one in models]
    entries = [_section(one, MODEL_KEYS, ("name",), f"{path}, models") for one in models]
    for section, key in [(config, "train"), *((entry, key) for entry in entries for key in ("model_args", "train"))]:
        if not isinstance(section.get(key, {}), dict):
            raise ValueError(f"{path}: keys and values are expected for {key} of {section['name']}, got {section[key]!r}")
    by_label = {_folder_name(entry.get("label", entry["name"]), f"{path}, label"): entry for entry in entries}
    if len(by_label) < len(entries):
        raise ValueError(f"{path}: two models have the same label: give each its own")
    runs = list[Run]()
    for label, entry in by_label.items():
        trained = _folder_name(entry.get("weights_of", label), f"{path}, weights_of of {label}")  # the entry that is trained
        own = by_label.get(trained, {})
        start = _folder_name(own["tuned_from"], f"{path}, tuned_from of {trained}") if "tuned_from" in own else None
        if unknown := {trained, start} - {*by_label, None}:
            raise ValueError(f"{path}: {label} needs the weights of {unknown.pop()}, which is no label of a model here")
        source, train = by_label.get(start, {}), merged(config["train"], own.get("train", {}))
        if not all((train.get(part) or {}).get(key) for part, key in (("trainer", "max_epochs"), ("data", "size"))):
            raise ValueError(f"{path}: {trained} needs train.trainer.max_epochs and train.data.size, its training size")
        model = train.get("model") or {}
        arguments = {**(model.get("model_args") or {}), **source.get("model_args", {}), **own.get("model_args", {})}
        seeds = next(one["seeds"] for one in (entry, own, source, config) if one.get("seeds") not in (None, []))
        for seed in seeds if isinstance(seeds, list) else [seeds]:
            folder = out / name / f"{trained}-seed{seed}"
            first = out / name / f"{start}-seed{seed}" / "checkpoints" / "last.ckpt"
            tuning = {"tuning": {**(model.get("tuning") or {}), "init_from": str(first)}} if source else {}
            training = {
                "seed_everything": seed,
                "trainer": {**train["trainer"], "default_root_dir": str(folder)},
                "data": {**train["data"], "data": data},
                "model": {**model, **tuning, "model": own["name"], "model_args": arguments},
            }
            options = entry.get("model_args", {}) if "weights_of" in entry else None
            runs.append(Run(label, seed, folder, training, options, bool(source)))
    return Comparison(name, out / name, data, evaluated, tuple(runs), settings)


def _section(section: Any, keys: Collection[str], needed: Collection[str], where: str) -> dict[str, Any]:
    """Return `section`; ValueError (naming `where`) for no mapping, a key outside `keys`, or `needed` ones missing or empty."""
    if not isinstance(section, dict):
        raise ValueError(f"{where}: keys and values are expected ({', '.join(keys)}), got {section!r}")
    if unknown := [key for key in section if key not in keys]:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}{did_you_mean(str(unknown[0]), keys)}")
    if missing := [key for key in needed if section.get(key) in (None, "", [], {})]:
        raise ValueError(f"{where}: {missing[0]} is missing or empty; needed are {', '.join(needed)}")
    return section


def _folder_name(value: Any, where: str) -> str:
    """Return a text or number as text; ValueError (begins with `where`) for others, blank text, slashes, "." and ".."."""
    text = str(value)
    if not isinstance(value, str | int | float) or not text.strip() or Path(text).name != text or text == "..":
        raise ValueError(f"{where}: a folder is named by it, so it is text, not empty, without slashes, got {value!r}")
    return text


def merged(common: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `common` with the values of `update`; where both have a mapping, the two are merged in the same way."""
    in_both = (key for key in update if isinstance(common.get(key), Mapping) and isinstance(update[key], Mapping))
    return {**common, **update, **{key: merged(common[key], update[key]) for key in in_both}}
