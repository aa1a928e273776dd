"""Configuration of `vitrel compare`: reading and checking the YAML file, training configurations, trained models."""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import timm
from timm.models import get_model_args
from torch import nn

from vitrel.common.names import nearest
from vitrel.common.plain_yaml import read_yaml
from vitrel.common.sizes import Size, parse_size_or_budget
from vitrel.data import SHAPES
from vitrel.evaluate.checkpoint import TrainedModel, encoding_of, load_checkpoint
from vitrel.evaluate.run import evaluate_rows
from vitrel.evaluate.sweep import Sweep
from vitrel.models.segmenter import Segmenter

KEYS = ("name", "data", "models", "seeds", "train", "evaluate")
# keys of an item of the list `data`; except data and only, they update the comparison's
DATA_KEYS = ("data", "only", "seeds", "train", "evaluate")
CHECKPOINTS = ("last", "best")
EVALUATE_KEYS = (*(one.name for one in fields(Sweep)), "checkpoint")
MODEL_KEYS = ("name", "label", "position", "model_args", "weights_of", "tuned_from", "seeds", "train")
TRAIN_KEYS = ("trainer", "data", "model")
# training keys that the comparison sets, and why a configuration may not
DECIDED = {
    ("trainer", "default_root_dir"): "the comparison names the folders",
    ("data", "data"): "it is set by the comparison's key data",
    ("data", "seed"): "it is set by the comparison's key seeds",
    ("model", "model"): "models are listed under the key models",
}


@dataclass(frozen=True)
class Entry:
    """A model of a comparison.

    Args:
        name: timm name.
        label: name in tables and folders.
        model_args: keywords of `timm.create_model`; of an entry with `weights_of` only those that differ from its source.
        weights_of: label of the entry whose trained weights it uses; None: it is trained.
        tuned_from: label of the entry whose trained weights its training starts from.
        seeds: those that it is trained or evaluated with; None in a file: those of its source, or of the comparison.
        train: training configuration that updates the comparison's.
    """

    name: str
    label: str
    model_args: dict[str, Any]
    weights_of: str | None = None
    tuned_from: str | None = None
    seeds: tuple[int, ...] | None = None
    train: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str | None:
        """Label of the entry whose weights it needs, None where it needs none."""
        return self.weights_of or self.tuned_from


@dataclass(frozen=True)
class Comparison:
    """A checked configuration of a comparison on one data set.

    Args:
        data: path or built-in name of the data set that models are trained on; `sweep.data` is the one they are evaluated on.
        seeds: of the comparison; the seeds of every entry are among them.
        train: the sections trainer, data and model of a training configuration, without the model's name, the data set, the
            seed and the output folder.
        checkpoint: which checkpoint of a run is evaluated, "last", or "best", chosen on the evaluation images of `data` and so
            too optimistic on these.
    """

    name: str
    data: str
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    train: dict[str, Any]
    sweep: Sweep
    checkpoint: str

    @property
    def task(self) -> str:
        """What the models learn: "classification" or "segmentation"."""
        return (self.train.get("model") or {}).get("task", "classification")

    @property
    def head(self) -> str:
        """The head of models for segmentation."""
        return (self.train.get("model") or {}).get("head", "linear")

    @property
    def train_size(self) -> Size:
        """The comparison's training size (h, w) in pixels."""
        return _pair(self.train["data"]["size"])

    @property
    def train_sizes(self) -> tuple[Size, ...]:
        """All training sizes (h, w) in pixels: the comparison's, then those of entries."""
        return tuple(dict.fromkeys((self.train_size, *map(self.size_of, self.entries))))

    def size_of(self, entry: Entry) -> Size:
        """Return the training size (h, w) of an entry in pixels."""
        return _pair(_merged(self.train, entry.train)["data"]["size"])

    def entry(self, label: str) -> Entry:
        """Return the entry with this label."""
        return next(entry for entry in self.entries if entry.label == label)

    @property
    def runs(self) -> tuple[tuple[Entry, int], ...]:
        """The runs (entry, seed) that are evaluated, entry by entry; those without `weights_of` are trained."""
        return tuple((entry, seed) for entry in self.entries for seed in entry.seeds or ())

    def checkpoint_of(self, label: str, seed: int, folder: Path) -> Path:
        """Return the path of the checkpoint of a run, from which it is evaluated or another run is fine-tuned.

        It is the last or the best one, as the field `checkpoint` says, and need not exist.

        Args:
            label: of the run's model.
            seed: of the run.
            folder: the folder of the comparison.
        """
        return folder / f"{label}-seed{seed}" / "checkpoints" / f"{self.checkpoint}.ckpt"

    def training(self, entry: Entry, seed: int, folder: Path) -> dict[str, Any]:
        """Return the configuration of one training run as `vitrel train --config` reads it.

        Args:
            folder: of the run; its parent is the comparison's, where an entry with `tuned_from` finds the checkpoint to start
                from.
        """
        train = _merged(self.train, entry.train)
        common = train.get("model") or {}
        started = self.entry(entry.tuned_from).model_args if entry.tuned_from else {}
        arguments = {**(common.get("model_args") or {}), **started, **entry.model_args}
        if entry.tuned_from:
            source = self.checkpoint_of(entry.tuned_from, seed, folder.parent)
            common = _merged(common, {"tuning": {**(common.get("tuning") or {}), "init_from": str(source)}})
        return {
            "seed_everything": seed,
            "trainer": {**train["trainer"], "default_root_dir": str(folder)},
            "data": {**train["data"], "data": self.data},
            "model": {**common, "model": entry.name, "model_args": arguments},
        }


