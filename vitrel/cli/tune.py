"""Measure which attention backend is right and fastest on this device; backend "auto" follows the profile from then on.

    vitrel tune
    vitrel tune vitrel_swin_t --size 224 288 --batch-size 8

Without a MODEL usual shapes are measured; with one, its attention calls in inference and training. Backends
whose output or gradients differ from those of the first are left out. The profile is in the user's cache folder; VITREL_PROFILE
is another file, or "off". It ends after about two minutes; stopped, or with more to measure, the same command goes on.
"""

import argparse
import sys
from pathlib import Path

from vitrel.cli.options import (
    MODEL,
    add_json,
    add_sizes,
    add_weights,
    check_folders,
    check_models,
    count,
    open_models,
    write_json,
)
from vitrel.common.files import shown

GO_ON = "measured cases are in the profile; the same command goes on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel tune`."""
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help=MODEL)
    add_sizes(parser, "image sizes for MODEL, default its training size")
    add("--batch-size", type=count, default=1, help="images in a call of MODEL; default %(default)s")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--out", "-o", type=Path, metavar="FILE", help="write the profile there, to be given as VITREL_PROFILE")
    add("--fresh", action="store_true", help="measure everything again")
    add("--seconds", type=count, default=75, metavar="N", help="start no case after so many seconds; default %(default)s")
    add_json(parser, "write the measured cases")
    add_weights(parser, many=True, random=True)


def run(args: argparse.Namespace) -> None:
    """Measure and print the result."""
    if args.size and not args.models:
        args.usage_error("--size is of a MODEL; without one, usual shapes are measured")
    check_folders(args.out, args.json)
    check_models(args, random=True)
    from vitrel.common.processes import checked_device

    device = checked_device(args.device)
    import vitrel.models  # noqa: F401  registers our names with timm
    from vitrel.ops.profile import VARIABLE, path_for
    from vitrel.tune import report, tune

    print(f"measuring on {device}; measured cases are kept if this is stopped", file=sys.stderr, flush=True)
    opened = open_models(args, random=True) if args.models else []
    options = {"device": device, "out": args.out, "batch_size": args.batch_size, "seconds": args.seconds}
    if not opened:
        profile = tune(fresh=args.fresh, **options)
    for i, trained in enumerate(opened):
        sizes = args.size or [trained.img_size]
        profile = tune(trained.model.to(device), sizes, fresh=args.fresh and i == 0, **options)
    if args.json:
        write_json(args.json, profile.cases)
    if args.json != "-":
        print(report(profile))
    in_use = path_for(device) == profile.path
    then = "attention follows it from now on" if in_use else f"set {VARIABLE} to this path to use it"
    print(f"written to {shown(profile.path)}: {then}", file=sys.stderr)
