"""Draw what position does in a model: by offset, along the axes, in buckets, and in the attention of an image.

    python tools/plot_position.py runs/a/checkpoints/last.ckpt --size 96x128 --layers 0 3 --image cat.jpg --query 3,4
    python tools/plot_position.py vitrel_vit_s16_alibi --out plots/alibi
    python tools/plot_position.py --gallery docs/gallery

MODEL is a checkpoint of tools/train.py or the folder of its run, or a name of timm's registry (ours too) with --weights FILE
or random weights.
Writes those of offset_maps, profiles, bucket_map, similarity, attention, overruled and directions.png that the model has
into --out and prints their paths, and why others are left out. Offsets are query minus key, in patches.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import normalize, to_pil_image, to_tensor

import vitrel
from vitrel.data import Shapes
from vitrel.data.decode import decode
from vitrel.evaluate.checkpoint import Trained, load_checkpoint
from vitrel.evaluate.foreign_models import load_model, trained_model
from vitrel.inspect import plot
from vitrel.inspect.any_model import fit_to
from vitrel.inspect.attention import Layer, record
from vitrel.inspect.plot.common import chosen
from vitrel.inspect.plot.gallery import gallery, learned_gallery
from vitrel.inspect.plot.on_image import slot_of
from vitrel.models.backbone import Backbone
from vitrel.sizes import Size, parse_size

SCENES = 8


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; ends with a message and status 1 on bad input, 2 on bad usage."""
    parser = _parser()
    args = parser.parse_args(argv)
    if bool(args.model) == bool(args.gallery) or (args.checkpoints and not args.gallery):
        parser.error("give MODEL, or --gallery DIR (and --checkpoints), not both")
    try:
        for path in _gallery(args) if args.gallery else _pictures(args):
            print(path, flush=True)
    except (ValueError, OSError, MemoryError) as error:
        sys.exit(f"error: {error}")


def _pictures(args: argparse.Namespace) -> list[Path]:
    trained = _trained(args.model, args.weights)
    size = args.size or trained.img_size
    model = fit_to(trained.model, size).model
    images, shown = _images(trained, size, args.image)
    seen = record(model, images[:1])
    source, at = (model, size) if isinstance(model, Backbone) else (seen, None)
    layer, heads = (args.layers or [-1])[-1], args.heads
    _check(args, seen, layer)
    query = args.query or (seen[layer].grid.h // 2, seen[layer].grid.w // 2)
    drawings: dict[str, Callable[[], Figure]] = {
        "offset_maps": lambda: plot.offset_maps(source, at, args.layers, heads),
        "profiles": lambda: plot.profiles(source, at, args.layers, heads),
        "bucket_map": lambda: plot.bucket_map(model, at),
        "similarity": lambda: plot.similarity(model, at if source is model else None),
        "attention": lambda: plot.attention(model, images[0], query, layer, heads, shown[0]),
        "overruled": lambda: plot.overruled(model, images, shown=shown),
        "directions": lambda: plot.directions(model, layers=args.layers, images=images),
    }
    written = []
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in drawings.items():
        try:
            figure = draw()
        except ValueError as error:
            print(f"no {name}.png: {error}", file=sys.stderr)
            continue
        written.append(args.out / f"{name}.png")
        figure.savefig(written[-1], dpi=110)
    if not written:
        raise ValueError(f"nothing of {args.model} can be drawn")
    return written


def _check(args: argparse.Namespace, seen: list[Layer], layer: int) -> None:
    """ValueError for layers, heads or a patch that the model does not have."""
    chosen(seen, args.layers)
    heads = max(one.weights.shape[2] for one in seen)
    if missing := [head for head in args.heads or () if not 0 <= head < heads]:
        raise ValueError(f"there is no head {missing[0]}: the model has heads 0 to {heads - 1}")
    if args.query:
        slot_of(seen[layer], args.query)


def _gallery(args: argparse.Namespace) -> list[Path]:
    if not args.checkpoints:
        return [gallery(args.gallery / "gallery.png")]
    models = [load_checkpoint(_checkpoint(path)) for path in args.checkpoints]
    images, shown = _images(models[0], models[0].img_size, args.image)
    named = {trained.label: trained.model for trained in models}
    return [learned_gallery(args.gallery / "learned.png", named, images, shown)]


def _trained(name: str, weights: Path | None) -> Trained:
    if Path(name).exists() or name.endswith(".ckpt"):
        return load_checkpoint(_checkpoint(Path(name)))
    if weights is not None:
        return load_model(name, weights)
    torch.manual_seed(0)
    try:
        model = vitrel.create_model(name).eval()
    except RuntimeError as error:
        raise ValueError(f"{name} cannot be built: {error}") from error
    return trained_model(model, name)


def _checkpoint(path: Path) -> Path:
    """The last one of a run's folder."""
    return path / "checkpoints" / "last.ckpt" if path.is_dir() else path


def _images(trained: Trained, size: Size, path: Path | None) -> tuple[Tensor, Tensor]:
    """Images as the model takes them and from 0 to 1, [B, 3, height, width]: the file, cut to the shape, or built-in scenes."""
    if path is None:
        scenes = Shapes(SCENES, size, mean=(0.0,) * 3, std=(1.0,) * 3)
        shown = torch.stack([image for image, _ in scenes.__getitems__(range(SCENES))])
    else:
        image = ImageOps.fit(to_pil_image(decode(path)), size[::-1], Image.Resampling.BICUBIC)
        shown = to_tensor(image)[None]
    return normalize(shown, trained.mean, trained.std), shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a checkpoint, or a name as timm.create_model takes it")
    add("--weights", type=Path, metavar="FILE", help="weights of a MODEL given by name; default random, seeded")
    add("--size", type=_checked(parse_size), help="pixels, 96 or 96x128 (height x width); default that of training")
    add("--layers", type=int, nargs="+", help="layers of attention, from 0 or from the end; the last one for attention.png")
    add("--heads", type=int, nargs="+", help="default all; in attention.png their mean")
    add("--image", type=Path, metavar="FILE", help="default scenes of the built-in set")
    add("--query", type=_checked(_patch), metavar="ROW,COLUMN", help="the patch that attends; default the middle one")
    add("--out", type=Path, default=Path("plots"), metavar="DIR", help="default plots")
    add("--gallery", type=Path, metavar="DIR", help="write gallery.png into DIR: encodings before training, no model needed")
    add("--checkpoints", type=Path, nargs="+", default=[], metavar="PATH", help="with --gallery: learned.png of these instead")
    return parser


def _patch(text: str) -> tuple[int, int]:
    row, separator, column = text.partition(",")
    if not (separator and row.isdecimal() and column.isdecimal()):
        raise ValueError(f"{text!r} is no patch: write row,column as 3,4")
    return int(row), int(column)


def _checked(read: Callable) -> Callable:
    def checked(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


if __name__ == "__main__":
    main()
