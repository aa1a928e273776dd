"""Convert a timm model or a file of weights to a vitrel model, as one file or on the Hugging Face hub, with another position.

    vitrel convert vit_tiny_patch16_224 --pretrained --out vit_tiny.safetensors
    vitrel convert vit_tiny_patch16_224 --weights model.pth --position table --data flowers --out relative.safetensors
    vitrel convert runs/flowers --push OWNER/NAME

MODEL is a timm or vitrel name, with weights from --weights or --pretrained; or a file that contains its model's configuration,
as vitrel train and vitrel.save write it; or the folder of a run. Tensors that stay unused or unset are an error
(vitrel.load_pretrained can allow some).

--push uploads the model to the Hugging Face hub, with a card; `hf auth login` stores the token that it needs.

--position gives the model another encoding in attention. With --data it is fitted to the attention of the model on photographs
of a folder (of its train/, if it has one), without labels, and the absolute embedding is removed (or with --absolute fade fades
out in training). Without --data it starts at zero, beside the absolute embedding, and has to be learned in training.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrel.cli.options import add_model_args, arguments_given, is_name, mapping, size

if TYPE_CHECKING:
    from torch import Tensor, nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrel convert` to its parser."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a timm or vitrel name, a file of vitrel, or the folder of a run")
    add("--weights", type=Path, metavar="FILE", help="weights of a model given by name: .safetensors, .pth, .bin, .ckpt")
    add("--pretrained", action="store_true", help="timm's weights for the name, from its cache or the network")
    add("--out", "-o", type=Path, metavar="FILE", help="output file, .safetensors; vitrel.load reads it")
    add("--overwrite", action="store_true", help="replace an existing output")
    add_model_args(add, "{drop_path_rate: 0.1}")
    hub = parser.add_argument_group("Hugging Face hub")
    hub.add_argument("--push", metavar="OWNER/NAME", help="repository to upload the model to, created if it does not exist")
    hub.add_argument("--evaluation", type=Path, metavar="FOLDER",
                     help="evaluation of the model, for the card; default RUN/evaluation if it has these weights")  # fmt: skip
    hub.add_argument("--private", action="store_true", help="create a private repository")
    group = parser.add_argument_group("relative position")
    group.add_argument("--position", metavar="KEY", help="an encoding to add in attention, e.g. table, rope_mixed+table")
    group.add_argument("--position-args", type=mapping, metavar="YAML", help="options of the encoding")
    group.add_argument("--absolute", choices=("keep", "drop", "fade"),
                       help="what to do with the absolute embedding; default drop with --data, else keep")  # fmt: skip
    group.add_argument("--fade-steps", type=int, metavar="N", help="training steps over which the embedding fades out")
    group.add_argument("--data", metavar="FOLDER", help="images to fit the encoding to, in any subfolders, without labels")
    group.add_argument("--n", type=int, metavar="N", help="number of these images; default 256, or all if there are fewer")
    group.add_argument("--size", type=size, metavar="SIZE", help="image size for fitting or training; default the model's")


def run(args: argparse.Namespace) -> None:
    """Convert MODEL, write it to --out, upload it (--push) or both; print its position, training grid and number of classes."""
    _check(args)
    import vitrel.models  # noqa: F401  registers our names with timm
    from vitrel.export.hub import OtherWeights, check_repository, push_to_hub
    from vitrel.weights import save

    if args.push:
        check_repository(args.push)

    with arguments_given("--model-args", args.model_args):
        model: Any = _open(args)
    if args.position is not None:
        with arguments_given("--position-args", args.position_args):
            model = _relative(model, args)
    if args.out:
        save(model, args.out)
    backbone = getattr(model, "backbone", model)
    grid = backbone.token_grid(backbone.img_size)
    print(f"position {backbone.arguments['position']}, trained at {grid.h}x{grid.w} tokens, {model.num_classes} classes")
    if args.out:
        print(f"written to {args.out}")
        print(f"load it with vitrel.load({str(args.out)!r})")
    if args.push:
        own = Path(args.model) / "evaluation"  # where `vitrel train` says to write it
        evaluation = args.evaluation or (own if own.is_dir() else None)
        try:
            address = push_to_hub(model, args.push, evaluation, args.private)
        except OtherWeights:
            if args.evaluation:
                raise
            print(f"{own} is of other weights than the uploaded ones, so the card has no scores")
            address = push_to_hub(model, args.push, None, args.private)
        print(f"uploaded to {address}: its card tells how to load it")


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that do not fit together, and FileNotFoundError for missing inputs, before slow imports."""
    if args.out is None and args.push is None:
        raise ValueError("give a file to write (--out), or a repository to upload to (--push)")
    if args.push is None and (args.evaluation or args.private):
        raise ValueError(f"{'--evaluation' if args.evaluation else '--private'} is for the hub: give --push OWNER/NAME")
    if args.out and args.out.exists() and not args.overwrite:
        raise ValueError(f"{args.out} exists; give another file, or --overwrite")
    if args.out and args.out.suffix != ".safetensors":
        raise ValueError(f"--out must be a .safetensors file, got {args.out.name}")
    named = is_name(args.model)
    if not named and not Path(args.model).exists():
        raise FileNotFoundError(f"no file {args.model}")
    if not named and (args.weights or args.pretrained):
        raise ValueError(f"{args.model} is a file of weights: --weights and --pretrained are for a model given by name")
    if args.weights and args.pretrained:
        raise ValueError("--weights and --pretrained exclude each other: give one of the two")
    if named and not (args.weights or args.pretrained):
        raise ValueError(f"{args.model} has no weights: give a file (--weights), or --pretrained for timm's weights")
    for value, option in ((args.data, "--data"), (args.absolute, "--absolute"), (args.position_args, "--position-args")):
        if value and args.position is None:
            raise ValueError(f"{option} needs an encoding to add: give --position")
    if args.data and not Path(args.data).is_dir():
        raise FileNotFoundError(f"no folder {args.data}")


