"""Evaluate models at many image sizes: advice for each model, tables, plots, a report.

    vitrel evaluate runs/a --data shapes --size 48 64 96 64x96
    vitrel evaluate vit_tiny_patch16_224 --weights vit_tiny.pth --data imagenet --size 160 224 320
    vitrel evaluate runs/a --data photographs --size 100t 196t --protocol scale native

Writes results.csv, predictions.npz, translation.csv (--translations), bad_images.csv, table.md, plots/*.png and report.html
into --out. The training sizes are always evaluated too. Existing rows in --out are reused: the same command resumes an
interrupted evaluation, and a command with other sizes or models adds its rows. A folder with rows of other weights, images or
settings is an error, unless --replace moves its files into a folder replaced-N. --dry-run prints the rows with their costs.

Several processes share the images, one GPU each where there are GPUs; the results are the same as with one process:

    torchrun --nproc_per_node=2 -m vitrel evaluate runs/a --data shapes --size 48 96
"""

import argparse
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrel.cli.options import add_margin, add_models, add_sizes, check_data, check_files, check_models, open_models
from vitrel.common.exits import one_line
from vitrel.common.extras import require

if TYPE_CHECKING:
    from vitrel.evaluate.checkpoint import TrainedModel
    from vitrel.evaluate.sweep import Sweep

