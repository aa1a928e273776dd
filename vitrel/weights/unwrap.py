"""Find the state dict in a loaded file, choose between several, and remove prefixes of wrappers from its names."""

import re
from typing import NamedTuple

from torch import Tensor

from vitrel.weights.tensors import Row

# Keys of dictionaries and prefixes of names. The first that a file has is used: timm's order, extended.
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema", "teacher")
_KEYS = (*_AVERAGED, "state_dict", "model", "module", "model_state_dict", "student", "online_model")
_PREFIXES = (*_KEYS, "_orig_mod", "backbone")  # of torch.compile, of a detector
_WRAPPED = re.compile(rf"(({'|'.join(_PREFIXES)})\.)+")
_COUNTER = "n_averaged"  # of torch's AveragedModel


class Unwrapped(NamedTuple):
    """A state dict without wrappers, and a record of the rest of the file."""

    state: dict[str, Tensor]  # {name: tensor} of the model
    beside: tuple[str, ...]  # names that lack the prefix that most names had: not part of the model, and not in `state`
    rows: tuple[Row, ...]  # other copies of the weights, and counters
    choice: str  # a phrase that says which of several copies was used; "" if there is one


def unwrap(loaded: object, origin: str) -> Unwrapped:
    """Return the state dict in nested dictionaries, without the prefixes that most of its names share.

    Averaged weights ("state_dict_ema", "model_ema", "ema", "teacher", ...) are preferred, as keys and as prefixes; the other
    copies are then recorded as unused.

    Args:
        loaded: content of a file.
        origin: the name of the file in errors.

    Raises:
        ValueError: there is no state dict, or averaged weights have no names.
    """
    state_and_choice = _find(loaded, origin)
    if state_and_choice is None:
        raise ValueError(f"{origin} holds no state dict (a dictionary of tensors, perhaps under 'model' or 'state_dict')")
    state, choice = state_and_choice
    beside, rows = [], []
    while wrapped := _wrapped(state):
        prefix, *others = wrapped
        inside = {name.removeprefix(f"{prefix}."): state[name] for name in wrapped[prefix]}
        if prefix in _AVERAGED and others:
            choice = choice or _choice(prefix, others)
        bare = {_WRAPPED.sub("", f"{prefix}.{name}", count=1) for name in inside}
        candidates = [name for other in others if prefix in _AVERAGED for name in wrapped[other]]
        copies = {name for name in candidates if _WRAPPED.sub("", name, count=1) in bare}
        for name in state:
            if name in copies:
                rows.append(Row((name,), "", "another copy of the weights"))
            elif name == _COUNTER:
                rows.append(Row((name,), "", "a counter"))
            elif not name.startswith(f"{prefix}."):
                beside.append(name)
        state = inside
    return Unwrapped(state, tuple(beside), tuple(rows), choice)


def _find(loaded: object, origin: str) -> tuple[dict[str, Tensor], str] | None:
    """Return (the preferred dictionary of tensors, a phrase on the choice if there are several), or None."""
    if not isinstance(loaded, dict) or not loaded:
        return None
    if all(isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()):
        return loaded, ""
    for key in _KEYS:
        inner = _find(loaded.get(key), origin)
        if inner is not None:
            others = [other for other in _KEYS if other != key and _holds_weights(loaded.get(other))]
            return inner[0], inner[1] or (_choice(key, others) if others else "")
        if key in _AVERAGED and _holds_weights(loaded.get(key)):
            raise ValueError(
                f"{origin} holds averaged weights under {key!r}, but no dictionary of tensors by name: pass a dictionary of "
                "the averaged or the plain weights instead of the file"
            )
    return None


def _holds_weights(value: object) -> bool:
    """Return whether nested dictionaries and lists contain a tensor that is not a scalar."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(part.dim() > 0 if isinstance(part, Tensor) else _holds_weights(part) for part in parts)


def _choice(used: str, others: list[str]) -> str:
    return f"of the file's copies {used!r} was taken, not {', '.join(map(repr, others))} (pass another's tensors to use them)"


def _wrapped(state: dict[str, Tensor]) -> dict[str, list[str]]:
    """Return {prefix: names with it}, averaged weights first, for the most frequent prefixes; {} unless most names have one."""
    names_of = {prefix: [name for name in state if name.startswith(f"{prefix}.")] for prefix in _PREFIXES}
    most = max(map(len, names_of.values()))
    names_of = {prefix: names for prefix, names in names_of.items() if 0 < most <= 2 * len(names)}
    return names_of if 2 * sum(map(len, names_of.values())) > len(state) else {}
