"""Evaluate checkpoints at many resolutions: one table, plots, and one verdict per model on what had to be resized.

    python tools/evaluate_transfer.py --checkpoint runs/a/checkpoints/last.ckpt --data shapes --sizes 48 64 96 64x96

Writes results.csv, table.md and plots/*.png into --out. The training size is always evaluated too. Several processes share
the images, one GPU each where there are GPUs; the numbers are those of one process:

    torchrun --nproc_per_node=2 tools/evaluate_transfer.py --checkpoint ...
"""

import argparse
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from vitrel.transfer.checkpoint import Trained, load_checkpoint
from vitrel.transfer.evaluate import PROTOCOLS, Size, Sweep, evaluate, parse_size
from vitrel.transfer.split import OtherProcessError, joined, rank_and_world
from vitrel.transfer.sweep import run_sweep, summary


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; ends with a message and status 1 on bad input, 2 on bad usage."""
    args = _parser().parse_args(argv)
    try:
        with joined():
            _run(args)
    except OtherProcessError as error:  # which printed it too; the log of process 0 may be all there is
        sys.exit(f"error: {error}" if int(os.environ["RANK"]) == 0 else 1)
    except (ValueError, OSError, MemoryError, FloatingPointError) as error:
        sys.exit(f"error: {error}")


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
    )
    models = _labelled([load_checkpoint(path) for path in args.checkpoint])
    if rank_and_world()[0] > 0:
        for _ in evaluate(models, sweep):
            pass  # process 0 prints and writes
        return
    rows = run_sweep(models, sweep, args.out, title=Path(args.data).name)
    left_out = max(row["left_out"] for row in rows)
    note = f"\nleft out, since they cannot be read (column left_out): {left_out} of the images" if left_out else ""
    print(f"\n{summary(rows)}{note}\nwritten to {args.out}: results.csv, table.md, plots/")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, nargs="+", required=True, help="checkpoints of tools/train.py or tools/compare.py")
    add("--data", required=True, help='"shapes" or a folder that holds val/<class>/')
    add("--sizes", type=_size, nargs="+", required=True, help="pixels: 96, or height x width as 160x224")
    add("--protocols", nargs="+", default=PROTOCOLS, help="scale (objects grow) and canvas (object size kept); default both")
    add("--policies", nargs="+", help="resize policies, of the models that have several; default all they have")
    add("--batch-size", type=int, default=128, help="halved when memory runs out, and recorded")
    add("--n", type=int, help="number of images; default all")
    add("--data-seed", type=int, default=0, help="of generated or sampled images")
    add("--workers", type=int, default=0, help="processes that decode images")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--dtype", default="float32", help="float32, or bfloat16 autocast on a GPU")
    add(
        "--on-bad-image",
        choices=("raise", "count"),
        default="raise",
        help="an image that cannot be read ends the evaluation, or is left out and counted; default raise",
    )
    add("--out", type=Path, default=Path("runs/transfer"), help="default runs/transfer")
    return parser


def _size(text: str) -> Size:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _labelled(models: list[Trained]) -> list[Trained]:
    """Checkpoints of the same model are told apart by their path: only tools/compare.py knows which are seeds of one run."""
    times = Counter(trained.name for trained in models)
    return [replace(model, label=f"{model.name} ({model.path})") if times[model.name] > 1 else model for model in models]


if __name__ == "__main__":
    main()
