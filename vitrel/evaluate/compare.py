"""A comparison of several models and seeds: its configuration, how each model is trained, and the trained models."""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import timm

from vitrel.data import SHAPES
from vitrel.evaluate.models import Trained, load_checkpoint
from vitrel.evaluate.report import Claim, read_claim
from vitrel.evaluate.run import evaluate_rows
from vitrel.evaluate.settings import Sweep
from vitrel.names import nearest
from vitrel.plain_yaml import read_yaml
from vitrel.sizes import Budget, Size, format_size, parse_size_or_budget

KEYS = ("name", "data", "models", "seeds", "train", "evaluate")
OPTIONAL = ("claims",)
# of an item of a list: its own, on top of the comparison's
DATA_KEYS = ("data", "only", "seeds", "train", "evaluate", "claims")
CHECKPOINTS = ("last", "best")
EVALUATE_KEYS = (*(one.name for one in fields(Sweep) if one.name != "data"), "checkpoint")
MODEL_KEYS = ("name", "label", "position", "model_args", "weights_of", "tuned_from", "train")
TRAIN_KEYS = ("trainer", "data", "model")
# what the comparison itself fills in
DECIDED = {
    ("trainer", "default_root_dir"): "the comparison names its folders",
    ("data", "data"): "it is the comparison's data",
    ("data", "seed"): "it is one of the comparison's seeds",
    ("model", "model"): "models are listed under models",
}


@dataclass(frozen=True)
class Entry:
    """A model of a comparison: its timm name, further keywords of `timm.create_model`, its name in tables and folders.

    weights_of: label of the entry whose trained weights it is evaluated with; None trains its own.
    tuned_from: label of the entry whose trained weights its own training starts from.
    train: what of the training is its own, on top of the comparison's.
    """

    name: str
    label: str
    model_args: dict[str, Any]
    weights_of: str | None = None
    tuned_from: str | None = None
    train: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str | None:
        """Label of the entry that must be trained for it."""
        return self.weights_of or self.tuned_from


@dataclass(frozen=True)
class Comparison:
    """A checked configuration on one data set. `train` is the training configuration but for model, data, seed and folder;
    `checkpoint` says which of a run is evaluated: the last, or the best on the very images of the evaluation, which flatters.
    """

    name: str
    data: str
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    train: dict[str, Any]
    sweep: Sweep
    checkpoint: str
    claims: tuple[Claim, ...] = ()

    @property
    def train_size(self) -> Size:
        return _pair(self.train["data"]["size"])

    @property
    def train_sizes(self) -> tuple[Size, ...]:
        """The size of the comparison, and those of entries with their own."""
        own = (_merged(self.train, entry.train)["data"]["size"] for entry in self.entries)
        return tuple(dict.fromkeys((self.train_size, *map(_pair, own))))

    def checkpoint_of(self, label: str, seed: int, folder: Path) -> Path:
        """The checkpoint of a run that is evaluated, or tuned."""
        return folder / f"{label}-seed{seed}" / "checkpoints" / f"{self.checkpoint}.ckpt"

    def training(self, entry: Entry, seed: int, folder: Path) -> dict[str, Any]:
        """The configuration of one training run in `folder`, beside the others', as `-m vitrel train --config` reads it."""
        train = _merged(self.train, entry.train)
        common = train.get("model") or {}
        started = next((other.model_args for other in self.entries if other.label == entry.tuned_from), {})
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
    """Reads and checks a YAML file; nothing in it is executed.

    One comparison for each data set. Where `data` is a list, all models are trained and evaluated on each, and a comparison is
    called <name>/<data set>; an item may be {data: ..., evaluate: {...}} with what differs there. A relative data folder is
    looked for from the working directory, then from the folder of the file.

    data: of several data sets the one of this name alone, the last part of its path. A path, such as /data/flowers256 or
    ./flowers256, says where it lies, in the place of the file's; where the file has one data set, whatever the folder's name.
    Raises FileNotFoundError for a missing file or data folder, ValueError for anything in it that is unknown, missing or wrong.
    """
    path = Path(path)
    config = _read_comparison(path)
    for key in KEYS:
        if not config.get(key):
            raise ValueError(f"{path}: {key} is missing or empty; a comparison needs {', '.join(KEYS)}")
    name, entries, several = _plain_name(config["name"], f"{path}: name"), _read_entries(config["models"], path), config["data"]
    if not isinstance(several, list):
        [item] = _asked([{"data": several}], data)
        return [_comparison(name, config | item, entries, path)]
    items = [_section(item if isinstance(item, Mapping) else {"data": item}, DATA_KEYS, f"{path}, data") for item in several]
    found: dict[str, Comparison] = {}
    for item in _asked(items, data):
        own = f"{name}/{_plain_name(Path(str(item.get('data'))).name, f'{path}: data')}"
        if own in found:
            raise ValueError(f"{path}: two data sets are called {own}; rename one of the folders")
        found[own] = _comparison(own, _merged(config, item), _only_entries(item.get("only"), entries, path), path)
    return [*found.values()]


