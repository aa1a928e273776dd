"""Make a vitrel model of a timm model or of anyone's weights, with relative position if asked, and keep it in one file.

    vitrel convert vit_tiny_patch16_224 --pretrained --out vit_tiny.safetensors
    vitrel convert model.pth --like vit_tiny_patch16_224 --position table --images flowers --out relative.safetensors
    vitrel convert vitrel_swin_t --weights swin_t.pth --out swin_t.safetensors --report swin_t.csv

MODEL is a name of timm's, with weights from --weights or --pretrained; a file of weights, with --like where they do not tell
their model; or a vitrel name with --weights, for which a report says what became of every tensor. What would stay unused or
unset is refused unless --allow-unused or --allow-unset names it.

With --position an encoding is added in attention. With --images it is fitted to what the absolute embedding adds there, which
then goes (--absolute fade lets it fade out in the first half of a training); without, it starts at zero beside the embedding.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrel.cli.options import grid, is_name, mapping, size

if TYPE_CHECKING:
    from torch import Tensor

    from vitrel.models.backbone import Backbone
    from vitrel.weights.load import WeightPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel convert`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a timm or vitrel name, or a file of weights")
    add("--weights", type=Path, metavar="FILE", help="weights of a model given by name: .safetensors, .pth, .bin, .ckpt")
    add("--pretrained", action="store_true", help="weights that timm has for that name, from its cache or the network")
    add("--like", metavar="NAME", help="the timm model that bare weights are of: heads, activation, eps, pooling")
    add("--out", "-o", type=Path, required=True, metavar="FILE", help="the .safetensors file to write; vitrel.load reads it")
    add("--overwrite", action="store_true", help="replace an existing output")
    add("--model-args", type=mapping, default={}, metavar="YAML", help="arguments of the model, e.g. '{drop_path_rate: 0.1}'")
    group = parser.add_argument_group("relative position")
    group.add_argument("--position", metavar="KEY", help="an encoding to add in attention, e.g. table, rope_mixed+table")
    group.add_argument("--position-args", type=mapping, metavar="YAML", help="its options")
    group.add_argument("--absolute", choices=("keep", "drop", "fade"),
                       help="the absolute embedding: default drop with --images, else keep")  # fmt: skip
    group.add_argument("--fade-steps", type=int, metavar="N", help="training steps over which it fades")
    group.add_argument("--images", metavar="FOLDER", help="images to fit the encoding to, in any subfolders, without labels")
    group.add_argument("--n", type=int, default=64, metavar="N", help="how many of them; default %(default)s")
    group.add_argument("--size", type=size, metavar="SIZE", help="pixels at which it is fitted or trained; default the model's")
    group = parser.add_argument_group("weights of a vitrel name")
    group.add_argument("--source-grid", type=grid, metavar="GRID",
                       help="rows x columns of tokens that tables or embedding were trained on, where not square")  # fmt: skip
    group.add_argument("--key-minus-query", action="store_true", help="the file's tables count offsets as key minus query")
    group.add_argument("--allow-unused", nargs="+", default=[], metavar="NAME",
                       help="tensors of the file, or patterns, that may stay unused")  # fmt: skip
    group.add_argument("--allow-unset", nargs="+", default=[], metavar="NAME",
                       help="tensors of the model, or patterns, that may stay as they are")  # fmt: skip
    group.add_argument("--report", type=Path, metavar="FILE", help="write what became of every tensor as CSV")


def run(args: argparse.Namespace) -> None:
    """Writes the converted model and prints what it is."""
    _check(args)
    import vitrel.models  # noqa: F401  registers our names with timm
    from vitrel.convert import save

    model, text = _open(args)
    if args.position is not None:
        model = _relative(model, args)
    save(model, args.out)
    print(text, end="")
    grid = model.token_grid(model.img_size)
    print(f"position {model.arguments['position']}, trained at {grid.h}x{grid.w} tokens, {model.num_classes} classes")
    print(f"written to {args.out}{f', report to {args.report}' if args.report else ''}")
    print(f"use it: vitrel.load({str(args.out)!r}); vitrel evaluate {args.out} --data FOLDER --size 160 224 320")


def _check(args: argparse.Namespace) -> None:
    """ValueError or FileNotFoundError for what can be told before anything is imported."""
    if args.out.exists() and not args.overwrite:
        raise ValueError(f"{args.out} exists; name another file or pass --overwrite")
    if args.out.suffix != ".safetensors":
        raise ValueError(f"models are saved as .safetensors, not as {args.out.name}")
    named = is_name(args.model)
    if not named and not Path(args.model).exists():
        raise FileNotFoundError(f"no file {args.model}")
    if not named and (args.weights or args.pretrained):
        raise ValueError(f"{args.model} is a file of weights: --weights and --pretrained are of a model given by name")
    if args.weights and args.pretrained:
        raise ValueError("--weights and --pretrained exclude each other: a model has the weights of one of the two")
    if named and not (args.weights or args.pretrained):
        raise ValueError(f"{args.model} has no weights: give a file (--weights), or --pretrained for those that timm has")
    for given, what in ((args.images, "--images"), (args.absolute, "--absolute"), (args.position_args, "--position-args")):
        if given and args.position is None:
            raise ValueError(f"{what} is of an encoding to add: name it with --position")
    if args.images and not Path(args.images).is_dir():
        raise FileNotFoundError(f"no folder {args.images}")


def _open(args: argparse.Namespace) -> tuple["Backbone", str]:
    """The model, and what became of its tensors where a report can tell."""
    from vitrel.convert import from_timm, load
    from vitrel.models.backbone import Backbone

    if is_name(args.model) and args.model.startswith("vitrel_") and args.weights:
        return _by_tensors(args)
    if is_name(args.model) and args.pretrained:
        model: Any = from_timm(args.model, pretrained=True, **args.model_args)
    elif is_name(args.model):
        model = load(args.weights, like=args.model, **args.model_args)
    else:
        model = load(args.model, like=args.like, **args.model_args)
    return (model if isinstance(model, Backbone) else from_timm(model)).eval(), ""


def _by_tensors(args: argparse.Namespace) -> tuple["Backbone", str]:
    from vitrel.files import write_cells
    from vitrel.weights.build import model_for
    from vitrel.weights.load import apply_plan
    from vitrel.weights.read import read_file

    loaded = read_file(args.weights)
    model, plan = model_for(args.model, args.model_args, loaded, args.source_grid, args.key_minus_query)
    try:
        apply_plan(model, plan, allow_unused=args.allow_unused, allow_unset=args.allow_unset)
    except RuntimeError as error:  # as torch's load_state_dict names tensors that do not fit
        raise ValueError(str(error)) from error
    if args.report:
        lines = [(" + ".join(row.source), row.target, row.rule, row.resized) for row in plan.rows]
        write_cells(args.report, [("source", "target", "rule", "resized"), *lines])  # names of tensors are whoever's
    return model.eval(), f"{plan}\n\n{_summary(plan)}\n"  # type: ignore[return-value]


def _relative(model: "Backbone", args: argparse.Namespace) -> "Backbone":
    from vitrel.convert import absolute_to_relative, relativize

    how = dict(position_args=args.position_args, fade_steps=args.fade_steps)
    if args.images is None:
        return relativize(model, args.position, absolute=args.absolute or "keep", img_size=args.size, **how)
    images = _images(model, args)
    result = absolute_to_relative(model, images, args.position, absolute=args.absolute or "drop", **how)
    print(f"{result.conversion}\n")
    return result


def _images(model: "Backbone", args: argparse.Namespace) -> "Tensor":
    """`n` images of the folder, drawn by a fixed seed and prepared as the model expects, [n, 3, height, width]."""
    import numpy as np
    import torch
    from timm.data import resolve_model_data_config
    from torchvision.datasets.folder import IMG_EXTENSIONS

    from vitrel.data import Prepare
    from vitrel.data.decode import decode

    found = sorted(path for path in Path(args.images).rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
    if len(found) < args.n:
        raise ValueError(f"{args.images} holds {len(found)} images, fewer than the {args.n} to fit to: name another, or --n")
    known = resolve_model_data_config(model)
    prepare = Prepare(args.size or model.img_size, known["mean"], known["std"], known["crop_pct"], known["interpolation"])
    chosen = np.random.default_rng(0).choice(len(found), args.n, replace=False)
    return torch.stack([prepare(decode(found[i])) for i in chosen])


def _summary(plan: "WeightPlan") -> str:
    rules = Counter("left out" if not row.target else row.rule for row in plan.rows)
    kinds = ", ".join(f"{count} {rule}" for rule, count in rules.most_common())
    return f"{len(plan.rows)} rows: {kinds}; {sum(bool(row.resized) for row in plan.rows)} resized"
