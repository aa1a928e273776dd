"""The models of a comparison as its configuration lists them."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm

import vitrel  # noqa: F401  registers the models with timm
from vitrel.names import nearest

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


def read_entries(models: Any, path: Path) -> tuple[Entry, ...]:
    """The checked entries of a list, or of one model; ValueError for anything unknown, missing or named twice."""
    entries = []
    for given in models if isinstance(models, list) else [models]:
        given = section({"name": given} if isinstance(given, str) else given, MODEL_KEYS, f"{path}, models")
        name, arguments = given.get("name"), dict(given.get("model_args") or {})
        if not isinstance(name, str) or not timm.is_model(name):
            near = ", ".join(nearest(str(name), timm.list_models("vitrel*"), cutoff=0.0))
            raise ValueError(f"{path}: unknown model {name!r}; the nearest are {near}")
        if "position" in given:
            arguments["position"] = given["position"]
        label = plain_name(given.get("label", name), f"{path}: label")
        own = given.get("train")
        train = section({} if own is None else own, TRAIN_KEYS, f"{path}, train of {label}")
        check_decided(train, f"{path}, train of {label}")
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


def only_entries(labels: list[str] | None, entries: tuple[Entry, ...], path: Path) -> tuple[Entry, ...]:
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


def section(given: Any, allowed: Collection[str], where: str) -> dict[str, Any]:
    """A section as a dict; ValueError for what is none, or has keys that are not allowed."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: keys and values are expected ({', '.join(allowed)}), got {given!r}")
    for key in given:
        if key not in allowed:
            near = nearest(str(key), allowed, 1, 0.0)[0]
            raise ValueError(f"{where}: unknown key {key!r}; did you mean {near!r}? The keys are {', '.join(allowed)}")
    return dict(given)


def plain_name(text: Any, what: str) -> str:
    """The text; ValueError where it is no name of a folder."""
    if not isinstance(text, str) or not re.fullmatch(r"[\w+-][\w.+-]*", text):
        raise ValueError(f"{what} names a folder: letters, digits and . _ + - are allowed, got {text!r}")
    return text


def check_decided(train: Mapping[str, Any], where: str) -> None:
    """ValueError for a key that the comparison fills in."""
    for (part, key), why in DECIDED.items():
        if not isinstance(train.get(part), Mapping | None):
            raise ValueError(f"{where}: {part} is a section of keys and values, got {train[part]!r}")
        if key in (train.get(part) or {}):
            raise ValueError(f"{where}: train.{part}.{key} cannot be set here: {why}")