def trained_models(comparison: Comparison, folder: Path) -> list[Trained]:
    """Every model that is evaluated, in the order of the configuration, from the checkpoints of the runs in `folder`.

    An entry with `weights_of` has the weights of another in a model of its own, for options that act at other sizes only.
    ValueError where they do not fit.
    """
    models = []
    for entry in comparison.entries:
        for seed in comparison.seeds:
            model = load_checkpoint(comparison.checkpoint_of(entry.weights_of or entry.label, seed, folder), entry.label, seed)
            models.append(model if entry.weights_of is None else _with_arguments(model, entry, comparison))
    return models


def evaluate_share(comparison: Comparison, folder: Path) -> None:
    """What a process but the first does of an evaluation that several share; see `vitrel.evaluate.processes.shared_with`."""
    for _ in evaluate_rows(trained_models(comparison, folder), comparison.sweep):
        pass  # process 0 writes


def _asked(items: Sequence[Mapping[str, Any]], data: str | None) -> list[Mapping[str, Any]]:
    """The data sets of a configuration that `data` asks for, where it says they lie; see `load_comparison`."""
    if data is None:
        return [*items]
    names, name = [Path(str(item.get("data"))).name for item in items], Path(data).name
    known = f"the data of this configuration are {', '.join(names)}"
    if name == data:
        if name not in names:
            raise ValueError(f"--data {data}: {known}")
        return [item for item, own in zip(items, names, strict=True) if own == name]
    if not Path(data).is_dir():
        raise ValueError(f"--data {data}: there is no such folder; {known}")
    found = [item for item, own in zip(items, names, strict=True) if own == name] if len(items) > 1 else items
    if not found:
        raise ValueError(f"--data {data}: {known}; the folder of one of them has to have its name")
    return [{**item, "data": data} for item in found]


def _read_comparison(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no configuration at {path}; vitrel/configs/quickstart.yaml is one to start from")
    return _section(read_yaml(path), (*KEYS, *OPTIONAL), str(path))


def _comparison(name: str, config: dict[str, Any], entries: tuple[Entry, ...], path: Path) -> Comparison:
    evaluation, data = _section(config["evaluate"], EVALUATE_KEYS, f"{path}, evaluate"), _data(config["data"], path)
    checkpoint = evaluation.pop("checkpoint", "last")
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"{path}: evaluate.checkpoint is last or best, got {checkpoint!r}")
    seeds, train = _seeds(config["seeds"], path), _train(config["train"], path)
    for entry in entries:
        own = _train(_merged(train, entry.train), f"{path}, {entry.label}")
        if entry.tuned_from and ((own.get("model") or {}).get("tuning") or {}).get("init_from"):
            raise ValueError(f"{path}: {entry.label} starts from {entry.tuned_from}: leave model.tuning.init_from out")
    claims = _claims(config.get("claims") or [], entries, path)
    found = Comparison(name, data, entries, seeds, train, _sweep(evaluation, data, path), checkpoint, claims)
    for number, claim in enumerate(claims, 1):
        _check_place(claim, found, f"{path}: claim {number}")
    return found


