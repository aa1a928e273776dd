"""Convert anyone's weights to those of a vitrel model, with a report of every tensor: source, target, rule, resized or not.

    vitrel convert vitrel_swin_t --weights swin_t.pth --out swin_t.safetensors
    vitrel convert vitrel_vit_s16_absolute --weights deit3_small.pth --out deit3_small.safetensors \\
        --model-args '{block_args: {init_values: 1.0e-6}}' --report deit3_small.csv

The number of classes is the file's. What would stay unused or unset is refused unless --allow-unused or --allow-unset names it.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from vitrel.cli.options import grid, mapping

if TYPE_CHECKING:
    from vitrel.weights.load import WeightPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel convert`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a vitrel model, as in timm.list_models('vitrel*')")
    add(
        "--weights",
        type=Path,
        required=True,
        metavar="FILE",
        help=".safetensors, or a torch file of tensors (.pth, .bin, .ckpt)",
    )
    add("--out", type=Path, required=True, metavar="FILE", help="the .safetensors file to write")
    add(
        "--model-args",
        type=mapping,
        default={},
        metavar="YAML",
        help="arguments of the model, e.g. '{reg_tokens: 4, qkv_bias: false}'",
    )
    add("--source-grid", type=grid, metavar="GRID",
        help="rows x columns of tokens that tables or embedding were trained on, where not square")  # fmt: skip
    add("--key-minus-query", action="store_true", help="the file's tables count offsets as key minus query")
    add("--allow-unused", nargs="+", default=[], metavar="NAME", help="tensors of the file, or patterns, that may stay unused")
    add(
        "--allow-unset",
        nargs="+",
        default=[],
        metavar="NAME",
        help="tensors of the model, or patterns, that may stay as they are",
    )
    add("--report", type=Path, metavar="FILE", help="write the report as CSV too")
    add("--overwrite", action="store_true", help="replace an existing output")


def run(args: argparse.Namespace) -> None:
    """Writes the converted weights and prints what became of every tensor."""
    if args.out.exists() and not args.overwrite:
        raise ValueError(f"{args.out} exists; name another file or pass --overwrite")
    import vitrel.models  # noqa: F401  registers our names with timm
    from vitrel.files import write_cells
    from vitrel.weights.build import model_for
    from vitrel.weights.load import apply_plan, read_file, save_pretrained

    loaded = read_file(args.weights)
    model, plan = model_for(args.model, args.model_args, loaded, args.source_grid, args.key_minus_query)
    try:
        apply_plan(model, plan, allow_unused=args.allow_unused, allow_unset=args.allow_unset)
    except RuntimeError as error:  # as torch's load_state_dict names tensors that do not fit
        raise ValueError(str(error)) from error
    save_pretrained(model, args.out)
    if args.report:
        lines = [(" + ".join(row.source), row.target, row.rule, row.resized) for row in plan.rows]
        write_cells(args.report, [("source", "target", "rule", "resized"), *lines])  # names of tensors are whoever's
    print(f"{plan}\n\n{_summary(plan)}\nwritten to {args.out}{f', report to {args.report}' if args.report else ''}")


def _summary(plan: "WeightPlan") -> str:
    rules = Counter("left out" if not row.target else row.rule for row in plan.rows)
    kinds = ", ".join(f"{count} {rule}" for rule, count in rules.most_common())
    return f"{len(plan.rows)} rows: {kinds}; {sum(bool(row.resized) for row in plan.rows)} resized"
