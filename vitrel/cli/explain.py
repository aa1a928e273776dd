"""Print every term that position adds to attention, with all numbers, for a few tokens of a small grid.

    vitrel explain table --grid 2x3 --query 1
    vitrel explain log_decay --grid 1x5 --options '{decay: 0.3}' --query 0
    vitrel explain runs/a --grid 2x3 --layer 0

ENCODING is a key of vitrel.POSITIONS, and is used with its initial values. For a MODEL, the trained encoding of one layer is
used. Queries, keys and values are random, with --seed; `vitrel.explain` in Python takes yours.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vitrel.cli.options import MODEL, add_weights, arguments_given, check_models, count, grid, mapping, open_models

if TYPE_CHECKING:
    from vitrel.position import PositionEncoding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrel explain` to its parser."""
    add = parser.add_argument
    add("model", metavar="ENCODING|MODEL", help=f"a key of vitrel.POSITIONS, or {MODEL}")
    add("--grid", type=grid, default=(2, 3), metavar="GRID", help="rows x columns of tokens; default 2x3")
    add("--query", type=int, help="number of one query token, from 0; default all")
    add("--head", type=int, default=0, help="number of the head, from 0; default %(default)s")
    add("--heads", type=count, default=1, help="number of heads for an ENCODING; default %(default)s")
    add("--dim", type=count, default=4, help="width of a head for an ENCODING; default %(default)s")
    add("--options", type=mapping, default={}, metavar="YAML", help="options of the ENCODING, e.g. '{decay: 0.3}'")
    add("--layer", type=int, default=0, help="layer of a MODEL, from 0, or negative from the end; default %(default)s")
    add("--seed", type=int, default=0, help="seed of queries, keys and values; default %(default)s")
    add_weights(parser, random=True)


def run(args: argparse.Namespace) -> None:
    """Print every term that position adds to attention, for random queries, keys and values (`vitrel.inspect.explain`)."""
    if not Path(args.model).exists():  # else an encoding of the same name comes first
        check_models(args, random=True)
    import torch

    from vitrel.inspect.explain import explain
    from vitrel.position import POSITIONS

    if args.model in POSITIONS:
        position, options, heads, dim, prefix = args.model, args.options, args.heads, args.dim, 0
    else:
        if args.options:
            raise ValueError("--options are for an ENCODING: a MODEL has its own options, leave them out")
        position, heads, dim, prefix = _of_layer(args)
        options = {}
    generator = torch.Generator().manual_seed(args.seed)
    tokens = args.grid[0] * args.grid[1] + prefix
    q, k, v = (torch.randn(heads, tokens, dim, generator=generator, dtype=torch.float64) for _ in range(3))
    with arguments_given("--options", options):
        print(explain(q, k, v, position, (*args.grid, prefix), args.query, head=args.head, **options))


def _of_layer(args: argparse.Namespace) -> tuple["PositionEncoding", int, int, int]:
    """Load the model and return (encoding, number of heads, head width, number of prefix tokens) of its layer --layer.

    The last is 0 for window attention. ValueError if the model has no such layer, or no attention layer of vitrel.
    """
    from vitrel.layers.block import Block

    [trained] = open_models(args, random=True)
    layers = [module for module in trained.model.modules() if isinstance(module, Block)]
    if not layers:
        raise ValueError(f"{args.model} has no attention layers of vitrel: use vitrel diagnose for models of timm")
    if not -len(layers) <= args.layer < len(layers):
        raise ValueError(f"there is no layer {args.layer}: the model has layers 0 to {len(layers) - 1}")
    layer = layers[args.layer]
    prefix = 0 if layer.attn.window else getattr(trained.model, "num_prefix_tokens", 0)
    return layer.position, layer.attn.num_heads, layer.attn.qkv.out_features // 3 // layer.attn.num_heads, prefix
