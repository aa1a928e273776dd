"""Security checks of a training configuration (command line and YAML files) before jsonargparse parses it.

A configuration consists of keys and plain values, in local YAML files (`--config`) and on the command line (`--KEY VALUE`). The
parser imports every class that a configuration names, which runs the code of its module. Therefore only the classes in
`CLASSES`, nearly all of them Lightning's, are allowed.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jsonargparse
import yaml

from vitrel.common.names import nearest
from vitrel.common.plain_yaml import DEEPEST, MOST_VALUES, load_yaml, read_yaml

CLASSES = {
    "lightning.pytorch.strategies": (
        "DDPStrategy",
        "DeepSpeedStrategy",
        "FSDPStrategy",
        "ModelParallelStrategy",
        "SingleDeviceStrategy",
    ),
    "lightning.pytorch.accelerators": ("CPUAccelerator", "CUDAAccelerator", "MPSAccelerator"),
    "lightning.pytorch.callbacks": (
        "DeviceStatsMonitor",
        "EarlyStopping",
        "GradientAccumulationScheduler",
        "LearningRateMonitor",
        "ModelCheckpoint",
        "ModelSummary",
        "RichModelSummary",
        "RichProgressBar",
        "StochasticWeightAveraging",
        "ThroughputMonitor",
        "Timer",
        "TQDMProgressBar",
    ),
    "lightning.pytorch.loggers": ("CSVLogger", "TensorBoardLogger"),
    "lightning.pytorch.profilers": ("AdvancedProfiler", "PassThroughProfiler", "PyTorchProfiler", "SimpleProfiler"),
    "lightning.pytorch.plugins.environments": (
        "KubeflowEnvironment",
        "LightningEnvironment",
        "LSFEnvironment",
        "MPIEnvironment",
        "SLURMEnvironment",
        "TorchElasticEnvironment",
    ),
    "lightning.pytorch.plugins.precision": (
        "DeepSpeedPrecision",
        "DoublePrecision",
        "FSDPPrecision",
        "HalfPrecision",
        "MixedPrecision",
        "Precision",
    ),
    "lightning.pytorch.plugins": ("TorchSyncBatchNorm",),
    "vitrel.train": ("ShardedStrategy",),
    # the blocks into which FSDP splits a model
    "vitrel.layers": ("Block",),
    "vitrel.layers.block": ("Block",),
    "timm.models.vision_transformer": ("Block",),
}
# the Trainer's parameters that take classes; every key below them is an argument of these classes
PLUGS = ("accelerator", "callbacks", "logger", "plugins", "profiler", "strategy")
CLASS_ONLY = (("trainer", "callbacks"), ("trainer", "logger"), ("trainer", "plugins"))  # a string here is always a class name
_FULL = {f"{module}.{name}" for module, names in CLASSES.items() for name in names}
_SHORT = {name for names in CLASSES.values() for name in names}
_IMPORTABLE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")

Keys = dict[str, Any]


class OrNull(dict[str, Any]):
    """The keys below a parameter that may also be null."""


def restrict_imports() -> None:
    """Let jsonargparse import only from the modules of `CLASSES`, Lightning's environments and vitrel, as a second check.

    Also forbids configurations from a network. The settings hold for the whole process.
    """
    jsonargparse.set_parsing_settings(
        import_path_denylist=["*", "lightning.pytorch.callbacks.LambdaCallback"],
        # the last two define Lightning's environments and the dataclasses of our settings
        import_path_allowlist=[*CLASSES, "lightning.fabric.plugins.environments", "vitrel"],
        config_read_mode_urls_enabled=False,
        config_read_mode_fsspec_enabled=False,
    )


def keys_of(call: Callable) -> Keys:
    """Return {parameter: the keys below it} of a class or function, from its annotations.

    The keys below a parameter are the fields of a dataclass (`OrNull` if it may be null), {} for a plain value, or None where
    any key is allowed.
    """
    target = call.__init__ if inspect.isclass(call) else call
    hints = get_type_hints(target)
    return {name: _keys_below(hints.get(name)) for name in inspect.signature(target).parameters if name != "self"}


def check(args: list[str], keys: Keys, linked: dict[str, str]) -> None:
    """Raise ValueError naming the first key, value or class, on the command line or in its files, that is not allowed.

    Args:
        args: the command line, "fit" first.
        keys: the allowed keys of a configuration, by group (`keys_of`).
        linked: {key that must not be set: the key from which it is computed}.
    """
    if os.environ.get("JSONARGPARSE_DEFAULT_ENV", "").lower() == "true":
        raise ValueError("JSONARGPARSE_DEFAULT_ENV is set: unset it, settings come from files and the command line only")
    checker = _Checker(keys, linked)
    for option, values in _options(args):
        if option in ("help", "print_config"):
            continue
        if option == "config":
            for value in values:
                checker.walk((), _read(value), where=f"{value}: ")
            continue
        path = tuple(option.removesuffix("+").split("."))
        is_help = path[-1] == "help"  # e.g. --trainer.strategy.help CLASS
        texts: list[str | None] = [*values] or [None]
        for text in texts:
            if not is_help and text is not None:
                checker.walk(path, _plain(text, f"--{option}: "), "")
                continue
            checker.below(path[:-1] if is_help else path, "")
            if text is not None:
                checker.name(text, f"--{option}: ")


def sentence(message: str) -> str:
    """Return jsonargparse's message about a value as one sentence: the key, what it takes, and the value."""
    key = re.match(r'Parser key "([^"]+)":', message)
    values = re.findall(r"(?:Given value:|Got value:|Unable to load config) (.*)", message)
    types = re.search(r"Subtypes: \[(.*)\]", message) or re.search(r"Expected an? (.*)\. Got", message)
    if key is None or not values:
        return " ".join(message.split())
    if types is None:
        return f"{key[1]} takes keys and values as YAML, not {values[0]}"
    names = re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[(.*?)\]", r"\1\2", types[1]).replace("NoneType", "null")
    return f"{key[1]} must be {'one of ' if ', ' in names else ''}{names.replace('typing.', '')}, not {values[-1]!r}"


