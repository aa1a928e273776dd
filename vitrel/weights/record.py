"""The record of a model's encodings in files of weights, and the digest of its weights.

Files of `vitrel.save` and training checkpoints hold the record: the training grid of each encoding, and options that a state
dict does not show. The grid is needed to read tables that are not square. Loading raises an error if the model would compute
something else from the same weights.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrel.common.sizes import format_size
from vitrel.position import POSITIONS, PositionEncoding, key_of
from vitrel.position.perturb import SMALLEST_STRENGTHS
from vitrel.position.terms import Composition

# Attributes that are not compared: the grid has its own check; policies, temperature and training-only options are free.
_FREE = {"training", "grid", "init_std", "policies", "temperature", "temperature_grid", *SMALLEST_STRENGTHS}


def state_hash(model: nn.Module) -> str:
    """Return the SHA-256 of a model's state dict in hexadecimal, over names, dtypes, shapes and bytes in their order."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def position_record(model: nn.Module, free: bool = False) -> dict[str, dict[str, Any]]:
    """Return the record of a model: {module name of an encoding: {"key", "grid": [h, w, prefix], option: value}}, plain values.

    An encoding from outside this package also has "module", where its class is. Of a composition the parts are recorded.

    Args:
        model: the model, or a part of one.
        free: include the options that may differ when the weights are loaded (policy, temperature, shift_coords, ...).
    """
    record = {}
    for name, part in model.named_modules():
        if isinstance(part, PositionEncoding) and not isinstance(part, Composition):
            left_out = {"training", "grid"} if free else {*_FREE, *part.switchable}
            options = {n: v for n, v in vars(part).items() if not n.startswith("_") and n not in left_out}
            module = type(part).__module__
            own = {} if module.startswith("vitrel.") else {"module": module}  # of an encoding that is not of this package
            record[name] = {"key": key_of(part), "grid": part.grid, **own, **options}
    return json.loads(json.dumps(record, default=str))


def check_encodings(record: Any, path: Path) -> None:
    """Raise ValueError, naming `path` and the module to import, for a user's encoding in the record that is not registered."""
    for entry in record.values() if isinstance(record, dict) else ():
        module = entry.get("module") if isinstance(entry, dict) else None
        if module is not None and entry.get("key") not in POSITIONS:
            where = "the program or notebook that made the file" if module == "__main__" else f"the module {module}"
            raise ValueError(
                f"{path} has the position encoding {entry.get('key')!r}, which {where} registers: import it first "
                f"(import {module}, or --import {module} on the command line)"
            )


def check_record(model: nn.Module, record: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError if an encoding in the record has another key or option than the model's of the same module name.

    Another training grid is an error only for encodings that refer to it (`refers_to_grid`); tables are resampled. Encodings
    and options that only the record or only the model has are skipped.
    """
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
        for option in sorted((ours.keys() & theirs.keys()) - {"grid", "module"}):
            if ours[option] != theirs[option]:
                raise ValueError(
                    f"{name} was trained with {option}={theirs[option]!r}, the model has {ours[option]!r}: "
                    f"position_args=dict({option}={theirs[option]!r})"
                )
        if part.refers_to_grid and ours["grid"] != theirs["grid"]:
            raise ValueError(
                f"{name} ({ours['key']}) refers to its training grid, {format_size(theirs['grid'])}, "
                f"which is {format_size(ours['grid'])} in the model: build the model with the "
                "img_size (in windows, the window_size) of training; that model runs at every size too"
            )
