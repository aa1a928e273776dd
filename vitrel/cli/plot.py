"""Plot position in a model: by offset, as an embedding, and in the attention of an image.

    vitrel plot runs/a --size 96x128 --layers 0 3 --image cat.jpg --query 3,4
    vitrel plot vitrel_vit_s16_alibi --out plots/alibi

Writes offset_maps.png, similarity.png and attention.png into --out as far as they apply to the model, and prints their paths
and why others are left out. Offsets are query minus key, in patches. Layers in which position is below 1 % of the logits are
gray.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vitrel.cli.options import add_models, add_sizes, check_files, check_models, checked, open_models
from vitrel.common.extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from vitrel.common.sizes import Size
    from vitrel.evaluate.checkpoint import TrainedModel
    from vitrel.inspect.attention import Layer

SCENES = 8  # images of the built-in data set, where no image is given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel plot`."""
    add_models(parser, random=True)
    add_sizes(parser, "image size, default that of training", many=False)
    add = parser.add_argument
    add("--out", "-o", type=Path, default=Path("plots"), metavar="DIR", help="output folder; default %(default)s")
    add("--layers", type=int, nargs="+", help="attention layers, from 0, or negative from the end; attention.png uses the last")
    add("--heads", type=int, nargs="+", help="heads; default all; attention.png is of their mean")
    add("--image", type=Path, metavar="FILE", help="image; default images of the built-in data set")
    add("--query", type=checked(_patch), metavar="ROW,COLUMN", help="query patch of attention.png; default the middle one")


def run(args: argparse.Namespace) -> None:
    """Write all plots that apply to the model, and print their paths."""
    require("matplotlib")
    check_models(args, random=True)
    check_files(args.image)
    from vitrel.inspect import plot
    from vitrel.inspect.any_model import at_size
    from vitrel.inspect.attention import record
    from vitrel.models.backbone import Backbone

    [trained] = open_models(args, random=True)
    size = args.size or trained.img_size
    model = at_size(trained.model, size).model
    images, shown = _images(trained, size, args.image)
    seen = record(model, images[:1])
    source, at = (model, size) if isinstance(model, Backbone) else (seen, None)
    layer, heads = (args.layers or [-1])[-1], args.heads
    _check(args, seen, layer)
    query = args.query or (seen[layer].grid.h // 2, seen[layer].grid.w // 2)
    drawings: dict[str, Callable[[], Figure]] = {
        "offset_maps": lambda: plot.offset_maps(source, at, args.layers, heads, images if source is model else None),
        "similarity": lambda: plot.similarity(model, at),
        "attention": lambda: plot.attention(model, images[0], query, layer, heads, shown[0]),
    }
    written = False
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in drawings.items():
        try:
            figure = draw()
        except ValueError as error:
            print(f"no {name}.png: {error}", file=sys.stderr)
            continue
        figure.savefig(args.out / f"{name}.png", dpi=110)
        print(args.out / f"{name}.png", flush=True)
        written = True
    if not written:
        raise ValueError(f"none of the plots applies to {args.model}")


def _check(args: argparse.Namespace, recorded: list["Layer"], layer: int) -> None:
    """ValueError for layers, heads or a query patch that the model does not have.

    Args:
        recorded: its layers.
        layer: of the query.
    """
    from vitrel.inspect.plot.common import chosen
    from vitrel.inspect.plot.on_image import slot_of

    chosen(recorded, args.layers)
    heads = max(recorded_layer.weights.shape[2] for recorded_layer in recorded)
    if missing := [head for head in args.heads or () if not 0 <= head < heads]:
        raise ValueError(f"there is no head {missing[0]}: the model has heads 0 to {heads - 1}")
    if args.query:
        slot_of(recorded[layer], args.query)


def _images(trained: "TrainedModel", size: "Size", path: Path | None) -> tuple["Tensor", "Tensor"]:
    """Return two tensors [B, 3, height, width] of the same images: normalized for the model, and with values from 0 to 1.

    The images are the file at `path`, resized and cropped to `size`, or SCENES images of the built-in data set if it is None.
    """
    import torch
    from PIL import Image, ImageOps
    from torchvision.transforms.functional import normalize, to_tensor

    from vitrel.data import Shapes
    from vitrel.data.readers.decode import decode

    if path is None:
        scenes = Shapes(SCENES, size, mean=(0.0,) * 3, std=(1.0,) * 3)
        shown = torch.stack([image for image, _ in scenes.__getitems__(range(SCENES))])
    else:
        image = ImageOps.fit(decode(path), size[::-1], Image.Resampling.BICUBIC)
        shown = to_tensor(image)[None]
    return normalize(shown, trained.mean, trained.std), shown


def _patch(text: str) -> tuple[int, int]:
    row, separator, column = text.partition(",")
    if not (separator and row.isdecimal() and column.isdecimal()):
        raise ValueError(f"{text!r} is not a patch: write row,column as 3,4")
    return int(row), int(column)
