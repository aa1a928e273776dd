"""Export a trained model: a torch.export program, an ONNX graph, or a folder that timm.create_model("local-dir:...") reads.

    vitrel export runs/a --format onnx --dynamic-size
    vitrel export vitrel_swin_t --weights swin_t.safetensors --format exported --size 224x320 --out swin_t.pt2
    vitrel export maxvit_tiny_tf_224 --pretrained --format onnx --dynamic --out maxvit.onnx    # by vitrel.from_timm

The batch size is dynamic; with --dynamic-size height and width are too (some of timm's trunks take multiples of 16 or 32 pixels
only, see docs/how_to/any_size.md). The exported model is loaded again and compared with
the original at several batch and image sizes; if they differ, nothing is written.
"""

import argparse
from pathlib import Path

from vitrel.cli.options import add_models, add_sizes, check_models, is_name, open_models
from vitrel.common.extras import EXTRAS, require

FORMATS = ("exported", "onnx", "safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrel export` to its parser."""
    add_models(parser)
    add_sizes(parser, "image size for tracing, default that of training", many=False)
    add = parser.add_argument
    add("--format", choices=FORMATS, required=True)
    add("--dynamic-size", "--dynamic", action="store_true", help="make height and width dynamic, not only the batch size")
    add("--out", "-o", type=Path, metavar="PATH", help="default: beside the checkpoint or the weights, .pt2, .onnx or a folder")
    add("--overwrite", action="store_true", help="replace an existing output")


def run(args: argparse.Namespace) -> None:
    """Export the model to --out and print the errors of the comparison with it; ValueError if tracing or a comparison fails."""
    if args.format == "onnx":
        require(*EXTRAS["onnx"])
    check_models(args)
    from vitrel.any_size import side_multiple
    from vitrel.export import SUFFIXES, TOLERANCE, export_model
    from vitrel.models.config import PREPROCESSING
    from vitrel.weights.from_timm import from_timm

    [trained] = open_models(args)
    out = args.out or (args.weights[0] if args.weights else trained.path).with_suffix(SUFFIXES[args.format])
    about = {"encoding": trained.encoding}
    if not is_name(args.model):
        names = ("classes", "img_size", *PREPROCESSING)
        about |= {"model": trained.name} | {name: getattr(trained, name) for name in names}
    try:
        model = from_timm(trained.model).eval()
        checks = export_model(model, out, args.format, args.size, args.dynamic_size, about, args.overwrite)
    except (RuntimeError, TypeError) as error:  # tracing failed, or the model is of another library
        raise ValueError(str(error)) from error
    except FileExistsError as error:
        raise FileExistsError(str(error).replace("pass overwrite", "pass --overwrite")) from error
    print(f"{'images':>16}  largest error, of {TOLERANCE:.0e} allowed")
    for batch, (h, w), largest in checks:
        print(f"{f'{batch} of {h}x{w}':>16}  {largest:.1e}")
    print(f"written to {out}: {_serves(args, out, side_multiple(model))}")


def _serves(args: argparse.Namespace, out: Path, multiple: int) -> str:
    """Return text to print: how to load the output ("safetensors"), or the batch and image sizes that it takes (other formats).

    `multiple` is the number of pixels of which a side has to be a multiple; 0 for a vitrel model, which takes any side.
    """
    if args.format == "safetensors":
        return f"timm.create_model({f'local-dir:{out}'!r}, pretrained=True) after `import vitrel`, any size"
    whole = f"any image size of whole {multiple} pixels" if multiple > 1 else "any image size of two tokens or more"
    return f"any batch size, {whole if args.dynamic_size else 'only this image size'}"
