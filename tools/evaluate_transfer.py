"""Evaluate models at many resolutions: tables, plots, a report, and one verdict per model on what had to be resized.

    python tools/evaluate_transfer.py --checkpoint runs/a/checkpoints/last.ckpt --data shapes --sizes 48 64 96 64x96
    python tools/evaluate_transfer.py --model vit_tiny_patch16_224 --weights vit_tiny.pth --data imagenet --sizes 160 224 320

Writes results.csv, per_class.csv, translation.csv (--shifts), bad_images.csv, table.md, plots/*.png and report.html into --out.
The training size is always evaluated too. What is there already is not made again: the same command goes on with what was
interrupted, and one with other sizes or models adds its rows to a folder. Rows of other weights, data or settings are refused
there; --replace moves them aside. --dry-run prints the plan and what each row costs.

Several processes share the images, one GPU
each where there are GPUs; the numbers are those of one process:

    torchrun --nproc_per_node=2 tools/evaluate_transfer.py --checkpoint ...
"""

import argparse
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrel.command_line import one_line, reported, terminable
from vitrel.evaluate.models import Trained, load_checkpoint, load_model, read_class_indices
from vitrel.evaluate.processes import OtherProcessError, joined, rank_and_world
from vitrel.evaluate.report import summary
from vitrel.evaluate.results import left_out_note
from vitrel.evaluate.run import describe_plan, evaluate_rows, run_sweep
from vitrel.evaluate.settings import PROTOCOLS, Sweep
from vitrel.sizes import Size, parse_size
from vitrel.weights.build import model_arguments


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; ends with a message and status 1 on bad input, 2 on bad usage."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.checkpoint and not args.model:
        parser.error("give --checkpoint FILE or --model NAME --weights FILE")
    with reported(), terminable():
        try:
            with joined():
                _run(args)
        except OtherProcessError as error:  # which printed it too; the log of process 0 may be all there is
            sys.exit(f"error: {one_line(error)}" if int(os.environ["RANK"]) == 0 else 1)


def _run(args: argparse.Namespace) -> None:
    sweep = Sweep(
        data=args.data,
        sizes=tuple(args.sizes),
        protocols=tuple(args.protocols),
        policies=tuple(args.policies) if args.policies else None,
        n=args.n,
        data_seed=args.data_seed,
        batch_size=args.batch_size,
        workers=args.workers,
        device=args.device,
        dtype=args.dtype,
        on_bad_image=args.on_bad_image,
        crop_pct=args.crop_pct,
        shifts=args.shifts,
        attention_n=args.attention_n,
        border_leak=args.border_leak,
        compile=args.compile,
        optimize=args.optimize,
    )
    models = _labelled([*(load_checkpoint(path) for path in args.checkpoint), *_named(args)])
    if args.dry_run:
        text = describe_plan(models, sweep, args.out, args.replace)
        print(text if rank_and_world()[0] == 0 else "", end="")
        return
    if rank_and_world()[0] > 0:
        for _ in evaluate_rows(models, sweep):
            pass  # process 0 prints and writes
        return
    rows = run_sweep(models, sweep, args.out, title=Path(args.data).name, report=args.report, replace=args.replace)
    files = ["results.csv", "per_class.csv", *(["translation.csv"] if args.shifts else []), "table.md", "plots/"]
    files += ["report.html"] if args.report else []
    print(f"\n{summary(rows)}\n{left_out_note(rows, args.out)}written to {args.out}: {', '.join(files)}")