def load_comparison(path: str | Path, data: str | None = None) -> list[Comparison]:
    """Read and check a YAML configuration; return one comparison per data set. Nothing in the file is executed.

    Where the key `data` is a list, each of its data sets gives a comparison <name>/<data set> of all models; an item may be
    {data: ..., evaluate: {...}} with settings that differ for this data set. Models are evaluated on the data set that they are
    trained on, or on that of the key evaluate.data. A relative data folder is searched in the working directory, then in the
    folder of the file.

    Raises FileNotFoundError for a missing file or data folder, ValueError for unknown, missing or invalid settings.

    Args:
        data: use only the data set of this name (the last part of its path). With a path, such as /data/flowers256 or
            ./flowers256, that folder replaces the one in the file; if the file has only one data set, the names may differ. It
            does not replace evaluate.data.
    """
    path = Path(path)
    config = _read_comparison(path)
    for key in KEYS:
        if not config.get(key):
            raise ValueError(f"{path}: {key} is missing or empty; a comparison needs {', '.join(KEYS)}")
    name, entries = _plain_name(config["name"], f"{path}: name"), _read_entries(config["models"], path)
    if not isinstance(config["data"], list):
        [item] = _selected([{"data": config["data"]}], data)
        return [_comparison(name, config | item, entries, path)]
    items = [
        _section(item if isinstance(item, Mapping) else {"data": item}, DATA_KEYS, f"{path}, data") for item in config["data"]
    ]
    comparisons: dict[str, Comparison] = {}
    for item in _selected(items, data):
        full_name = f"{name}/{_plain_name(Path(str(item.get('data'))).name, f'{path}: data')}"
        if full_name in comparisons:
            raise ValueError(f"{path}: two data sets are called {full_name}; rename one of the folders")
        of_item = _only_entries(item.get("only"), entries, path)
        comparisons[full_name] = _comparison(full_name, _merged(config, item), of_item, path)
    return [*comparisons.values()]


def trained_models(comparison: Comparison, folder: Path) -> list[TrainedModel]:
    """Load every model to evaluate, entry by entry and seed by seed, from the checkpoints of the runs in `folder`.

    An entry with `weights_of` has that entry's weights, see `variant`. ValueError where they do not fit.
    """
    models = []
    for entry, seed in comparison.runs:
        trained = load_checkpoint(comparison.checkpoint_of(entry.weights_of or entry.label, seed, folder), entry.label, seed)
        if entry.weights_of is not None:
            model = variant(trained.model, trained.name, entry).eval()
            arguments = json.dumps(entry.model_args, sort_keys=True)
            trained = replace(trained, model=model, encoding=encoding_of(model), model_args=arguments)
        models.append(trained)
    return models