def _read_entries(models: Any, path: Path) -> tuple[Entry, ...]:
    """The checked entries of a list, or of one model; ValueError for anything unknown, missing or named twice."""
    entries = []
    for given in models if isinstance(models, list) else [models]:
        given = _section({"name": given} if isinstance(given, str) else given, MODEL_KEYS, f"{path}, models")
        name, arguments = given.get("name"), dict(given.get("model_args") or {})
        if not isinstance(name, str) or not timm.is_model(name):
            near = ", ".join(nearest(str(name), timm.list_models("vitrel*"), cutoff=0.0))
            raise ValueError(f"{path}: unknown model {name!r}; the nearest are {near}")
        if "position" in given:
            arguments["position"] = given["position"]
        label = _plain_name(given.get("label", name), f"{path}: label")
        own = given.get("train")
        train = _section({} if own is None else own, TRAIN_KEYS, f"{path}, train of {label}")
        _check_decided(train, f"{path}, train of {label}")
        sources = {key: given.get(key) for key in ("weights_of", "tuned_from")}
        for key, source in sources.items():
            if not isinstance(source, str | None):
                raise ValueError(f"{path}: {label} has {key}: {source!r}, which is the label of no model")
        entries.append(Entry(name, label, arguments, **sources, train=train))
    labels = [entry.label for entry in entries]
    own = {entry.label: entry for entry in entries if entry.weights_of is None}
    for entry in entries:
        if entry.weights_of is not None and (entry.weights_of not in own or own[entry.weights_of].name != entry.name):
            raise ValueError(
                f"{path}: {entry.label} has weights_of: {entry.weights_of}, but no {entry.name} with that label is trained "
                "here; give the label of one"
            )
        start = own.get(entry.tuned_from)
        if entry.tuned_from is not None and (start is None or start.tuned_from or start.name != entry.name or entry.weights_of):
            raise ValueError(
                f"{path}: {entry.label} has tuned_from: {entry.tuned_from}; that takes the label of a {entry.name} that is "
                "trained here from the start, and no weights_of beside it"
            )
        if entry.weights_of is not None and entry.train:
            raise ValueError(
                f"{path}: {entry.label} has the weights of {entry.weights_of}, it is not trained: leave its train out"
            )
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"{path}: two models are called {twice[0]}; give each its own label")
    return tuple(entries)


def _only_entries(labels: list[str] | None, entries: tuple[Entry, ...], path: Path) -> tuple[Entry, ...]:
    """The entries with these labels, and those that start from their weights or borrow them; all for None."""
    if labels is None:
        return entries
    if unknown := sorted(set(labels) - {entry.label for entry in entries if entry.weights_of is None}):
        raise ValueError(f"{path}: data, only: no model that is trained here is called {unknown[0]}")
    kept = set(labels)
    for entry in entries:
        if entry.label in kept and entry.tuned_from not in (None, *kept):
            raise ValueError(f"{path}: data, only: {entry.label} is tuned from {entry.tuned_from}, which is not among them")
    for _ in range(2):  # what is tuned from a kept one, then what borrows the weights of that
        kept |= {entry.label for entry in entries if entry.source in kept}
    return tuple(entry for entry in entries if entry.label in kept)


def _claims(given: Any, entries: tuple[Entry, ...], path: Path) -> tuple[Claim, ...]:
    labels = {entry.label for entry in entries}
    claims = []
    for number, item in enumerate(given, 1):
        try:
            claims.append(read_claim(item))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: claim {number}: {error}") from error
        if unknown := sorted(claims[-1].labels() - labels):
            raise ValueError(f"{path}: claim {number} names {unknown[0]}, which is the label of no model here")
    return tuple(claims)


def _check_place(claim: Claim, found: Comparison, where: str) -> None:
    """ValueError now, not after hours of training, where a claim is about what is not evaluated."""
    sweep, trained = found.sweep, format_size(found.train_size)
    sizes = [trained, *map(format_size, sweep.sizes)]
    if claim.img_size not in sizes and not any(isinstance(size, Budget) for size in sweep.sizes):  # whose pixels models decide
        raise ValueError(f"{where}: {claim.img_size} is not evaluated, only {', '.join(dict.fromkeys(sizes))}")
    if f"{claim.img_size} {claim.protocol}" in sweep.skip:
        raise ValueError(f"{where}: {claim.img_size} in the {claim.protocol} protocol is left out by evaluate.skip")
    if claim.protocol not in sweep.protocols:
        raise ValueError(f"{where}: the protocol {claim.protocol!r} is not evaluated, only {', '.join(sweep.protocols)}")
    if claim.translation is not None and (
        claim.translation not in sweep.translations or claim.img_size != trained or claim.protocol != sweep.protocols[0]
    ):
        translations = ", ".join(map(str, sweep.translations)) or "none"
        raise ValueError(
            f"{where}: content is translated at {trained} in the {sweep.protocols[0]} protocol alone, "
            f"by evaluate.translations ({translations})"
        )


