"""Find position errors in anyone's model: its encoding is identified and tested, from its operators alone.

    vitrel check vit_small_patch16_dinov3
    vitrel check my_package.models:build_model --model-args '{depth: 4}' --size 96x128 128x96 --json check.json
    vitrel check my_package.models:port --like vit_small_patch16_dinov3 --expect rope_normalized

Random weights serve, and no data is needed. The JSON holds inputs, expected and seen values, against which a port in another
language can be tested. Exit status: 0 no finding, 1 findings, 2 bad usage.
"""

import argparse
import sys

from vitrel.cli.options import add_json, add_model_args, add_sizes, check_folders, print_step, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrel check` to its parser."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name of timm.create_model, or an import path package.module:function")
    add_sizes(parser, "image sizes; first two with height and width exchanged; default 6 x 8 and 8 x 6 patches, and its own")
    add_model_args(add, "{dynamic_img_size: true}")
    add("--like", metavar="MODEL", help="reference whose position must be the same, with the same arguments")
    add("--expect", metavar="KIND", help="encoding that must be identified, e.g. rope_axial")
    add("--checks", nargs="+", metavar="NAME", help="checks to run; default all")
    add_json(parser, "write the report, with the numbers of findings and of passed checks for tests of a port,")


def run(args: argparse.Namespace) -> None:
    """Check the model, print the report (not with --json -), write it to --json; exit with 1 for findings, 2 for bad usage."""
    try:
        check_folders(args.json)
        from vitrel.conformance import check

        report = check(args.model, args.size, args.like, args.expect, args.checks, print_step, **args.model_args)
    except (OSError, TypeError, ValueError) as error:  # status 1 stands for findings
        given = f"--model-args {args.model_args}: " if isinstance(error, TypeError) and args.model_args else ""
        args.usage_error(f"{given}{error}")
    if args.json != "-":
        print(report, flush=True)
    if args.json:
        write_json(args.json, report.to_dict())
    if not report.ok:
        sys.exit(1)
