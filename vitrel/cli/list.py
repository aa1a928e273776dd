"""List models by name: parameters, cost, effect of other image sizes on position, source of weights.

    vitrel list                         # vitrel's models of common sizes
    vitrel list 'vitrel_vit_s16*'
    vitrel list 'deit3*' --size 224 384 # timm's, as vitrel.from_timm converts them

PATTERN is a name with wildcards * and ?. Nothing is downloaded. Multiply-adds are of matrix products and convolutions, for one
image of the model's default size.
"""

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrel.cli.options import add_json, add_sizes, check_folders, write_json

if TYPE_CHECKING:
    from torch import nn


class Listed(NamedTuple):
    """A line of the list: a model and its properties."""

    name: str
    parameters: int
    multiply_adds: int  # 0 where unknown
    size: str  # "224x224"
    position: str
    elsewhere: str  # what is resampled at other sizes, or why from_timm does not convert the model
    weights: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vitrel list`."""
    default = "vitrel's models of sizes s16 and t"
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help=f"names with wildcards * and ?; default {default}")
    add_sizes(parser, "image sizes at which to report resampling")
    parser.add_argument("--weights-only", action="store_true", help="only models with public weights")
    add_json(parser, "write the list")


def run(args: argparse.Namespace) -> None:
    """Print the list."""
    check_folders(args.json)
    import timm

    import vitrel.models  # noqa: F401  registers our names with timm

    names: list[str] = []
    for pattern in args.patterns or ("vitrel_vit_s16*", "vitrel_swin_t*", "vitrel_swinv2_t"):
        found = timm.list_models(pattern)
        if not found:
            from vitrel.models.create import check_model_name

            check_model_name(pattern)  # raises an error with the nearest names
        names += [name for name in found if name not in names]
    if args.weights_only:
        names = [name for name in names if _weights(name)]
    rows = []
    for name in names:
        row = listed(name, tuple(args.size or ()))
        rows.append(row)
        if args.json is None:
            _print(row, first=len(rows) == 1)
    if args.json is not None:
        write_json(args.json, [row._asdict() for row in rows])
    elif not rows:
        print("no model has public weights")


def listed(name: str, sizes: tuple[tuple[int, int], ...] = ()) -> Listed:
    """Return the line of a model, built without memory for weights.

    Args:
        sizes: (h, w) in pixels at which to report resampling.
    """
    import timm

    from vitrel.any_size import adapter_of
    from vitrel.models.backbone import Backbone
    from vitrel.models.create import on_meta
    from vitrel.weights import from_timm

    with on_meta():
        model = timm.create_model(name)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        position, elsewhere = "-", ""
        try:
            ours = model if isinstance(model, Backbone) else from_timm(model)
        except ValueError as error:
            elsewhere = "not supported by from_timm: " + str(error).partition(": ")[2]
        else:
            if isinstance(ours, Backbone):
                position, elsewhere = ours.current_arguments()["position"], _elsewhere(ours, sizes)
            elif adapter := adapter_of(model):
                position, elsewhere = adapter.position, adapter.elsewhere
            else:
                position, elsewhere = "none", "nothing"
        size = getattr(model, "img_size", None) or getattr(getattr(model, "patch_embed", None), "img_size", None)
        size = tuple(size or model.pretrained_cfg["input_size"][1:])
        cost = _multiply_adds(model, size)
    return Listed(name, parameters, cost, f"{size[0]}x{size[1]}", position, elsewhere, _weights(name))


def _elsewhere(model: Any, sizes: tuple[tuple[int, int], ...]) -> str:
    """What is resampled at each of `sizes`, by default at twice the training size."""
    h, w = model.img_size
    parts = []
    for at in sizes or ((2 * h, 2 * w),):
        resampled = ", ".join(model.resampled(at)) or ("nothing resampled" if model.unseen(at) == 0 else "")
        parts.append((f"{at[0]}x{at[1]}: " if sizes else "") + (resampled or "nothing resampled, unseen offsets"))
    return "; ".join(parts)


def _multiply_adds(model: "nn.Module", size: tuple[int, int]) -> int:
    """Multiply-adds of one image, counted on the meta device; 0 where the model does not run there.

    Leaves the model in eval mode with frozen parameters.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval().requires_grad_(False)(torch.empty(1, model.pretrained_cfg["input_size"][0], *size, device="meta"))
        return counter.get_total_flops() // 2
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError):  # some models need real tensors
        return 0


def _weights(name: str) -> str:
    """The source of timm's weights for a name, "" where there are none."""
    import timm

    tags = timm.list_pretrained(f"{name}.*")
    cfg = timm.get_pretrained_cfg(tags[0] if tags else name)
    place = (cfg.hf_hub_id or cfg.url or "") if cfg is not None else ""
    more = f" and {len(tags) - 1} more" if len(tags) > 1 else ""
    return place.replace("timm/", f"timm/{tags[0]}") + more if place == "timm/" and tags else place + more


def _print(row: Listed, first: bool) -> None:
    if first:
        print(f"{'model':40} {'params':>8} {'mult-adds':>9}  {'size':9} {'position':26} at other sizes; weights")
    cost = f"{row.multiply_adds / 1e9:.2f} G" if row.multiply_adds else "-"
    weights = f"; {row.weights}" if row.weights else ""
    print(f"{row.name:40} {row.parameters / 1e6:6.2f} M {cost:>9}  {row.size:9} {row.position:26} {row.elsewhere}{weights}")