def _train(given: Any, path: Path | str) -> dict[str, Any]:
    train = _section(given, TRAIN_KEYS, f"{path}, train")
    for part in ("trainer", "data"):
        if not isinstance(train.get(part), Mapping):
            raise ValueError(f"{path}: train.{part} is missing or no section of keys and values")
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
    """ValueError for a key that the comparison fills in."""
    for (part, key), why in DECIDED.items():
        if not isinstance(train.get(part), Mapping | None):
            raise ValueError(f"{where}: {part} is a section of keys and values, got {train[part]!r}")
        if key in (train.get(part) or {}):
            raise ValueError(f"{where}: train.{part}.{key} cannot be set here: {why}")


def _sweep(given: dict[str, Any], data: str, path: Path) -> Sweep:
    if not isinstance(given.get("sizes"), list) or not given["sizes"]:
        raise ValueError(f"{path}: evaluate.sizes is a list such as [64, 96, 96x128], got {given.get('sizes')!r}")
    for key in ("protocols", "policies"):
        if isinstance(given.get(key), list):
            given[key] = tuple(given[key])
    try:
        return Sweep(data=data, **given | {"sizes": tuple(parse_size_or_budget(size) for size in given["sizes"])})
    except ValueError as error:
        raise ValueError(f"{path}, evaluate: {error}") from error


def _data(data: Any, path: Path) -> str:
    if data in SHAPES:
        return data
    beside = os.path.relpath(path.parent / str(data))
    for folder in (str(data), beside):
        if Path(folder).is_dir():
            return folder
    raise FileNotFoundError(
        f"{path}: no data folder {data} from here ({Path.cwd()}) nor {beside}; "
        f"say where it lies, by --data path/to/{Path(str(data)).name} or in the file, "
        f"a folder that holds train/<class>/ and val/<class>/, or a built-in set: {', '.join(SHAPES)}"
    )


def _seeds(seeds: Any, path: Path) -> tuple[int, ...]:
    seeds = seeds if isinstance(seeds, list) else [seeds]
    if len(set(seeds)) < len(seeds) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(f"{path}: seeds is a list of different whole numbers such as [0, 1, 2], got {seeds}")
    return tuple(seeds)


def _with_arguments(trained: Trained, entry: Entry, comparison: Comparison) -> Trained:
    arguments = comparison.training(entry, 0, Path())["model"]["model_args"]
    try:
        model = timm.create_model(entry.name, num_classes=len(trained.classes), img_size=trained.img_size, **arguments)
        model.load_state_dict(trained.model.state_dict())
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{entry.label} cannot have the weights of {entry.weights_of}: {error}") from error
    return replace(trained, model=model.eval(), label=entry.label, model_args=json.dumps(arguments, sort_keys=True))


def _section(given: Any, allowed: Collection[str], where: str) -> dict[str, Any]:
    """A section as a dict; ValueError for what is none, or has keys that are not allowed."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: keys and values are expected ({', '.join(allowed)}), got {given!r}")
    for key in given:
        if key not in allowed:
            near = nearest(str(key), allowed, 1, 0.0)[0]
            raise ValueError(f"{where}: unknown key {key!r}; did you mean {near!r}? The keys are {', '.join(allowed)}")
    return dict(given)


def _plain_name(text: Any, what: str) -> str:
    """The text; ValueError where it is no name of a folder."""
    if not isinstance(text, str) or not re.fullmatch(r"[\w+-][\w.+-]*", text):
        raise ValueError(f"{what} names a folder: letters, digits and . _ + - are allowed, got {text!r}")
    return text


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _merged(common[key], own[key]) for key in own if all(isinstance(c.get(key), Mapping) for c in (common, own))}
    return {**common, **own, **both}


def _pair(size: int | Sequence[int]) -> Size:
    return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]