def _open(args: argparse.Namespace) -> "nn.Module":
    """Return MODEL as a vitrel model in evaluation mode, with the weights of --pretrained or --weights or its own."""
    from vitrel.weights import from_timm, load

    if is_name(args.model) and args.pretrained:
        return from_timm(args.model, pretrained=True, **args.model_args).eval()
    path, like = (args.weights, args.model) if is_name(args.model) else (args.model, None)
    return from_timm(load(path, like=like, **args.model_args)).eval()


def _relative(model: "nn.Module", args: argparse.Namespace) -> "nn.Module":
    """Return the model with the encoding of --position, fitted to the images of --data if given; prints how it was done."""
    from vitrel.weights import absolute_to_relative, relativize

    options = dict(position_args=args.position_args, fade_steps=args.fade_steps)
    if args.data is None:
        print(f"position {args.position} is not fitted, since there is no --data: it has to be learned in training")
        return relativize(model, args.position, absolute=args.absolute or "keep", img_size=args.size, **options)
    images = _images(model, args)
    result = absolute_to_relative(model, images, args.position, absolute=args.absolute or "drop", **options)
    print(f"{getattr(result, 'backbone', result).conversion}\n")
    return result


def _images(model: Any, args: argparse.Namespace) -> "Tensor":
    """Return --n images of --data, or of its folder train if it has one, preprocessed for the model, [n, 3, height, width].

    They are chosen at random with a fixed seed; their size is --size, by default the model's. By default --n is IMAGES, or all
    images if there are fewer. ValueError if there are fewer than --n.
    """
    import numpy as np
    import torch

    from vitrel.data import Prepare
    from vitrel.data.readers.decode import decode
    from vitrel.data.readers.folder import image_files
    from vitrel.models.config import preprocessing_of
    from vitrel.weights.absolute_to_relative import IMAGES

    folder = Path(args.data)
    folder = folder / "train" if (folder / "train").is_dir() else folder
    found = sorted(Path(path) for path, _ in image_files([str(folder)]).samples)
    n = min(IMAGES, len(found)) if args.n is None else args.n
    if not 0 < n <= len(found):
        raise ValueError(f"{folder} holds {len(found)} images, and --n is {n}: give another folder or number")
    prepare = Prepare(args.size or model.img_size, **preprocessing_of(model))
    chosen = np.random.default_rng(0).choice(len(found), n, replace=False)
    return torch.stack([prepare(decode(found[i])) for i in chosen])
