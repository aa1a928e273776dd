"""Options that mean the same in every subcommand: models, weights, sizes, folders."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrel.sizes import Size, parse_size, parse_size_or_budget

if TYPE_CHECKING:
    from vitrel.evaluate.models import Trained

MODEL = "a checkpoint, the folder of its run, local-dir:FOLDER, or a name of timm.list_models()"


def checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """`read` for argparse: what it says of a wrong value is shown as a usage error."""

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


size, grid, count = checked(parse_size), checked(_grid), checked(_count)  # (h, w) in pixels, (h, w) in tokens, from 1 on
size_or_budget = checked(parse_size_or_budget)  # (h, w) in pixels, or a Budget of tokens


def add_models(parser: argparse.ArgumentParser, many: bool = False, random: bool = False, needed: bool = True) -> None:
    """The positional argument, one model or `many`, and the options of `add_weights`. needed: at least one of many."""
    number: dict[str, Any] = {"nargs": "+" if needed else "*"} if many else {}
    parser.add_argument("models" if many else "model", metavar="MODEL", help=MODEL, **number)
    add_weights(parser, many, random)


def add_weights(parser: argparse.ArgumentParser, many: bool = False, random: bool = False) -> None:
    """The options that give a model by name its weights. random: without any they are drawn, by a fixed seed."""
    add = parser.add_argument_group("models by name").add_argument
    files = "a file for each, in their order" if many else "a file"
    otherwise = "; random weights, by a fixed seed, where there are none" if random else ""
    add("--weights", type=Path, nargs="+" if many else 1, default=[], metavar="FILE",
        help=f"{files}: .safetensors, .pth, .bin, .npz, or a checkpoint of timm's train.py{otherwise}")  # fmt: skip
    add("--pretrained", action="store_true", help="weights that timm has for that name, from its cache or the network")
    add("--model-args", type=mapping, default={}, metavar="YAML", help="arguments of the model, e.g. '{reg_tokens: 4}'")
    add("--img-size", type=size, metavar="SIZE", help="the size it was trained at; default that of its pretrained_cfg")


def open_models(args: argparse.Namespace, random: bool = False, **about: Any) -> list["Trained"]:
    """The models of `add_models`, in evaluation mode on the CPU. about: see `vitrel.evaluate.models.trained_model`.

    ValueError or OSError for what cannot be opened, for weights without a name that takes them, and for a name without weights.
    """
    from vitrel.evaluate.models import load_checkpoint, load_model, random_model

    given = args.models if hasattr(args, "models") else [args.model]
    weights, named = [*args.weights], [one for one in given if is_name(one)]
    if weights and args.pretrained:
        raise ValueError("--weights and --pretrained exclude each other: a model has the weights of one of the two")
    if weights and len(weights) != len(named):
        raise ValueError(
            f"--weights takes one file for each model given by name, in their order: {len(weights)} for {len(named)}"
        )
    found = []
    for one in given:
        if is_name(one) and random and not weights and not args.pretrained:
            found.append(random_model(one, args.model_args, img_size=args.img_size, **about))
        elif is_name(one) or one.startswith("local-dir:"):
            file = weights.pop(0) if is_name(one) and weights else None
            how = {"model_args": args.model_args, "img_size": args.img_size, "pretrained": args.pretrained}
            found.append(load_model(one, file, **how, **about))
        else:
            path = Path(one)
            found.append(load_checkpoint(path / "checkpoints" / "last.ckpt" if path.is_dir() else path))
    return found


def is_name(model: str) -> bool:
    """Whether a model is given by its name in timm's registry, and not by a file or a folder."""
    path = Path(model)
    looks_like_a_path = path.suffix in (".ckpt", ".pth", ".pt", ".safetensors") or ("/" in model and ":" not in model)
    return not (model.startswith("local-dir:") or path.exists() or looks_like_a_path)


def check_data(place: str) -> None:
    """FileNotFoundError where a folder of data is missing, before anything that takes seconds is imported."""
    if not (place.startswith("shapes") or ":" in place or Path(place).is_dir()):
        raise FileNotFoundError(
            f'no folder {place}: data is "shapes", a folder that holds train/<class>/ and val/<class>/, a folder of shards, or '
            "<set>:<folder>"
        )


def add_sizes(
    parser: argparse.ArgumentParser, what: str, many: bool = True, required: bool = False, budgets: bool = False
) -> None:
    """--size: pixels, one number or height x width, or where `budgets` patch tokens; several where `many`."""
    tokens = ", or patch tokens at most as 196t" if budgets else ""
    parser.add_argument("--size", type=size_or_budget if budgets else size, nargs="+" if many else None, required=required,
                        metavar="SIZE", help=f"{what}: pixels, 224, or height x width as 160x224{tokens}")  # fmt: skip


def mapping(text: str) -> dict[str, Any]:
    """A YAML mapping for argparse."""
    from vitrel.plain_yaml import read_mapping

    return checked(read_mapping)(text)


def write_json(path: str, content: Any) -> None:
    """Writes `content` as JSON into a file; "-" is standard output."""
    text = json.dumps(content, indent=1, default=str) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, "utf-8")
