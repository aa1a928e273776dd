"""What a configuration may say, checked before the parser reads any of it.

A configuration is keys and plain values in local YAML files given by `--config`, and `--KEY VALUE`. A class that it names is
imported by the parser, which runs the code of that module: only those in `CLASSES`, nearly all Lightning's own, may be named.
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

from vitrel.names import nearest
from vitrel.plain_yaml import DEEPEST, MOST_VALUES, load_yaml, read_yaml

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
    # what FSDP splits a model into
    "vitrel.layers": ("Block",),
    "vitrel.layers.block": ("Block",),
    "timm.models.vision_transformer": ("Block",),
}
# the parameters of a Trainer that classes are given to; everything below them is their arguments
PLUGS = ("accelerator", "callbacks", "logger", "plugins", "profiler", "strategy")
CLASS_ONLY = (("trainer", "callbacks"), ("trainer", "logger"), ("trainer", "plugins"))  # text there is the name of a class
_FULL = {f"{module}.{name}" for module, names in CLASSES.items() for name in names}
_SHORT = {name for names in CLASSES.values() for name in names}
_IMPORTABLE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")

Keys = dict[str, Any]


def restrict_imports() -> None:
    """The same for jsonargparse's own importer, as a second lock; and no configuration over a network."""
    jsonargparse.set_parsing_settings(
        import_path_denylist=["*", "lightning.pytorch.callbacks.LambdaCallback"],
        # and where Lightning's environments and the data classes of the settings are defined
        import_path_allowlist=[*CLASSES, "lightning.fabric.plugins.environments", "vitrel"],
        config_read_mode_urls_enabled=False,
        config_read_mode_fsspec_enabled=False,
    )


def keys_of(call: Callable) -> Keys:
    """The keys that a class or function takes, by its annotations: below a data class its fields, None where any may follow."""
    target = call.__init__ if inspect.isclass(call) else call
    hints = get_type_hints(target)
    return {name: _keys_below(hints.get(name)) for name in inspect.signature(target).parameters if name != "self"}


def check(args: list[str], keys: Keys, linked: dict[str, str]) -> None:
    """ValueError naming the first thing in command line or files that may not be there.

    Args:
        args: the command line, "fit" first.
        keys: those of a configuration, by group (`keys_of`).
        linked: keys that follow from another one, and from which.
    """
    if os.environ.get("JSONARGPARSE_DEFAULT_ENV", "").lower() == "true":
        raise ValueError("JSONARGPARSE_DEFAULT_ENV is set: unset it, settings come from files and the command line alone")
    checker = _Checker(keys, linked)
    for option, values in _options(args):
        if option in ("help", "print_config"):
            continue
        if option == "config":
            for value in values:
                checker.walk((), _read(value), where=f"{value}: ")
            continue
        path = tuple(option.removesuffix("+").split("."))
        asks = path[-1] == "help"
        given: list[str | None] = [*values] or [None]
        for text in given:
            checker.walk(path[:-1] if asks else path, None if asks else _plain(text, f"--{option}: "), "")
            if asks and text is not None:
                checker.name(text, f"--{option}: ")


