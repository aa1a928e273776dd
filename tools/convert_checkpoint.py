"""Convert anyone's weights to those of a vitrel model, with a report of every tensor: source, target, rule, resized or not.

    python tools/convert_checkpoint.py swin_t.pth --to vitrel_swin_t -o swin_t.safetensors
    python tools/convert_checkpoint.py deit3_small.pth --to vitrel_vit_s16_absolute -o deit3_small.safetensors \\
        --model-args '{block_args: {init_values: 1.0e-6}}' --report deit3_small.csv

The number of classes is the file's. What would stay unused or unset is refused unless --allow-unused or --allow-unset names it.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import vitrel  # noqa: F401  registers the models with timm
from vitrel.files import write_cells
from vitrel.sizes import parse_size
from vitrel.weights.build import model_arguments, model_for
from vitrel.weights.load import WeightPlan, apply_plan, read_file, save_pretrained


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; ends with a message and status 1 on bad input, 2 on bad usage."""
    args = _parser().parse_args(argv)
    try:
        if args.out.exists() and not args.overwrite:
            raise ValueError(f"{args.out} exists; name another file or pass --overwrite")
        how = dict(source_grid=args.source_grid, key_minus_query=args.key_minus_query)
        loaded = read_file(args.file)
        model, plan = model_for(args.to, args.model_args, loaded, **how)
        apply_plan(model, plan, allow_unused=args.allow_unused, allow_unset=args.allow_unset)
        save_pretrained(model, args.out)
        if args.report:
            _write(plan, args.report)
    except (ValueError, RuntimeError, TypeError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{plan}\n\n{_summary(plan)}\nwritten to {args.out}{f', report to {args.report}' if args.report else ''}")


def _summary(plan: WeightPlan) -> str:
    rules = Counter("left out" if not row.target else row.rule for row in plan.rows)
    kinds = ", ".join(f"{count} {rule}" for rule, count in rules.most_common())
    return f"{len(plan.rows)} rows: {kinds}; {sum(bool(row.resized) for row in plan.rows)} resized"


def _write(plan: WeightPlan, path: Path) -> None:
    lines = [(" + ".join(row.source), row.target, row.rule, row.resized) for row in plan.rows]
    write_cells(path, [("source", "target", "rule", "resized"), *lines])  # names of tensors are whoever's


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("file", type=Path, help=".safetensors, or a torch file of tensors (.pth, .bin, .ckpt)")
    add("--to", required=True, help="a vitrel model, as in timm.list_models('vitrel*')")
    add("-o", "--out", type=Path, required=True, help="the .safetensors file to write")
    add(
        "--model-args",
        type=_mapping,
        default={},
        help="arguments of the model as YAML, e.g. '{reg_tokens: 4, qkv_bias: false}'",
    )
    add("--source-grid", type=_grid, help="rows x columns of tokens that tables or embedding were trained on, where not square")
    add("--key-minus-query", action="store_true", help="the file's tables count offsets as key minus query")
    add("--allow-unused", nargs="+", default=[], metavar="NAME", help="tensors of the file, or patterns, that may stay unused")
    add(
        "--allow-unset",
        nargs="+",
        default=[],
        metavar="NAME",
        help="tensors of the model, or patterns, that may stay as they are",
    )
    add("--report", type=Path, help="write the report as CSV too")
    add("--overwrite", action="store_true", help="replace an existing output")
    return parser


def _mapping(text: str) -> dict[str, Any]:
    try:
        return model_arguments(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _grid(text: str) -> tuple[int, int]:
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no grid: write rows x columns as 14x20") from None


if __name__ == "__main__":
    main()