def variant(source: nn.Module, name: str, entry: Entry) -> nn.Module:
    """Build the model of an entry with `weights_of`: the model `source` with other arguments and the same weights.

    ValueError where no such model can be built, or the weights do not fit it.

    Args:
        name: timm name of `source`, whose arguments are updated by those of the entry, nested ones such as position_args too.
    """
    backbone = source.backbone if isinstance(source, Segmenter) else source
    try:
        model = timm.create_model(name, **_merged(get_model_args(backbone), entry.model_args))
        model = Segmenter(model, source.num_classes, source.head_name) if isinstance(source, Segmenter) else model
        model.load_state_dict(source.state_dict())
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{entry.label} cannot have the weights of {entry.weights_of}: {error}") from error
    return model


def evaluate_share(comparison: Comparison, folder: Path) -> None:
    """Evaluate the share of a process with rank 1 or higher; see `vitrel.common.processes.shared_with`."""
    for _ in evaluate_rows(trained_models(comparison, folder), comparison.sweep):
        pass  # process 0 writes the rows


def _selected(items: Sequence[Mapping[str, Any]], data: str | None) -> list[Mapping[str, Any]]:
    """The items of a configuration's data that `data` names, with its folder where it is a path; see `load_comparison`."""
    if data is None:
        return [*items]
    names, name = [Path(str(item.get("data"))).name for item in items], Path(data).name
    listed = f"the data sets of this configuration are {', '.join(names)}"
    if name == data:
        if name not in names:
            raise ValueError(f"--data {data}: {listed}")
        return [item for item, item_name in zip(items, names, strict=True) if item_name == name]
    if not Path(data).is_dir():
        raise ValueError(f"--data {data}: there is no such folder; {listed}")
    selected = [item for item, item_name in zip(items, names, strict=True) if item_name == name] if len(items) > 1 else items
    if not selected:
        raise ValueError(f"--data {data}: {listed}; the folder must have one of these names")
    return [{**item, "data": data} for item in selected]


def _read_comparison(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no configuration at {path}; vitrel/configs/quickstart.yaml is one to start from")
    return _section(read_yaml(path), KEYS, str(path))


def _comparison(name: str, config: dict[str, Any], entries: tuple[Entry, ...], path: Path) -> Comparison:
    """The checked comparison of a configuration whose data is one data set."""
    evaluation, data = _section(config["evaluate"], EVALUATE_KEYS, f"{path}, evaluate"), _data(config["data"], path)
    evaluated = evaluation.pop("data", None)
    evaluated = data if evaluated is None else _data(evaluated, path, "evaluate.data")
    checkpoint = evaluation.pop("checkpoint", "last")
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"{path}: evaluate.checkpoint is last or best, got {checkpoint!r}")
    seeds, train = _seeds(config["seeds"], path), _train(config["train"], path)
    entries = _with_seeds(entries, seeds, path)
    for entry in entries:
        own_train = _train(_merged(train, entry.train), f"{path}, {entry.label}")
        if entry.tuned_from and ((own_train.get("model") or {}).get("tuning") or {}).get("init_from"):
            raise ValueError(f"{path}: {entry.label} starts from {entry.tuned_from}: leave model.tuning.init_from out")
    return Comparison(name, data, entries, seeds, train, _sweep(evaluation, evaluated, path), checkpoint)