GO_ON = "the same command resumes from here"
OF_SWEEP = (  # options that are arguments of `Sweep` as they are
    "n", "data_seed", "batch_size", "workers", "device", "dtype", "on_bad_image", "follow_links", "val_fraction",
    "log_n", "crop_pct", "translations", "attention_n", "border_leak", "compile", "margin",
    "report", "photographs",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel evaluate`."""
    add_models(parser, many=True)
    add_sizes(parser, "the sizes to evaluate at", required=True, budgets=True)
    add = parser.add_argument
    add("--data", required=True, help='"shapes", a folder with val/<class>/, a CSV, tar files, hfds/<name>, ...')
    kept = "output folder; default %(default)s; existing rows are kept"
    add("--out", "-o", type=Path, default=Path("runs/evaluate"), help=kept)
    add("--protocol", nargs="+", dest="protocols",
        help="scale (objects grow), canvas (objects keep their size in pixels), native (whole images at their own aspect "
        "ratios, with at most the patch tokens of a size); default scale canvas, native if trained so")  # fmt: skip
    add("--policy", nargs="+", dest="policies",
        help="policies of windows (fixed, divisor, rescale) and of encodings; default all of a model")  # fmt: skip
    add("--log-n", action="store_true", help="evaluate an attention temperature of log N too, beside each policy")
    add("--crop-pct", type=float, nargs="+",
        help="shares of the image that the center crop keeps, each evaluated; default the model's")  # fmt: skip
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
    add("--compile", action="store_true", help="run the models through torch.compile")
    add("--on-bad-image", choices=("raise", "count"), default="raise",
        help="raise: an unreadable image ends the evaluation; count: it is left out; default %(default)s")  # fmt: skip
    add("--val-fraction", type=float, help="share of the images to evaluate, where the data has no evaluation split")
    add("--follow-links", action="store_true", help="also search folders that are linked inside class folders")
    add("--replace", action="store_true",
        help="if --out has rows of other evaluations, first move its files into a folder replaced-N in it")  # fmt: skip
    add("--dry-run", action="store_true", help="only print every row with its cost and the values resampled")
    add_margin(parser)
    add("--no-report", dest="report", action="store_false", help="write no report.html")
    add("--no-images", dest="photographs", action="store_false", help="no photographs of the data in report.html")
    add("--mean", type=float, nargs="+", help="mean of the pixels, 0 to 1; this and the next three are for all models")
    add("--std", type=float, nargs="+", help="standard deviation of the pixels")
    add("--interpolation", help="bicubic or bilinear")
    add("--crop-mode", choices=("center", "squash", "border"), help="how images are resized before the crop, as in timm")
    add("--class-indices", type=Path, help="file with a class, a tab and the index of the model's output on every line")
    add("--restrict", action="store_true", help="compare only the logits of the data's classes")


def run(args: argparse.Namespace) -> None:
    """Evaluate as the options say, in this process or as one of several."""
    require("pandas", "vl_convert")
    check_data(args.data)
    check_models(args)
    check_files(args.class_indices)
    from vitrel.common.processes import OtherProcessError, joined

    try:
        with joined():
            _run(args)
    except OtherProcessError as error:  # the failed process prints it too, but maybe only the log of process 0 is kept
        sys.exit(f"error: {one_line(error)}" if int(os.environ["RANK"]) == 0 else 1)


def _run(args: argparse.Namespace) -> None:
    from vitrel.common.processes import rank_and_world
    from vitrel.evaluate.sweep import DEFAULT_PROTOCOLS, Sweep

    sizes, protocols = tuple(args.size), tuple(args.protocols or DEFAULT_PROTOCOLS)
    policies = tuple(args.policies) if args.policies else None
    sweep = Sweep(args.data, sizes, protocols, policies, **{name: getattr(args, name) for name in OF_SWEEP})  # checks them
    from vitrel.evaluate.checkpoint import read_class_indices
    from vitrel.evaluate.results.table import left_out_note
    from vitrel.evaluate.run import describe_trials, evaluate_rows, run_sweep
    from vitrel.evaluate.trials import default_protocols

    names = ("mean", "std", "interpolation", "crop_mode")
    preprocessing = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    outputs = None if args.class_indices is None else read_class_indices(args.class_indices)
    models = _labeled(open_models(args, preprocessing=preprocessing, outputs=outputs, restrict=args.restrict))
    if args.protocols is None:
        sweep = replace(sweep, protocols=default_protocols(models))
    _check_effect(args, models, sweep)
    if args.dry_run:
        text = describe_trials(models, sweep, args.out, args.replace)
        print(text if rank_and_world()[0] == 0 else "", end="")
        return
    if rank_and_world()[0] > 0:
        for _ in evaluate_rows(models, sweep):
            pass  # process 0 prints and writes
        return
    rows = run_sweep(models, sweep, args.out, title=Path(args.data).name, replace=args.replace)
    files = ["results.csv", "predictions.npz", *(["translation.csv"] if args.translations else []), "table.md", "plots/"]
    print(f"{left_out_note(rows, args.out)}written to {args.out}: {', '.join(files)}")
    if args.report:
        print(f"open {args.out / 'report.html'} in a browser; the same command with other sizes or models adds their rows")


def _check_effect(args: argparse.Namespace, models: list["TrainedModel"], sweep: "Sweep") -> None:
    """Raise ValueError for an option that is given and would change nothing."""
    from vitrel.data import SHAPES
    from vitrel.evaluate.checkpoint import backbone_of

    drawn = f"{args.data} are drawn for every size, not read from files"
    whole, native = "segmentation evaluates whole images", "the native protocol does not crop"
    same = f"all images of {args.data} are evaluated, without --n"
    is_drawn, is_whole = args.data in SHAPES, models[0].task == "segmentation"
    for option, given, without_effect, why in (
        ("--interpolation", args.interpolation, is_drawn, drawn),
        ("--crop-mode", args.crop_mode, is_drawn, drawn),
        ("--crop-pct", args.crop_pct, is_drawn, drawn),
        ("--follow-links", args.follow_links, is_drawn, drawn),
        ("--val-fraction", args.val_fraction, is_drawn, drawn),
        ("--crop-mode", args.crop_mode, is_whole, whole),
        ("--crop-mode", args.crop_mode, sweep.protocols == ("native",), native),
        ("--data-seed", args.data_seed, args.n is None and not is_drawn, same),
        ("--log-n", args.log_n, not any(map(backbone_of, (one.model for one in models))), "no model here is one of vitrel"),
    ):
        if given and without_effect:
            raise ValueError(f"{option} would change nothing: {why}; leave {option} out")


def _labeled(models: list["TrainedModel"]) -> list["TrainedModel"]:
    """The models with unique labels: the path is added to equal ones, since only `vitrel compare` knows seeds of one run."""
    times = Counter(trained.label for trained in models)
    models = [replace(model, label=f"{model.label} ({model.path})") if times[model.label] > 1 else model for model in models]
    if twice := [label for label, n in Counter(model.label for model in models).items() if n > 1]:
        raise ValueError(f"{twice[0]} is given twice: its rows would be taken for two seeds")
    return models
