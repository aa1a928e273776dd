"""Export a trained model: a torch.export program, an ONNX graph, or a folder that timm.create_model("local-dir:...") reads.

    python tools/export.py runs/a/checkpoints/last.ckpt --format onnx --dynamic-size
    python tools/export.py swin_t.safetensors --model vitrel_swin_t --format exported --size 224x320 -o swin_t.pt2

The batch is free; --dynamic-size frees height and width too. What was written is read back and compared with the model at
several batches and sizes first; where that fails, nothing is left behind.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from torch import nn

from vitrel.evaluate.models import encoding_of, load_checkpoint
from vitrel.export import SUFFIXES, TOLERANCE, export_model
from vitrel.sizes import parse_size
from vitrel.weights.build import model_arguments, model_for
from vitrel.weights.load import apply_plan, read_file


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; ends with a message and status 1 on bad input, 2 on bad usage."""
    args = _parser().parse_args(argv)
    out = args.out or args.checkpoint.with_suffix(SUFFIXES[args.format])
    try:
        model, about = _trained(args.checkpoint) if args.model is None else _named(args)
        checks = export_model(model, out, args.format, args.size, args.dynamic_size, about, args.overwrite)
    except (ValueError, RuntimeError, TypeError, OSError, ImportError) as error:
        sys.exit(f"error: {error}".replace("pass overwrite", "pass --overwrite"))
    print(f"{'images':>16}  largest error, of {TOLERANCE:.0e} allowed")
    for batch, (h, w), error in checks:
        print(f"{f'{batch} of {h}x{w}':>16}  {error:.1e}")
    print(f"written to {out}: {_serves(args)}")


def _trained(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    trained = load_checkpoint(path)
    names = ("encoding", "classes", "img_size", "mean", "std", "crop_pct", "interpolation")
    return trained.model, {"model": trained.name} | {name: getattr(trained, name) for name in names}


def _named(args: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """The model that --model names, with as many classes as the file unless --model-args decides, and its weights."""
    model, plan = model_for(args.model, args.model_args, read_file(args.checkpoint))
    return apply_plan(model.eval(), plan), {"encoding": encoding_of(model)}


def _serves(args: argparse.Namespace) -> str:
    if args.format == "safetensors":
        return "timm.create_model('local-dir:...', pretrained=True) after `import vitrel`, any size"
    return f"any batch, {'any size that leaves two tokens' if args.dynamic_size else 'this size alone'}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="of tools/train.py or tools/compare.py; with --model, any weights file")
    add("--format", choices=tuple(SUFFIXES), required=True)
    add("--dynamic-size", action="store_true", help="height and width stay free, not only the batch")
    add("--size", type=_size, help="pixels to trace at: 96, or height x width as 160x224; default: of training")
    add("-o", "--out", type=Path, help="default: beside the checkpoint, .pt2, .onnx or a folder")
    add("--model", help="for a bare weights file, a name as in timm.list_models('vitrel*')")
    add("--model-args", type=_mapping, default={}, help="its arguments as YAML, e.g. '{img_size: [160, 224]}'")
    add("--overwrite", action="store_true", help="replace an existing output")
    return parser


def _size(text: str) -> tuple[int, int]:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _mapping(text: str) -> dict[str, Any]:
    try:
        return model_arguments(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    main()