def _read_entries(models: Any, path: Path) -> tuple[Entry, ...]:
    """The checked entries of the key models, a list or one model; ValueError for unknown, missing or duplicate names."""
    entries = []
    for item in models if isinstance(models, list) else [models]:
        section = _section({"name": item} if isinstance(item, str) else item, MODEL_KEYS, f"{path}, models")
        name, arguments = section.get("name"), dict(section.get("model_args") or {})
        if not isinstance(name, str) or not timm.is_model(name):
            near = ", ".join(nearest(str(name), timm.list_models("vitrel*"), cutoff=0.0))
            raise ValueError(f"{path}: unknown model {name!r}; the nearest are {near}")
        if "position" in section:
            arguments["position"] = section["position"]
        if reserved := sorted({"num_classes", "img_size"} & arguments.keys()):
            raise ValueError(f"{path}, models: model_args of {name} must not set {reserved[0]}: data and train.data.size do")
        label = _plain_name(section.get("label", name), f"{path}: label")
        seeds = None if section.get("seeds") is None else _seeds(section["seeds"], f"{path}, {label}")
        own_train = section.get("train")
        train = _section({} if own_train is None else own_train, TRAIN_KEYS, f"{path}, train of {label}")
        _check_decided(train, f"{path}, train of {label}")
        sources = {key: section.get(key) for key in ("weights_of", "tuned_from")}
        for key, source in sources.items():
            if not isinstance(source, str | None):
                raise ValueError(f"{path}: {label} has {key}: {source!r}, which is not a model's label")
        entries.append(Entry(name, label, arguments, **sources, seeds=seeds, train=train))
    labels = [entry.label for entry in entries]
    trained = {entry.label: entry for entry in entries if entry.weights_of is None}
    for entry in entries:
        if entry.weights_of is not None and (entry.weights_of not in trained or trained[entry.weights_of].name != entry.name):
            raise ValueError(
                f"{path}: {entry.label} has weights_of: {entry.weights_of}, but no {entry.name} with that label is trained "
                "here; give the label of one"
            )
        start = trained.get(entry.tuned_from)
        if entry.tuned_from is not None and (start is None or start.tuned_from or start.name != entry.name or entry.weights_of):
            raise ValueError(
                f"{path}: {entry.label} has tuned_from: {entry.tuned_from}; give the label of a {entry.name} that is trained "
                "here without tuned_from, and leave weights_of out"
            )
        if entry.weights_of is not None and entry.train:
            raise ValueError(
                f"{path}: {entry.label} has the weights of {entry.weights_of} and is not trained: leave its train out"
            )
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"{path}: two models are called {twice[0]}; give each its own label")
    return tuple(entries)


def _only_entries(labels: list[str] | None, entries: tuple[Entry, ...], path: Path) -> tuple[Entry, ...]:
    """The entries with these labels, and all that are tuned from them or use their weights; all entries for None.

    ValueError for a label of no entry that is trained itself (`weights_of` is None), and for a listed entry that is tuned from
    one not listed.
    """
    if labels is None:
        return entries
    if unknown := sorted(set(labels) - {entry.label for entry in entries if entry.weights_of is None}):
        raise ValueError(f"{path}: data, only: no model that is trained here is called {unknown[0]}")
    kept = set(labels)
    for entry in entries:
        if entry.label in kept and entry.tuned_from not in (None, *kept):
            raise ValueError(f"{path}: data, only: {entry.label} is tuned from {entry.tuned_from}: list that too")
    for _ in range(2):  # entries tuned from kept ones, then entries that use the weights of those
        kept |= {entry.label for entry in entries if entry.source in kept}
    return tuple(entry for entry in entries if entry.label in kept)


def _with_seeds(entries: tuple[Entry, ...], seeds: tuple[int, ...], path: Path) -> tuple[Entry, ...]:
    """The entries with their seeds, by default those of the entry whose weights they need, or of the comparison.

    ValueError for other seeds than these.
    """
    by_label = {entry.label: entry for entry in entries}

    def seeds_of(entry: Entry) -> tuple[int, ...]:
        possible = seeds if entry.source is None else seeds_of(by_label[entry.source])
        if entry.seeds is None:
            return possible
        if further := [seed for seed in entry.seeds if seed not in possible]:
            whose = f"{entry.source}, whose weights it needs, has" if entry.source else "the comparison has"
            raise ValueError(f"{path}: {entry.label} has the seed {further[0]}, but {whose} only {[*possible]}")
        return tuple(seed for seed in possible if seed in entry.seeds)

    return tuple(replace(entry, seeds=seeds_of(entry)) for entry in entries)


