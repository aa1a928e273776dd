"""Evaluate models at many image sizes: which one to take at which size, tables, plots, a report.

    vitrel evaluate runs/a --data shapes
    vitrel evaluate vit_tiny_patch16_224 --weights vit_tiny.pth --data imagenet --size 160 224 320
    vitrel evaluate runs/a --data photographs --size 100t 196t --protocol scale native

Writes settings.json, rows.jsonl, images.npz, results.csv, table.md, plots/ and report.html into --out, which holds one
evaluation: the same command goes on where it was stopped, and one with other sizes, models, protocols or policies adds rows.
The training sizes are always evaluated too. --dry-run prints the rows that are missing with their costs, and how long
they take.

Several processes share the images, one GPU each where there are GPUs; the results are the same as with one process:

    torchrun --nproc-per-node 2 -m -- vitrel evaluate runs/a --data shapes --size 48 96

(torchrun takes options such as --n for its own where -- is missing.)
"""

import argparse
import os
import shlex
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrel.cli.options import add_models, add_report, add_sizes, check_data, check_files, check_models, open_models
from vitrel.common.extras import require

if TYPE_CHECKING:
    from vitrel.evaluate.checkpoint import TrainedModel

GO_ON = "the same command starts again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrel evaluate` to its parser."""
    add_models(parser, many=True)
    what = "the sizes to evaluate at, by default a half, once, one and a half and twice the training size"
    add_sizes(parser, what, budgets=True)
    add = parser.add_argument
    add("--data", required=True, help='"shapes", a folder with val/<class>/, a CSV, tar files, hfds/<name>, ...')
    add("--out", "-o", type=Path, default=Path("runs/evaluate"), help="output folder; default %(default)s")
    add("--overwrite", action="store_true", help="start anew where --out holds another evaluation")
    add("--dry-run", action="store_true", help="only print the rows that --out lacks with their costs, and how long they take")
    add("--protocol", nargs="+", dest="protocols", default=[],
        help="scale (objects grow), canvas (objects keep their size in pixels), native (whole images at their own aspect "
        "ratios, with at most the patch tokens of a size), sliding (windows of the training size; segmentation); default "
        "scale, native if trained so")  # fmt: skip
    add("--policy", nargs="+", dest="policies", default=[],
        help="policies of windows (fixed, divisor, rescale) and of encodings, or all; default the model's own")  # fmt: skip
    add("--log-n", action="store_true", help="evaluate an attention temperature of log N too, beside each policy")
    add("--translations", type=int, nargs="+", default=[],
        help="numbers of pixels by which the content is translated at the training size, each evaluated")  # fmt: skip
    add("--attention-n", type=int, default=16, help="images for attention statistics, 0 for none; default %(default)s")
    add("--no-border-leak", dest="border_leak", action="store_false", help="skip the test for attention across borders")
    add("--batch-size", type=int, default=128, help="batch size, halved when memory runs out; default %(default)s")
    add("--n", type=int, help="number of images; default all")
    add("--data-seed", type=int, default=0, help="seed of generated or sampled images")
    add("--workers", type=int, default=0, help="processes that decode images")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--dtype", default="float32", help="float32, or bfloat16 autocast on a GPU")
    add("--on-bad-image", choices=("raise", "count"), default="raise",
        help="raise: an unreadable image ends the evaluation; count: it is left out; default %(default)s")  # fmt: skip
    add("--val-fraction", type=float, help="share of the images to evaluate, where the data has no evaluation split")
    add("--follow-links", action="store_true", help="also search folders that are linked inside class folders")
    add_report(parser)
    add("--mean", type=float, nargs=3, help="mean of the pixels, 0 to 1; this and the next four are for all models")
    add("--std", type=float, nargs=3, help="standard deviation of the pixels")
    add("--interpolation", help="bicubic or bilinear")
    add("--crop-pct", type=float, help="share of the image that the center crop keeps; not for segmentation")
    add("--crop-mode", choices=("center", "squash", "border"), help="how images are resized before the crop, as in timm")
    add("--class-indices", type=Path, help="file with a class, a tab and the index of the model's output on every line")


def run(args: argparse.Namespace) -> None:
    """Evaluate as the options say, in this process or as one of torchrun's; writes into --out, or prints with --dry-run."""
    require("pandas", "matplotlib")
    check_data(args.data)
    check_models(args)
    check_files(args.class_indices)
    from vitrel.common.processes import joined

    with joined():
        _run(args)


def _run(args: argparse.Namespace) -> None:
    from vitrel.evaluate.run import at_sizes, dry_run
    from vitrel.evaluate.sweep import Settings

    settings = {one.name: getattr(args, one.name) for one in fields(Settings) if one.name not in ("sizes", "skip")}
    asked = Settings(sizes=args.size or (), **settings)  # refused before a model is loaded
    models = _models(args)
    if args.dry_run:
        text = dry_run(models, args.data, asked, args.out)
        print(text if os.environ.get("RANK", "0") == "0" else "", end="")
        return
    command = shlex.join(["vitrel", *sys.argv[1:]])
    at_sizes(models, args.data, args.size or (), out=args.out, overwrite=args.overwrite, command=command, **settings)


def _models(args: argparse.Namespace) -> list["TrainedModel"]:
    """Load the models; equal labels, which would be taken for seeds of one model, get the path added and seed None."""
    from vitrel.evaluate.checkpoint import read_class_indices

    names = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
    preprocessing = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    outputs = None if args.class_indices is None else read_class_indices(args.class_indices)
    models = open_models(args, preprocessing=preprocessing, outputs=outputs)
    times = Counter(trained.label for trained in models)
    return [
        replace(model, label=f"{model.label} ({model.path})", seed=None) if times[model.label] > 1 else model
        for model in models
    ]
