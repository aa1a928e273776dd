"""Predict the classes of images with a trained model, as a CSV with a row an image.

    vitrel predict runs/a photographs --out classes.csv
    vitrel predict vit_tiny_patch16_224 --weights vit_tiny.pth 1.jpg 2.jpg --size 320 --top 3

The columns are the path, the most probable class (label) with its probability, and the next ones (label_2, probability_2, ...).
With several labels an image, label has those of a probability of a half or more, with ; between them, and every class has a
column of its probability. Images are prepared as in vitrel evaluate; those that cannot be read are named and left out.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrel.cli.options import add_models, add_sizes, check_folders, check_models, count, open_models
from vitrel.common.files import write_cells
from vitrel.common.progress import progress
from vitrel.common.sizes import format_size

if TYPE_CHECKING:
    from torch import Tensor

    from vitrel.tasks import Task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrel predict` to its parser."""
    add_models(parser)
    add = parser.add_argument
    add("images", nargs="+", metavar="IMAGES", help="folders, whose images are searched for in subfolders too, or files")
    add_sizes(parser, "image size, by default that of training", many=False, budgets=True)
    add("--out", "-o", type=Path, default=Path("predictions.csv"), metavar="FILE", help="the CSV; default %(default)s")
    add("--top", type=count, default=5, metavar="N", help="classes of an image that has one; default %(default)s")
    add("--batch-size", type=count, default=32, metavar="N", help="halved when memory runs out; default %(default)s")
    add("--workers", type=int, default=0, help="processes that decode images")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--follow-links", action="store_true", help="also search folders that are linked inside folders")


def run(args: argparse.Namespace) -> None:
    """Predict the classes of the images and write the CSV; prints the number of images, and on stderr those left out.

    ValueError if none can be read, or if the model segments images.
    """
    check_models(args)
    check_folders(args.out)
    from vitrel.common.processes import checked_device
    from vitrel.data import Reading
    from vitrel.data.readers.folder import image_files
    from vitrel.evaluate.classes import output_names
    from vitrel.evaluate.images import PROTOCOLS, Images
    from vitrel.evaluate.policies import policies_at
    from vitrel.evaluate.predict import AtSizes, Runner, predict
    from vitrel.evaluate.sweep import default_protocols
    from vitrel.tasks import task_named

    device, reader = checked_device(args.device), image_files(args.images, args.follow_links)
    [trained] = open_models(args)
    task, names = task_named(trained.task), output_names(trained)
    if task.dense:
        raise ValueError(f"{trained.label} has the task {task.name}: vitrel predict writes the classes of whole images")
    [protocol] = default_protocols([trained])
    size = args.size or (trained.train_sizes[0] if trained.is_native else trained.img_size)
    view = PROTOCOLS[protocol](trained, size)
    images = Images(reader, view, batch_size=args.batch_size, workers=args.workers, reading=Reading(on_bad="leave_out"))
    policy = policies_at(trained.model, view.size)[0]
    with progress(len(images), "images") as advance, AtSizes(trained.model, policy, device) as at:
        kept = predict(
            Runner(at, device, args.batch_size),
            images.batches(view),
            images.order(view),
            partial(_cells, task, names, args.top),
            lambda share: advance(share * len(images), trained.label),
        )
    read, bad = int(kept.seen.sum()), images.bad(view)
    if not read:
        raise ValueError(f"none of the {len(images)} images can be read: {', '.join(bad[:8])}")
    lines = zip(reader.samples, kept.arrays["cells"], kept.seen, strict=True)
    write_cells(args.out, [_header(task, names, args.top), *([path, *cells] for (path, _), cells, seen in lines if seen)])
    print(f"images: {read:,}, at {format_size(size)}; classes: {len(names):,}; written to {args.out}")
    if bad:
        more = f" and {len(bad) - 8:,} more" if len(bad) > 8 else ""
        print(f"left out, because they could not be read, {len(bad):,}: {', '.join(bad[:8])}{more}", file=sys.stderr)


def _header(task: "Task", names: Sequence[str], top: int) -> list[str]:
    """Return the columns of the CSV: "path", "label", "probability", "label_2", "probability_2", ... for `top` classes or all.

    With several labels an image: "path", "label", and every class name ("class NAME" if NAME is "path" or "label").
    """
    if task.several:
        return ["path", "label", *(f"class {name}" if name in ("path", "label") else name for name in names)]
    ranks = ["", *(f"_{rank}" for rank in range(2, min(top, len(names)) + 1))]
    return ["path", *(f"{column}{rank}" for rank in ranks for column in ("label", "probability"))]


def _cells(task: "Task", names: Sequence[str], top: int, logits: "Tensor", targets: Sequence[Any]) -> dict[str, Any]:
    """Return {"cells": object array [B, columns] of text} from the logits of a batch: the columns of `_header` but "path".

    With several labels an image, "label" joins the classes of probability 0.5 or more by ;. `targets` are not used.
    """
    import numpy as np

    found = task.probabilities(logits)
    if task.several:
        rows = [[";".join(name for name, p in zip(names, one, strict=True) if p >= 0.5), *one] for one in found.tolist()]
    else:
        best = found.topk(min(top, len(names)))
        ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rows = [[cell for at, p in zip(*one, strict=True) for cell in (names[at], p)] for one in ranked]
    return {"cells": np.array([[f"{c:.6g}" if isinstance(c, float) else c for c in row] for row in rows], object)}