def _train(value: Any, path: Path | str) -> dict[str, Any]:
    """The checked section train."""
    train = _section(value, TRAIN_KEYS, f"{path}, train")
    for part in ("trainer", "data"):
        if not isinstance(train.get(part), Mapping):
            raise ValueError(f"{path}: train.{part} is missing or not a section of keys and values")
    _check_decided(train, str(path))
    epochs = train["trainer"].get("max_epochs")
    if type(epochs) is not int or epochs < 1:
        raise ValueError(f"{path}: train.trainer.max_epochs must be given, 1 or more, got {epochs!r}")
    size = train["data"].get("size")
    pair = [size, size] if type(size) is int else size
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(side) is int and side > 0 for side in pair):
        raise ValueError(
            f"{path}: train.data.size must be given: the size to train at, 96 or [96, 128] (height, width), got {size!r}"
        )
    return train


def _check_decided(train: Mapping[str, Any], where: str) -> None:
    """ValueError for a training key that the comparison sets."""
    for (part, key), why in DECIDED.items():
        if not isinstance(train.get(part), Mapping | None):
            raise ValueError(f"{where}: {part} must be a section of keys and values, got {train[part]!r}")
        if key in (train.get(part) or {}):
            raise ValueError(f"{where}: train.{part}.{key} cannot be set here: {why}")


def _sweep(settings: dict[str, Any], data: str, path: Path) -> Sweep:
    """The Sweep of the section evaluate."""
    if not isinstance(settings.get("sizes"), list) or not settings["sizes"]:
        raise ValueError(f"{path}: evaluate.sizes must be a list such as [64, 96, 96x128], got {settings.get('sizes')!r}")
    for key in ("protocols", "policies"):
        if isinstance(settings.get(key), list):
            settings[key] = tuple(settings[key])
    try:
        return Sweep(data=data, **settings | {"sizes": tuple(parse_size_or_budget(size) for size in settings["sizes"])})
    except ValueError as error:
        raise ValueError(f"{path}, evaluate: {error}") from error


def _data(data: Any, path: Path, key: str = "data") -> str:
    """The name of generated data, or the path of the data folder from the working directory; `key` names it in messages."""
    if not isinstance(data, str):
        raise ValueError(f"{path}: {key} must be a folder or the name of a built-in data set, got {data!r}")
    if data in SHAPES:
        return data
    beside = os.path.relpath(path.parent / data)
    for folder in (data, beside):
        if Path(folder).is_dir():
            return folder
    hint = f"by --data path/to/{Path(data).name} or " if key == "data" else f"for {key}, "
    raise FileNotFoundError(
        f"{path}: there is no data folder {data} in {Path.cwd()}, nor {beside}; give its path, {hint}in the file: "
        f"a folder with train/<class>/ and val/<class>/, or a built-in data set: {', '.join(SHAPES)}"
    )


def _seeds(seeds: Any, path: Path | str) -> tuple[int, ...]:
    seeds = seeds if isinstance(seeds, list) else [seeds]
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(f"{path}: seeds must be a list of different whole numbers such as [0, 1, 2], got {seeds}")
    return tuple(seeds)


def _section(value: Any, allowed: Collection[str], where: str) -> dict[str, Any]:
    """A section of the file as a dict; ValueError where it is not a mapping or has unknown keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: keys and values are expected ({', '.join(allowed)}), got {value!r}")
    for key in value:
        if key not in allowed:
            near = nearest(str(key), allowed, 1, 0.0)[0]
            raise ValueError(f"{where}: unknown key {key!r}; did you mean {near!r}? The keys are {', '.join(allowed)}")
    return dict(value)


def _plain_name(text: Any, what: str) -> str:
    """Return the text, checked to be usable as a folder's name; ValueError otherwise."""
    if not isinstance(text, str) or not re.fullmatch(r"[\w+-][\w.+-]*", text):
        raise ValueError(f"{what} names a folder: letters, digits and . _ + - are allowed, got {text!r}")
    return text


def _merged(common: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """`common` updated recursively with `update`."""
    in_both = (key for key in update if isinstance(common.get(key), Mapping) and isinstance(update[key], Mapping))
    return {**common, **update, **{key: _merged(common[key], update[key]) for key in in_both}}


def _pair(size: int | Sequence[int]) -> Size:
    return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]
