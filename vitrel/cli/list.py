"""List vitrel's models: image size in training, patch, width, depth, heads, position, timm's weights of the same shape.

    vitrel list                   # those of the common sizes s16 and t
    vitrel list 'vitrel*'         # all
    vitrel list 'vitrel_vit_b16*' --weights-only

PATTERN is a name with wildcards * and ?. Nothing is built or downloaded. timm's models are listed by timm.list_models();
`vitrel diagnose NAME` shows what other sizes do to position in any model.
"""

import argparse
from typing import Any

from vitrel.cli.options import add_json, check_folders, write_json
from vitrel.common.names import did_you_mean
from vitrel.common.sizes import format_size
from vitrel.common.tables import aligned

SHOWN = ("vitrel_vit_s16*", "vitrel_swin_t*", "vitrel_swinv2_t")  # without a PATTERN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrel list` to its parser."""
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="names with wildcards * and ?; default sizes s16 and t")
    parser.add_argument("--weights-only", action="store_true", help="only models with public weights")
    add_json(parser, "write the list")


def run(args: argparse.Namespace) -> None:
    """Print the models that match the patterns as a table, or write them as JSON; ValueError for a pattern without a model."""
    check_folders(args.json)
    import timm

    import vitrel.models  # noqa: F401  registers our names with timm
    from vitrel.models.registry import ARGUMENTS

    names: dict[str, None] = {}
    for pattern in args.patterns or SHOWN:
        found = [name for name in timm.list_models(pattern) if name in ARGUMENTS]
        if not found:
            hint = did_you_mean(pattern, ARGUMENTS) or f"; timm's are those of timm.list_models({pattern!r})"
            raise ValueError(f"vitrel has no model {pattern!r}{hint}")
        names |= dict.fromkeys(found)
    rows = [row for name in names if (row := _row(name))["weights"] or not args.weights_only]
    if args.json is not None:
        write_json(args.json, rows)
    elif not rows:
        print("no model has public weights")
    else:
        print("\n".join(aligned([[*rows[0]], *([str(value) for value in row.values()] for row in rows)])))
    if args.json is None and not args.patterns:
        print(f"\n{len(rows)} of {len(ARGUMENTS)} models; all: vitrel list 'vitrel*'; timm's: timm.list_models()")


def _row(name: str) -> dict[str, Any]:
    """Return {column: value} of a model, from its arguments in the registry; "weights" is a name on the hub, or ""."""
    import timm
    from timm.layers import to_2tuple

    from vitrel.models.registry import ARGUMENTS

    arguments, cfg = ARGUMENTS[name], timm.get_pretrained_cfg(name)
    heads = arguments["num_heads"]
    return {
        "model": name,
        "pixels": format_size(to_2tuple(arguments["img_size"])),
        "patch": arguments["patch_size"],
        "width": arguments["embed_dim"],
        "depth": arguments["depth"] if "depth" in arguments else sum(arguments["depths"]),
        "heads": heads if isinstance(heads, int) else ",".join(map(str, heads)),
        "position": arguments["position"],
        "weights": (cfg and cfg.hf_hub_id) or "",
    }
