"""What a state dict does not hold: the grid an encoding was trained on, and the options its function depends on.

Kept in the metadata of the files that `vitrel.save` writes and in training checkpoints. With it, non-square tables need no
`source_grid`, and weights are refused where the same numbers would mean another function.
"""

import json
from typing import Any

from torch import nn

from vitrel.grid import Grid
from vitrel.position import PositionEncoding, key_of
from vitrel.position.terms import Composition
from vitrel.sizes import format_size

# The grid has a rule of its own; policies, temperature and what acts in training only are the user's choice.
_FREE = {"training", "grid", "resize", "init_std", "scaling", "logit_scale", "shift", "jitter", "rescale"}
_FREE |= {"forward"}  # of an optimized model
_OPTIONS = {"window": "pretrained_window"}  # attributes that have another name as options


def position_record(model: nn.Module) -> dict[str, dict[str, Any]]:
    """{module name of every encoding: its key, training grid [h, w, prefix] and options}, as plain values for JSON."""
    found = {}
    for name, part in model.named_modules():
        if isinstance(part, PositionEncoding) and not isinstance(part, Composition):
            options = {n: v for n, v in vars(part).items() if not n.startswith("_") and n not in _FREE}
            found[name] = {"key": key_of(part), "grid": part.grid, **options}
    return json.loads(json.dumps(found, default=str))


def recorded_grid(record: dict[str, dict[str, Any]], name: str) -> Grid | None:
    """The training grid of the encoding `name`, where the record tells it."""
    grid = record.get(name, {}).get("grid")
    return None if grid is None else Grid(*grid)


def check_record(model: nn.Module, record: dict[str, dict[str, Any]]) -> None:
    """ValueError where an encoding of the file is another function than the model's of that name."""
    own = position_record(model)
    for name, theirs in record.items():
        ours = own.get(name)
        if ours is None:
            continue  # its parameters, if it has any, are listed as unused
        part = model.get_submodule(name)
        if ours["key"] != theirs["key"]:
            raise ValueError(
                f"{name} was trained as {theirs['key']!r}, the model has {ours['key']!r}: build it with the file's position"
            )
        for option in sorted((ours.keys() & theirs.keys()) - {"grid"}):
            if ours[option] != theirs[option]:
                raise ValueError(
                    f"{name} was trained with {option}={theirs[option]!r}, the model has {ours[option]!r}: "
                    f"position_args=dict({_OPTIONS.get(option, option)}={theirs[option]!r})"
                )
        if part.refers_to_grid and ours["grid"] != theirs["grid"]:
            raise ValueError(
                f"{name} ({ours['key']}) refers to its training grid, {format_size(theirs['grid'])}, "
                f"which is {format_size(ours['grid'])} here: build the model with the "
                "img_size (in windows, the window_size) of training; it runs at every size"
            )
