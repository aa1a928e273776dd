"""Constants: tensors that are determined by integers and a device, made once and shared by all layers and models.

The layout of windows, the offset class of every pair, the taps by which a table is resampled, the terms of encodings without
parameters: `@constant` marks the function that computes one. What depends on a learned value is never kept here.

In eager mode constants are kept up to `limit` bytes in all; beyond that the least recently used are dropped. A graph of
torch.compile for one size reads its constants from here, where they stay until `clear`; a graph for any size makes each once
through one operator, vitrel::constant. Exported programs, ONNX graphs, fake tensors and function transforms compute it with
PyTorch's own operators.
"""

import ast
import functools
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.utils._python_dispatch import _disable_current_modes

limit = 256 * 2**20  # bytes
F = TypeVar("F", bound=Callable[..., Any])

_makers: dict[str, Callable[..., Any]] = {}
_kept: OrderedDict[tuple, tuple[Tensor, ...]] = OrderedDict()
_lock = threading.RLock()
_TELLS_EXPORT = torch.__version__ >= (2, 14)


class _Graphs:
    """Holds as attributes the constants that compiled graphs read."""


_graphs = _Graphs()
_attributes: dict[tuple, str] = {}
_numbers = itertools.count()  # of attributes: none is ever used again, since a graph may still read it


def constant(function: F) -> F:
    """Decorator of a function(*key, device) -> Tensor, or a NamedTuple of tensors, that depends on nothing else.

    key: integers, tuples of integers, strings, floats and booleans. The function must run with symbolic integers: without a
    branch on one. Its results are shared, so nobody may change them in place.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    kind = function.__annotations__["return"]
    _makers[name] = function

    @functools.wraps(function)
    def kept(*key: Any, device: torch.device | str | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling() and not is_exporting():
            if is_known(*_integers(key)):
                names = _graph_attributes(name, device, *key)
                found = tuple([getattr(_graphs, attribute) for attribute in names.split(" ")])
            else:
                found = tuple(_operator(name, *_flat(key), torch.device("cpu" if device is None else device)))
        elif is_exporting() or is_traced(device):
            return function(*key, device=device)
        else:
            found = _lookup(name, key, device)
        return found[0] if kind is Tensor else kind(*found)

    return cast(F, kept)


def held() -> int:
    """Bytes of all constants that are kept, those that compiled graphs read included."""
    with _lock:
        tensors = [t for value in _kept.values() for t in value] + list(vars(_graphs).values())
        return sum({t.data_ptr(): _bytes(t) for t in tensors}.values())


def clear() -> None:
    """Drop all constants; they are made again when they are needed, and compiled graphs that read them compile again."""
    with _lock:
        _kept.clear()
        _attributes.clear()
        vars(_graphs).clear()


def is_exporting() -> bool:
    """torch.compiler.is_exporting(), also before torch 2.14, where torch.compile takes it for true (pytorch issue 176347)."""
    return torch.compiler.is_exporting() if _TELLS_EXPORT else torch.compiler._is_exporting_flag


def is_known(*sizes: int) -> bool:
    """Whether a branch on these sizes costs nothing: they are plain numbers, not symbols of a graph that serves any."""
    if torch.compiler.is_dynamo_compiling():
        return all([has_static_value(size) for size in sizes])
    return all([not isinstance(size, torch.SymInt) or has_static_value(size) for size in sizes])


def is_traced(device: torch.device | str | None) -> bool:
    """Whether tensors made now, outside torch.compile, are recorded, transformed or without values: none of them is kept."""
    modes = torch._C._TorchDispatchModeKey
    return (
        torch.jit.is_tracing()
        or _device(device).type == "meta"
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any([torch._C._get_dispatch_mode(mode) is not None for mode in (modes.FAKE, modes.PROXY, modes.FUNCTIONAL)])
    )


def _lookup(name: str, key: tuple, device: torch.device | str | None) -> tuple[Tensor, ...]:
    device = _device(device)
    place = (name, key, device)
    with _lock:
        if (found := _kept.get(place)) is not None:
            _kept.move_to_end(place)
            return found
    found = _made(name, key, device)
    with _lock:
        found = _kept.setdefault(place, found)
        _kept.move_to_end(place)
        while len(_kept) > 1 and sum(_bytes(t) for value in _kept.values() for t in value) > limit:
            _kept.popitem(last=False)
    return found


def _made(name: str, key: tuple, device: torch.device) -> tuple[Tensor, ...]:
    """Computed on the CPU and copied: a hundred small operators there, one copy to an accelerator."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}{key} is not there yet while a CUDA graph is captured: run the model once with images of this size before"
        )
    # The first caller may be in any of these states; the constant serves all.
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        value = _makers[name](*key, device=torch.device("cpu"))
        return tuple(t.to(device) for t in ((value,) if isinstance(value, Tensor) else value))


def _device(device: torch.device | str | None) -> torch.device:
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _integers(key: tuple) -> list[int]:
    parts = [part if isinstance(part, tuple) else (part,) for part in key]
    return [n for part in parts for n in part if isinstance(n, int) and not isinstance(n, bool)]


@torch._dynamo.assume_constant_result
def _graph_attributes(name: str, device: torch.device | str | None, *key: Any) -> str:
    """The attributes of `_graphs` that hold a constant, joined by spaces: torch.compile takes a string as it is."""
    device = _device(device)
    with _lock:
        place = (name, key, device)
        names = _attributes.get(place)
        if names is None:
            found = _lookup(name, key, device)
            names = " ".join(f"constant{next(_numbers)}" for _ in found)
            vars(_graphs).update(zip(names.split(" "), found, strict=True))
            _attributes[place] = names
        return names


def _flat(key: tuple) -> tuple[str, list[int], list[float]]:
    """A key as an operator's schema can hold it: how it is built, and its numbers."""
    how: list[str] = []
    integers: list[int] = []
    floats: list[float] = []
    for part in key:
        if isinstance(part, tuple):
            how.append("t" + str(len(part)))
            integers.extend(part)
        elif isinstance(part, str | bool):
            how.append("=" + repr(part))
        elif isinstance(part, float):
            how.append("f")
            floats.append(part)
        else:
            how.append("i")
            integers.append(part)
    return "|".join(how), integers, floats


def _key(how: str, integers: Sequence[int], floats: Sequence[float]) -> tuple:
    whole, real, key = iter(integers), iter(floats), []
    for part in how.split("|"):
        if part[0] == "=":
            key.append(ast.literal_eval(part[1:]))
        elif part[0] == "t":
            key.append(tuple(next(whole) for _ in range(int(part[1:]))))
        else:
            key.append(next(real if part == "f" else whole))
    return tuple(key)


@torch.library.custom_op("vitrel::constant", mutates_args=())
def _operator(name: str, how: str, integers: Sequence[int], floats: Sequence[float], device: torch.device) -> list[Tensor]:
    # Copies: a compiled graph may write into what an operator returned once nothing reads it any more.
    return [t.clone() for t in _lookup(name, _key(how, integers, floats), device)]


@_operator.register_fake
def _(name: str, how: str, integers: Sequence[int], floats: Sequence[float], device: torch.device) -> list[Tensor]:
    value = _makers[name](*_key(how, integers, floats), device=device)
    return [value] if isinstance(value, Tensor) else list(value)


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_in_child)
