"""Measure position in the features of models, and the accuracy of frozen features at many sizes.

    vitrel features runs/a runs/b --data flowers --size 160 320
    vitrel features vit_tiny_patch16_224 --weights vit.pth --data flowers --layers 5 -1 --no-accuracy

Position: R² of a linear probe of row and column (1: a token knows its place) on natural images and on images of one color; the
share of the variance of tokens that position explains, there and on shuffled patches; equivariance: cosine of features under
shifts by whole patches; agreement: cosine with the features at each --size, all at the training size of the model.
Accuracy: k-NN (20 neighbors) and a linear probe on the features before the classifier, learned from
training images, at the training size and each --size, with 95 % intervals over images. Everything is computed in float32.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrel.cli.options import add_models, add_sizes, check_data, check_models, count, open_models
from vitrel.common.files import write_cells
from vitrel.common.tables import markdown

if TYPE_CHECKING:
    from torch import Tensor

    from vitrel.common.sizes import Size
    from vitrel.evaluate.checkpoint import TrainedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrel features` to its parser."""
    add_models(parser, many=True, random=True)
    add = parser.add_argument
    add("--data", required=True, metavar="DATA", help="data set, as for vitrel evaluate")
    add_sizes(parser, "other image sizes than that of training")
    add("--layers", type=int, nargs="+", default=[-1], help="layers for position, negative from the end; default the last")
    add("--images", type=count, default=64, metavar="N", help="most images for position; default %(default)s")
    add("--train-images", type=count, default=1000, metavar="N", help="most training images for accuracy; default %(default)s")
    add("--val-images", type=count, default=500, metavar="N", help="most evaluation images for accuracy; default %(default)s")
    add("--no-position", action="store_true", help="leave out position")
    add("--no-accuracy", action="store_true", help="leave out accuracy")
    add("--batch-size", type=count, default=32, metavar="N", help="default %(default)s")
    add("--out", "-o", type=Path, metavar="DIR", help="folder for position.csv and accuracy.csv")


def run(args: argparse.Namespace) -> None:
    """Measure position in each model, then accuracy (both by default); print the tables, write them into --out, if given."""
    check_models(args, random=True)
    check_data(args.data)
    from vitrel.evaluate.frozen import check_task, frozen_rows
    from vitrel.inspect.features import measure_features

    models, sizes = open_models(args, random=True), args.size or []
    if not args.no_accuracy:
        for trained in models:  # before the images are read
            check_task(trained)
    if not args.no_position:
        rows: list[dict[str, Any]] = []
        for trained in models:
            images = _images(trained, args.data, [trained.img_size, *sizes], args.images)
            others = [size for size in sizes if size != trained.img_size]
            found = measure_features(trained.model, images, trained.img_size, args.layers, others, batch_size=args.batch_size)
            rows += [row.to_dict() | {"model": trained.label} for row in found]
        _write(rows, args.out, "position.csv")
    if not args.no_accuracy:
        numbers = args.train_images, args.val_images, args.batch_size
        rows = [
            row
            for trained in models
            for row in frozen_rows(trained, args.data, list(dict.fromkeys([trained.img_size, *sizes])), *numbers)
        ]
        _write(rows, args.out, "accuracy.csv")


def _images(trained: "TrainedModel", data: str, sizes: Sequence["Size"], n: int) -> "Tensor":
    """Return at most n random images of "val" (of shapes the first), normalized, [n, 3, h, w], at the largest h, w of sizes."""
    import torch

    from vitrel.data import create_dataset

    size = max(h for h, _ in sizes), max(w for _, w in sizes)
    view = {name: getattr(trained, name) for name in ("mean", "std", "crop_pct", "crop_mode", "interpolation")}
    n = min(n, len(create_dataset(data, "val", size, **view)))  # type: ignore[arg-type]  # all have a length
    images = create_dataset(data, "val", size, n=n, **view)
    return torch.stack([images[index][0] for index in range(len(images))])  # type: ignore[arg-type]  # all have a length


def _write(rows: Sequence[dict[str, Any]], folder: Path | None, name: str) -> None:
    """Print the rows as a Markdown table, and write them as CSV `name` into the folder, if one is given; it is created."""
    head = list(dict.fromkeys(column for row in rows for column in row))
    lines = [
        [f"{value:.3f}" if isinstance(value := row.get(column, ""), float) else str(value) for column in head] for row in rows
    ]
    print(markdown(head, lines), flush=True)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_cells(folder / name, [head, *([row.get(column, "") for column in head] for row in rows)])
