"""Command-line options that several subcommands share: models, weights, sizes; and types and checks for argparse."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrel.common.sizes import Size, parse_size, parse_size_or_budget

if TYPE_CHECKING:
    from vitrel.evaluate.checkpoint import TrainedModel

LOCAL = "local-dir:"  # prefix of a folder that timm reads
MODEL = f"a checkpoint, the folder of its run, {LOCAL}FOLDER, or a name of timm.list_models()"


def checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a parsing function for argparse's `type`: its ValueError becomes a usage error with the same message."""

    def checked_value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked_value


def _grid(text: str) -> Size:
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError(f"{text!r} is no grid: write rows x columns as 14x20") from None


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise ValueError(f"{text!r} is no count of 1 or more")
    return int(text)


def _points(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 100:
        raise ValueError(f"{text!r} is no number of points: give one above 0 and below 100")
    return value


points = checked(_points)  # of accuracy (top-1, mIoU), in percent
size, grid, count = checked(parse_size), checked(_grid), checked(_count)  # (h, w) in pixels, (h, w) in tokens, from 1 on
size_or_budget = checked(parse_size_or_budget)  # (h, w) in pixels, or a Budget of tokens


def add_models(parser: argparse.ArgumentParser, many: bool = False, random: bool = False) -> None:
    """Add the positional argument MODEL, or with `many` one or more, and the options of `add_weights`.

    Args:
        random: the help says that models by name without weights get random ones.
    """
    number: dict[str, Any] = {"nargs": "+"} if many else {}
    parser.add_argument("models" if many else "model", metavar="MODEL", help=MODEL, **number)
    add_weights(parser, many, random)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add --margin, the points of accuracy up to which a loss at a size is called safe, --no-report and --no-images."""
    text = "points of accuracy that may be lost: a size is called safe where less is shown to be; default 2"
    parser.add_argument("--margin", type=points, default=2.0, metavar="POINTS", help=text)
    parser.add_argument("--no-report", dest="report", action="store_false", help="report.html without pictures")
    text = "no photographs of the data in report.html"
    parser.add_argument("--no-images", dest="photographs", action="store_false", help=text)


def add_weights(parser: argparse.ArgumentParser, many: bool = False, random: bool = False) -> None:
    """Add the options for a model given by name: --weights, --pretrained, --model-args and --img-size.

    Args:
        many: several files of weights are possible.
        random: the help says that without weights they are random, with a fixed seed.
    """
    add = parser.add_argument_group("models by name").add_argument
    files = "a file for each model by name, in their order" if many else "a file"
    otherwise = "; default random weights with a fixed seed" if random else ""
    add("--weights", type=Path, nargs="+" if many else 1, default=[], metavar="FILE",
        help=f"{files}: .safetensors, .pth, .bin, .npz, or a checkpoint of timm's train.py{otherwise}")  # fmt: skip
    add("--pretrained", action="store_true", help="timm's weights for the name, from its cache or the network")
    add_model_args(add, "{reg_tokens: 4}")
    add("--img-size", type=size, metavar="SIZE", help="training size of the model; default that of its pretrained_cfg")


def open_models(args: argparse.Namespace, random: bool = False, **about: Any) -> list["TrainedModel"]:
    """Load the models of the command line (`add_models`) in their order, in eval mode on the CPU.

    ValueError or OSError for a model that cannot be loaded, more or fewer --weights than models by name, and a name without
    weights.

    Args:
        random: a model given by name may have no weights, and then gets random ones with a fixed seed.
        about: any of preprocessing and outputs of `vitrel.evaluate.checkpoint.trained_model`, for all models.
    """
    check_models(args, random)
    from vitrel.evaluate.checkpoint import load_checkpoint, load_model

    weights, loaded = [*args.weights], []
    with arguments_given("--model-args", args.model_args):
        for model in _models(args):
            if is_name(model) or model.startswith(LOCAL):
                file = weights.pop(0) if is_name(model) and weights else None
                options = {"model_args": args.model_args, "img_size": args.img_size, "pretrained": args.pretrained}
                loaded.append(load_model(model, file, random=random, **options, **about))
            else:
                loaded.append(load_checkpoint(_checkpoint(model), **about))
    return loaded


@contextmanager
def arguments_given(option: str, given: Mapping[str, Any] | None) -> Iterator[None]:
    """Context manager in which a TypeError becomes a ValueError that names `option`, whose value `given` the calls pass on.

    If `given` is empty or None, the TypeError stays.
    """
    try:
        yield
    except TypeError as error:
        if not given:
            raise
        raise ValueError(f"{option}: {error}") from error


def check_models(args: argparse.Namespace, random: bool = False) -> None:
    """Check the models and options of the command line before torch and timm are imported; no name is looked up.

    Args:
        random: a model given by name may have no weights, and then gets random ones.

    Raises:
        FileNotFoundError: a checkpoint, folder or file of weights does not exist.
        ValueError: --weights is combined with --pretrained, their number is not that of the models given by name, such a
            model has no weights, or an option for models by name is given without one.
    """
    named, built = [], []  # given by name; built with the arguments of the command line
    for model in _models(args):
        if is_name(model):
            named.append(model)
            built.append(model)
        elif model.startswith(LOCAL):
            if not Path(model.removeprefix(LOCAL)).is_dir():
                raise FileNotFoundError(
                    f"no folder {model.removeprefix(LOCAL)}: {LOCAL} takes one with config.json and weights"
                )
            built.append(model)
        elif not (path := _checkpoint(model)).is_file():
            raise FileNotFoundError(f"no checkpoint at {path}")
    weights = args.weights
    if weights and args.pretrained:
        raise ValueError("--weights and --pretrained exclude each other: give one of the two")
    if weights and len(weights) != len(named):
        raise ValueError(
            f"--weights takes one file for each model given by name, in their order: got {len(weights)} files for {len(named)}"
        )
    for option, given, models, own in (
        ("--pretrained", args.pretrained, named, "weights"),
        ("--model-args", args.model_args, built, "arguments"),
        ("--img-size", args.img_size, built, "training size"),
    ):
        if given and not models:
            raise ValueError(f"{option} is for models by name: {_models(args)[0]} has its own {own}, leave {option} out")
    if named and not (weights or args.pretrained or random):
        raise ValueError(f"{named[0]} has no weights: give a file (--weights), or --pretrained for timm's weights")
    check_files(*weights)


def _models(args: argparse.Namespace) -> list[str]:
    return args.models if hasattr(args, "models") else [args.model]


def _checkpoint(model: str) -> Path:
    """Return the path of the checkpoint MODEL, or of checkpoints/last.ckpt in a folder MODEL; it may not exist."""
    path = Path(model)
    return path / "checkpoints" / "last.ckpt" if path.is_dir() else path


def is_name(model: str) -> bool:
    """Return whether MODEL of the command line is taken for a name of timm's registry: it neither exists nor looks like a path.

    Paths are those with a suffix of weights, or "/" without ":"; local-dir:FOLDER is no name. The registry is not read.
    """
    path = Path(model)
    looks_like_a_path = path.suffix in (".ckpt", ".pth", ".pt", ".safetensors") or ("/" in model and ":" not in model)
    return not (model.startswith(LOCAL) or path.exists() or looks_like_a_path)


def packaged(folder: str = "") -> dict[str, Path]:
    """Return {name: path} of the YAML configurations in the package: comparisons, or with folder "train" those of trainings."""
    package = Path(__file__).parents[1]
    configs = package / "configs"  # a wheel's
    if not configs.is_dir():
        configs = package.parent / "configs"  # a clone's
    return {file.stem: file for file in sorted((configs / folder).glob("*.yaml"))}


def check_data(place: str) -> None:
    """Raise FileNotFoundError if --data (`place`) does not exist; runs before slow imports.

    "shapes...", what has a ":", and timm's specs, as hfds/<name> and torch/<set>:<folder>, pass unchecked.
    """
    specs = ("shapes", "hfds/", "hfids/", "tfds/", "wds/", "torch/")
    if not (place.startswith(specs) or ":" in place or Path(place).exists()):
        raise FileNotFoundError(
            f'no folder {place}: give "shapes", a folder with train/<class>/ and val/<class>/, a CSV, tar files, hfds/<name> '
            "or torch/<set>:<folder>"
        )


def add_sizes(parser: argparse.ArgumentParser, what: str, many: bool = True, budgets: bool = False) -> None:
    """Add --size: a size in pixels, 224 or 160x224 (height x width), with `many` several, with `budgets` also 196t (tokens).

    Args:
        what: the beginning of the help text.
    """
    tokens = ", or a maximum number of patch tokens as 196t" if budgets else ""
    parser.add_argument("--size", type=size_or_budget if budgets else size, nargs="+" if many else None,
                        metavar="SIZE", help=f"{what}, in pixels: 224, or height x width as 160x224{tokens}")  # fmt: skip


def mapping(text: str) -> dict[str, Any]:
    """Return the dictionary of a YAML mapping, as a `type` for argparse, which reports text that is none as bad usage."""
    from vitrel.common.plain_yaml import read_mapping

    return checked(read_mapping)(text)


def add_model_args(add: Callable[..., object], example: str) -> None:
    """Add --model-args, a YAML mapping of arguments of the model, by `add`, the `add_argument` of a parser or group."""
    add("--model-args", type=mapping, default={}, metavar="YAML", help=f"arguments of the model, e.g. '{example}'")


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --json FILE, which `write_json` writes.

    Args:
        what: the beginning of the help text.
    """
    parser.add_argument("--json", metavar="FILE", help=f'{what} as JSON; "-" prints only that')


def check_files(*files: Path | None) -> None:
    """Raise FileNotFoundError, before any work, for an input file that does not exist or is a folder; None passes."""
    for file in files:
        if file is not None and not file.is_file():
            raise FileNotFoundError(f"no file {file}{': it is a folder' if file.is_dir() else ''}")


def check_folders(*files: Path | str | None) -> None:
    """Raise OSError, before any work, if the folder of an output file is missing, or it is a folder; None and "-" pass."""
    for file in files:
        if file in (None, "-"):
            continue
        if not Path(file).parent.is_dir():
            raise FileNotFoundError(f"no folder {Path(file).parent} for {Path(file).name}: create it first")
        if Path(file).is_dir():
            raise IsADirectoryError(f"{file} is a folder: name a file")


def write_json(path: str, content: Any) -> None:
    """Write `content` as JSON into a file, or to standard output for "-"; objects of other types as str(value), NaN as NaN."""
    text = json.dumps(content, indent=1, default=str) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, "utf-8")


def print_step(step: str) -> None:
    """Print what a command does next on standard error."""
    print(step, file=sys.stderr, flush=True)
