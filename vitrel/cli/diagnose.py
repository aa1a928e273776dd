"""Show how other image sizes affect position in any timm model: interpolated values, leaks, padding, windows, bias.

    vitrel diagnose swin_tiny_patch4_window7_224
    vitrel diagnose swin_tiny_patch4_window7_224 --size 160 224 320
    vitrel diagnose swin_tiny_patch4_window7_224 --model-args '{dynamic_img_size: true}' --size 320
    vitrel diagnose swinv2_tiny_window8_256 vitrel_swinv2_t --size 192x288 512 --plot leak.png --json leak.json

Random weights, no data, no training. Without --size at the model's own size, one and a half and two times it. A model is
brought to a size by its set_input_size, or as it was built where it takes any.
"""

import argparse
import sys
from pathlib import Path

from vitrel.cli.options import add_json, add_model_args, add_sizes, arguments_given, check_folders, print_step, write_json
from vitrel.common.extras import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrel diagnose` to its parser."""
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="names of timm.create_model, vitrel's included, or package.module:function")
    add_sizes(parser, "image sizes")
    add_model_args(add, "{dynamic_img_size: true}")
    add_json(parser, "write the results, a list with one entry per model,")
    add("--plot", type=Path, metavar="FILE", help="plot the tokens that see the opposite border, as PNG")


def run(args: argparse.Namespace) -> None:
    """Diagnose one model after another, print the results (not with --json -), and write to --json and --plot, if given."""
    check_folders(args.plot, args.json)
    if args.plot:
        require("matplotlib")
    import vitrel.models  # noqa: F401  registers our names with timm
    from vitrel.inspect.diagnose import diagnose
    from vitrel.models.create import check_model_name

    for name in args.models:
        check_model_name(name, allow_sources=True)
    diagnoses = []
    for name in args.models:
        with arguments_given("--model-args", args.model_args):
            diagnoses.append(diagnose(name, args.size, print_step, **args.model_args))
        if args.json != "-":
            print(diagnoses[-1], end="\n\n", flush=True)
    if args.json:
        write_json(args.json, [diagnosis.to_dict() for diagnosis in diagnoses])
    if args.plot:
        from vitrel.inspect import plot

        plot.leak(diagnoses).savefig(args.plot, dpi=110)
        print(f"written to {args.plot}", file=sys.stderr)