class _Checker:
    def __init__(self, keys: Keys, linked: dict[str, str]) -> None:
        self.keys, self.linked = keys, linked
        self.values = 0

    def walk(self, path: tuple[str, ...], value: Any, where: str, depth: int = 0) -> None:
        """`value` stands at `path`: check the keys down to it, then all below."""
        self.values += 1
        if self.values > MOST_VALUES:
            raise ValueError(f"{where}more than {MOST_VALUES:,} values, aliases counted each time: no configuration needs them")
        if depth > DEEPEST:
            raise ValueError(f"{where}{'.'.join(path)[:80]}: nested too deeply, text within text counted")
        below = self.below(path, where)
        key = ".".join(path)
        if isinstance(value, dict):
            for name, inner in value.items():
                if not isinstance(name, str):
                    raise ValueError(f"{where}{key}: keys are words, not {name!r}")
                if name == "class_path":
                    self.name(inner, f"{where}{key}: ")
                self.walk((*path, *name.split(".")), inner, where, depth + 1)
        elif isinstance(value, list):
            for inner in value:
                self.walk(path, inner, where, depth + 1)
        elif isinstance(value, str):
            self.text(path, value, below, where, depth)

    def text(self, path: tuple[str, ...], value: str, below: Keys | None, where: str, depth: int) -> None:
        key = ".".join(path)
        if below:
            raise ValueError(f"{where}{key or 'a configuration'} takes keys, not {value!r}; files are given with --config")
        inner = _plain(value, f"{where}{key}: ")  # the parser reads such text once more
        if not isinstance(inner, str):
            self.walk(path, inner, where, depth + 1)
        elif path in CLASS_ONLY or (path[0] == "trainer" and path[1] in PLUGS and _IMPORTABLE.fullmatch(inner.strip())):
            self.name(inner, f"{where}{key}: ")
        elif path == ("ckpt_path",) and (os.path.isdir(value) or os.path.isdir(inner)):
            raise ValueError(
                f"{where}ckpt_path {inner} is a folder: torch would unpickle what is in it; name a checkpoint file"
            )

    def name(self, value: Any, where: str) -> None:
        if value not in _FULL | _SHORT:
            near = nearest(str(value), _FULL, 1) or nearest(str(value).split(".")[-1], _SHORT, 1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise ValueError(
                f"{where}{value!r} names code, and a configuration may name only Lightning's own strategies, accelerators, "
                f"callbacks, CSV and TensorBoard loggers, profilers, environments and precisions{hint}. "
                "A file or folder of that name is written ./NAME"
            )

    def below(self, path: tuple[str, ...], where: str) -> Keys | None:
        """The keys below `path`; None where they are not known."""
        keys: Keys | None = self.keys
        for depth, name in enumerate(path, 1):
            key = ".".join(path[:depth])
            if key in self.linked:
                raise ValueError(f"{where}leave out {key}, it follows from {self.linked[key]}")
            if keys is None:
                return None
            if name not in keys:
                raise ValueError(f"{where}unknown key {key}{self.nearest(key)}")
            keys = keys[name]
        return keys

    def nearest(self, key: str) -> str:
        known = [name for name in _flat(self.keys) if name not in self.linked]
        near = nearest(key, known, 1)
        return f": did you mean {near[0]}?" if near else "; --help lists the keys"


def _options(args: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Every option without its dashes, with the values given to it."""
    if args and args[0] != "fit" and args[0] not in ("-h", "--help"):
        raise ValueError(f"the command line begins with fit, not {args[0]!r}")
    option = ""
    values: list[str] = []
    for arg in args[1:]:
        if arg.startswith("--") or (arg.startswith("-") and not re.match(r"-\.?\d", arg)):
            if option:
                yield option, values
            name, given, value = arg.partition("=")
            if name == "-h":
                name = "--help"
            if not name.startswith("--") or name == "--":
                raise ValueError(f"unknown option {arg}: options begin with two dashes, e.g. --config FILE")
            option, values = name[2:], [value] if given else []
        elif not option:
            raise ValueError(f"{arg!r} follows no option: write --KEY VALUE")
        else:
            values.append(arg)
    if option:
        yield option, values


def _read(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ValueError(f"--config {path}: no such file; a configuration is a local YAML file")
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no keys; a configuration is a YAML file of KEY: VALUE")
    return content


def _plain(value: Any, where: str) -> Any:
    """Text as the parser would read it; text that is no YAML stays text."""
    if not isinstance(value, str):
        return value
    try:
        return load_yaml(value, where)
    except yaml.YAMLError:
        return value


def _keys_below(hint: Any) -> Keys | None:
    parts = [part for part in (hint, *get_args(hint)) if part is not type(None)]
    for part in parts:
        if isinstance(part, type) and is_dataclass(part):
            return keys_of(part)
    plain = (bool, int, float, str, Path, tuple, list, Literal, Union, UnionType)
    return {} if all((get_origin(part) or part) in plain or isinstance(part, str) for part in parts) else None


def _flat(keys: Keys, prefix: str = "") -> Iterator[str]:
    for name, below in keys.items():
        yield prefix + name
        yield from _flat(below or {}, f"{prefix}{name}.")