def _named(args: argparse.Namespace) -> list[Trained]:
    """The models given by name; weights belong to them in order, local folders bring their own."""
    weights = list(args.weights)
    if len(weights) != sum(not name.startswith("local-dir:") for name in args.model):
        raise ValueError(f"--weights takes one file for each --model, in the same order; {len(weights)} for {len(args.model)}")
    given = {"mean": args.mean, "std": args.std, "interpolation": args.interpolation}
    about: dict[str, Any] = dict(
        model_args=args.model_args,
        img_size=args.img_size,
        preprocessing={name: value for name, value in given.items() if value is not None},
        outputs=None if args.class_indices is None else read_class_indices(args.class_indices),
        restrict=args.restrict,
    )
    return [load_model(name, None if name.startswith("local-dir:") else weights.pop(0), **about) for name in args.model]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, nargs="+", default=[], help="checkpoints of tools/train.py or tools/compare.py")
    add("--data", required=True, help='"shapes", a folder that holds val/<class>/, a folder of shards, or <set>:<root>')
    add("--sizes", type=_size, nargs="+", required=True, help="pixels: 96, or height x width as 160x224")
    add("--protocols", nargs="+", default=PROTOCOLS, help="scale (objects grow) and canvas (object size kept); default both")
    add("--policies", nargs="+", help="policies of windows (keep, divisor, rescale) and of encodings; default all models have")
    add("--crop-pct", type=float, nargs="+", help="shares that the centre crop keeps, each evaluated; default the model's own")
    add("--shifts", type=int, nargs="+", default=[], help="pixels by which the content is moved at the training size")
    add("--attention-n", type=int, default=16, help="images that attention is measured on, 0 for none; default 16")
    add("--no-border-leak", dest="border_leak", action="store_false", help="skip the test for attention across borders")
    add("--batch-size", type=int, default=128, help="halved when memory runs out, and recorded")
    add("--n", type=int, help="number of images; default all")
    add("--data-seed", type=int, default=0, help="of generated or sampled images")
    add("--workers", type=int, default=0, help="processes that decode images")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--dtype", default="float32", help="float32, or bfloat16 autocast on a GPU")
    add("--compile", action="store_true", help="run the models by torch.compile")
    add("--optimize", action="store_true", help="run the models by vitrel.optimize, which is faster on many processors")
    add(
        "--on-bad-image",
        choices=("raise", "count"),
        default="raise",
        help="an image that cannot be read ends the evaluation, or is left out, counted and named; default raise",
    )
    add("--out", type=Path, default=Path("runs/transfer"), help="default runs/transfer; rows are added to those it holds")
    add(
        "--replace",
        action="store_true",
        help="what --out holds of anything that is not asked for now is first moved into a folder replaced-1, -2, ... there",
    )
    add("--dry-run", action="store_true", help="print every row with its cost and what would be resized, and do nothing")
    add("--no-report", dest="report", action="store_false", help="write no report.html")
    _model_arguments(parser.add_argument_group("models by name, of timm or of vitrel").add_argument)
    return parser


def _model_arguments(add: Any) -> None:
    add("--model", nargs="+", default=[], help="names of timm.list_models(), or local-dir:FOLDER")
    add(
        "--weights",
        type=Path,
        nargs="+",
        default=[],
        help="a file for each: .safetensors, .pth, .bin, .npz, or of timm's train.py",
    )
    add("--model-args", type=_mapping, default={}, help="arguments of the models as YAML, e.g. '{img_size: 384}'")
    add("--img-size", type=_size, help="trained at, pixels; default that of the model's pretrained_cfg")
    add("--mean", type=float, nargs="+", help="of the pixels, from 0 to 1, here and below in the place of the pretrained_cfg's")
    add("--std", type=float, nargs="+", help="of the pixels")
    add("--interpolation", help="bicubic or bilinear")
    add("--class-indices", type=Path, help="file with a class and the index of the model's output on every line")
    add("--restrict", action="store_true", help="let only the outputs of the data's classes compete")


def _size(text: str) -> Size:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _mapping(text: str) -> dict[str, Any]:
    try:
        return model_arguments(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _labelled(models: list[Trained]) -> list[Trained]:
    """Models of the same name are told apart by their path: only tools/compare.py knows which are seeds of one run."""
    times = Counter(trained.name for trained in models)
    models = [replace(model, label=f"{model.name} ({model.path})") if times[model.name] > 1 else model for model in models]
    if twice := [label for label, n in Counter(model.label for model in models).items() if n > 1]:
        raise ValueError(f"{twice[0]} is given twice: its rows would count as two seeds")
    return models


if __name__ == "__main__":
    main()
