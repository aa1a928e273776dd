"""Find the state dict in a loaded file, and remove the prefix of wrappers from its names."""

from torch import Tensor

# Keys of dictionaries. The first that a file has is used: averaged weights before others, as timm does.
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema", "teacher")
_KEYS = (*_AVERAGED, "state_dict", "model", "module", "model_state_dict", "student", "online_model")
_COUNTER = "n_averaged"  # of torch's AveragedModel


def unwrap(loaded: object, origin: str) -> dict[str, Tensor]:
    """Return the state dict in nested dictionaries, without a prefix that all of its names share ("module.", "model.").

    Averaged weights ("state_dict_ema", "model_ema", "ema", "teacher", ...) are preferred.

    Args:
        loaded: content of a file.
        origin: the name of the file in errors.

    Raises:
        ValueError: there is no state dict, or averaged weights have no names.
    """
    state = _find(loaded, origin)
    if state is None:
        raise ValueError(f"{origin} holds no state dict (a dictionary of tensors, perhaps under 'model' or 'state_dict')")
    state = {name: value for name, value in state.items() if name != _COUNTER}
    while len(firsts := {name.partition(".")[0] for name in state}) == 1 and all("." in name for name in state):
        prefix = f"{firsts.pop()}."
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _find(loaded: object, origin: str) -> dict[str, Tensor] | None:
    """Return the preferred dictionary of tensors, None without one."""
    if not isinstance(loaded, dict) or not loaded:
        return None
    if all(isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()):
        return loaded
    for key in _KEYS:
        if (inner := _find(loaded.get(key), origin)) is not None:
            return inner
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