class _Checker:
    """Raises ValueError for a key, class name or nesting that is not allowed; `where` is the prefix of its messages."""

    def __init__(self, keys: Keys, linked: dict[str, str]) -> None:
        self.keys, self.linked = keys, linked
        self.values = 0

    def walk(self, path: tuple[str, ...], value: Any, where: str, depth: int = 0) -> None:
        """Check the keys of `path`, then the value at that path and everything below it."""
        self.values += 1
        if self.values > MOST_VALUES:
            raise ValueError(f"{where}more than {MOST_VALUES:,} values (every use of a YAML alias counts): shorten the file")
        if depth > DEEPEST:
            raise ValueError(f"{where}{'.'.join(path)[:80]}: nested more than {DEEPEST} levels deep (YAML in strings counts)")
        below = self.below(path, where)
        key = ".".join(path)
        if isinstance(value, dict):
            for name, inner in value.items():
                if not isinstance(name, str):
                    raise ValueError(f"{where}{key}: a key must be a string, not {name!r}")
                if name == "class_path":
                    self.name(inner, f"{where}{key}: ")
                self.walk((*path, *name.split(".")), inner, where, depth + 1)
        elif isinstance(value, list):
            for inner in value:
                self.walk(path, inner, where, depth + 1)
        elif isinstance(value, str):
            self.text(path, value, below, where, depth)
        elif below and not (value is None and isinstance(below, OrNull)):
            raise ValueError(f"{where}{key or 'a configuration'} takes keys, not {'null' if value is None else value}")

    def text(self, path: tuple[str, ...], value: str, below: Keys | None, where: str, depth: int) -> None:
        """Check a string: YAML within it, a class name, or the path of a checkpoint; `below` are the keys below `path`."""
        key = ".".join(path)
        if below:
            raise ValueError(f"{where}{key or 'a configuration'} takes keys, not {value!r}; files are given with --config")
        inner = _plain(value, f"{where}{key}: ")  # the parser reads a string as YAML once more
        if not isinstance(inner, str):
            self.walk(path, inner, where, depth + 1)
        elif path in CLASS_ONLY or (path[0] == "trainer" and path[1] in PLUGS and _IMPORTABLE.fullmatch(inner.strip())):
            self.name(inner, f"{where}{key}: ")
        elif path == ("ckpt_path",) and (os.path.isdir(value) or os.path.isdir(inner)):
            raise ValueError(f"{where}ckpt_path {inner} is a folder, which torch would unpickle: name a checkpoint file")

    def name(self, value: Any, where: str) -> None:
        """Check that `value` is the name of an allowed class, with or without its module."""
        if value not in _FULL | _SHORT:
            near = nearest(str(value), _FULL, 1) or nearest(str(value).split(".")[-1], _SHORT, 1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise ValueError(
                f"{where}{value!r} is not an allowed class: a configuration may name only Lightning's strategies, "
                f"accelerators, callbacks, CSV and TensorBoard loggers, profilers, environments and precisions{hint}. "
                "Write a file or folder of that name as ./NAME"
            )

    def below(self, path: tuple[str, ...], where: str) -> Keys | None:
        """Return the allowed keys below `path`, None where any key is allowed; check every key of `path` on the way."""
        keys: Keys | None = self.keys
        for depth, name in enumerate(path, 1):
            key = ".".join(path[:depth])
            if key in self.linked:
                raise ValueError(f"{where}leave out {key}: it is set from {self.linked[key]}")
            if keys is None:
                return None
            if name not in keys:
                raise ValueError(f"{where}unknown key {key}{self.nearest(key)}")
            keys = keys[name]
        return keys

    def nearest(self, key: str) -> str:
        """Return the end of a message about the unknown key `key`: the nearest allowed key, or a hint at --help."""
        known = [name for name in _flat(self.keys) if name not in self.linked]
        near = nearest(key, known, 1)
        return f": did you mean {near[0]}?" if near else "; --help lists the keys"


def _options(args: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield every option after the first argument ("fit") without its dashes, with the list of its values, [] for none.

    ValueError for another first argument, an option with one dash, or a value without an option.
    """
    if args and args[0] != "fit" and args[0] not in ("-h", "--help"):
        raise ValueError(f"the arguments must begin with fit, not {args[0]!r}")
    option = ""
    values: list[str] = []
    for arg in args[1:]:
        if arg.startswith("--") or (arg.startswith("-") and not re.match(r"-\.?\d", arg)):
            if option:
                yield option, values
            name, equals, value = arg.partition("=")
            if name == "-h":
                name = "--help"
            if not name.startswith("--") or name == "--":
                raise ValueError(f"unknown option {arg}: options begin with two dashes, e.g. --config FILE")
            option, values = name[2:], [value] if equals else []
        elif not option:
            raise ValueError(f"{arg!r} is a value without an option: write --KEY VALUE")
        else:
            values.append(arg)
    if option:
        yield option, values


def _read(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ValueError(f"--config {path}: no such file; a configuration is a local YAML file")
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no keys; a configuration is a YAML file of lines KEY: VALUE")
    return content


def _plain(value: Any, where: str) -> Any:
    """Return a string as the parser would read it, i.e. as YAML; a string that is not YAML, or another value, unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return load_yaml(value, where)
    except yaml.YAMLError:
        return value


def _keys_below(hint: Any) -> Keys | None:
    """The allowed keys below a parameter of this type: a dataclass's fields, {} for plain types, None if any key is allowed."""
    parts = [part for part in (hint, *get_args(hint)) if part is not type(None)]
    for part in parts:
        if isinstance(part, type) and is_dataclass(part):
            return OrNull(keys_of(part)) if type(None) in get_args(hint) else keys_of(part)
    plain = (bool, int, float, str, Path, tuple, list, Literal, Union, UnionType)
    return {} if all((get_origin(part) or part) in plain or isinstance(part, str) for part in parts) else None


def _flat(keys: Keys, prefix: str = "") -> Iterator[str]:
    """Yield every key with its path, e.g. "model.optim.lr"."""
    for name, below in keys.items():
        yield prefix + name
        yield from _flat(below or {}, f"{prefix}{name}.")
