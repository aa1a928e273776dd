"""The state dict inside what a file holds: which of several, and its names without those of what the model was wrapped in."""

import re
from typing import NamedTuple

from torch import Tensor

from vitrel.weights.draft import Row

# Keys of dictionaries and prefixes of names. Where a file has several the first is taken: timm's order, with more of each kind.
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema", "teacher")
_KEYS = (*_AVERAGED, "state_dict", "model", "module", "model_state_dict", "student", "online_model")
_PREFIXES = (*_KEYS, "_orig_mod", "backbone")  # torch.compile's, a detector's
_WRAPPED = re.compile(rf"(({'|'.join(_PREFIXES)})\.)+")
_COUNTER = "n_averaged"  # of torch's AveragedModel


class Unwrapped(NamedTuple):
    """A state dict without wrappers, and what became of the rest of the file."""

    state: dict[str, Tensor]
    beside: tuple[str, ...]  # names that lie outside of what was unwrapped: no part of the model
    rows: tuple[Row, ...]  # other copies of the weights, and counters
    choice: str  # which of several copies was taken; "" where there is one


def unwrap(loaded: object, origin: str) -> Unwrapped:
    """Find the state dict in nested dictionaries and take off the prefixes that most of its names share, in any order.

    Averaged weights ("state_dict_ema", "model_ema", "ema", "teacher", ...) go before others, as keys and as prefixes; other
    copies of the same names are not taken then. origin: what an error calls it. Raises ValueError where it holds no state dict,
    or averaged weights that have no names.
    """
    found = _find(loaded, origin)
    if found is None:
        raise ValueError(f"{origin} holds no state dict (a dictionary of tensors, perhaps under 'model' or 'state_dict')")
    state, choice = found
    beside, rows = [], []
    while wrapped := _wrapped(state):
        taken, *others = wrapped
        inside = {name.removeprefix(f"{taken}."): state[name] for name in wrapped[taken]}
        if taken in _AVERAGED and others:
            choice = choice or _choice(taken, others)
        bare = {_WRAPPED.sub("", f"{taken}.{name}", count=1) for name in inside}
        beaten = [name for other in others if taken in _AVERAGED for name in wrapped[other]]
        copies = {name for name in beaten if _WRAPPED.sub("", name, count=1) in bare}
        for name in state:
            if name in copies:
                rows.append(Row((name,), "", "another copy of the weights"))
            elif name == _COUNTER:
                rows.append(Row((name,), "", "a counter"))
            elif not name.startswith(f"{taken}."):
                beside.append(name)
        state = inside
    return Unwrapped(state, tuple(beside), tuple(rows), choice)


def _find(loaded: object, origin: str) -> tuple[dict[str, Tensor], str] | None:
    """The first dictionary of tensors, and which of several it is; None where there is none."""
    if not isinstance(loaded, dict) or not loaded:
        return None
    if all(isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()):
        return loaded, ""
    for key in _KEYS:
        found = _find(loaded.get(key), origin)
        if found is not None:
            others = [other for other in _KEYS if other != key and _holds_weights(loaded.get(other))]
            return found[0], found[1] or (_choice(key, others) if others else "")
        if key in _AVERAGED and _holds_weights(loaded.get(key)):
            raise ValueError(
                f"{origin} holds averaged weights under {key!r}, but no dictionary of tensors by name: pass that dictionary, "
                "or that of the other weights, in place of the whole"
            )
    return None


def _holds_weights(value: object) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(part.dim() > 0 if isinstance(part, Tensor) else _holds_weights(part) for part in parts)


def _choice(taken: str, others: list[str]) -> str:
    return f"of the file's copies {taken!r} was taken, not {', '.join(map(repr, others))} (pass the tensors that you mean)"


def _wrapped(state: dict[str, Tensor]) -> dict[str, list[str]]:
    """{prefix: names that have it} of what may be the model, the averaged first; empty unless most names have such a prefix."""
    found = {prefix: [name for name in state if name.startswith(f"{prefix}.")] for prefix in _PREFIXES}
    if any(name.startswith("backbone.net.") for name in found["backbone"]):
        found["backbone"] = []  # ViTDet's names are read as they are
    most = max(map(len, found.values()))
    found = {prefix: names for prefix, names in found.items() if 0 < most <= 2 * len(names)}
    return found if 2 * sum(map(len, found.values())) > len(state) else {}
