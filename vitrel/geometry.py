"""Cached geometry: tensors that depend on integers and a device only, computed once and shared by all layers and models.

Examples are the layout of windows, the offset class of every pair, the taps by which a table is resampled, and the terms of
encodings without parameters. `@cached_geometry` decorates the function that computes one. Tensors that depend on a learned
value are never stored here.

In eager mode they are cached, up to `limit` bytes in all; the least recently used are dropped first. A torch.compile graph
for one size reads them from here, where they stay until `clear`; a graph for any size computes each once through an
operator, vitrel::cached_geometry. Exported programs, ONNX graphs, fake tensors and function transforms compute them with
PyTorch's operators; an exported program computes each once for all layers.
"""

import functools
import itertools
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, get_origin

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.utils._python_dispatch import _disable_current_modes

limit = 256 * 2**20  # maximum bytes of the cache
F = TypeVar("F", bound=Callable[..., Any])

_makers: dict[str, Callable[..., Any]] = {}
_kinds: dict[str, tuple[type, ...]] = {}  # of the parts of their keys
_cache: OrderedDict[tuple, tuple[Tensor, ...]] = OrderedDict()
_cached_bytes = 0
_captured: dict[int, tuple[Tensor, ...]] = {}  # by id, what captured CUDA graphs read by its address: never dropped
_lock = threading.RLock()
_DISTINGUISHES_EXPORT = torch.__version__ >= (2, 14)


class _Graphs:
    """Holds, as its attributes, the cached tensors that compiled graphs read."""


_graphs = _Graphs()
_attributes: dict[tuple, str] = {}
_numbers = itertools.count()  # of attributes, never reused, since a graph may still read an old one


def cached_geometry(function: F) -> F:
    """Decorate a function (*key, device) -> Tensor or a NamedTuple of tensors so that its results are cached.

    It is then called as (*key, device=...), the key by position; device None or left out is torch's default device.

    The results are shared: callers must not change them in place.

    Args:
        function: depends on its key and the device alone. A key is integers, tuples of integers, strings without blanks, floats
            and booleans, each annotated with its type. It must also run with symbolic integers, so it may not branch on them.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    types = dict(function.__annotations__)
    result_type, _ = types.pop("return"), types.pop("device")
    kinds = tuple(get_origin(kind) or kind for kind in types.values())  # tuple[int, int]: tuple
    _makers[name], _kinds[name] = function, kinds

    @functools.wraps(function)
    def cached(*key: Any, device: torch.device | str | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling() and not is_exporting():
            if all([has_static_value(n) for n in _integers(key)]):
                names = _graph_attributes(name, device, *[_plain(part) for part in key])
                tensors = tuple([getattr(_graphs, attribute) for attribute in names.split(" ")])
            else:
                tensors = tuple(_operator(name, *_flat(kinds, key), torch.device("cpu" if device is None else device)))
        elif is_exporting() or _is_recorded():
            return _traced(function, kinds, key, device)
        else:
            tensors = _lookup(name, key, device)
        return tensors[0] if result_type is Tensor else result_type(*tensors)

    return cast(F, cached)


def clear() -> None:
    """Drop all cached geometry, to free memory: it is computed again when needed, and graphs compiled with it compile again.

    Tensors that torch.cuda.graph has captured stay until the process ends.
    """
    global _cached_bytes
    with _lock:
        _cache.clear()
        _cached_bytes = 0
        _attributes.clear()
        vars(_graphs).clear()


def is_exporting() -> bool:
    """Return whether torch.export is tracing; torch.compiler.is_exporting() tells it only from torch 2.14 on (issue 176347)."""
    return torch.compiler.is_exporting() if _DISTINGUISHES_EXPORT else torch.compiler._is_exporting_flag  # noqa: SLF001


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, for example "float32", for a key of cached geometry; getattr(torch, name) is the dtype."""
    return str(dtype).removeprefix("torch.")


def is_known(*sizes: int) -> bool:
    """Return whether these sizes are plain numbers, on which code may branch; in a graph for any size they are symbols."""
    if torch.compiler.is_dynamo_compiling():
        return all([has_static_value(size) for size in sizes])
    return all([not isinstance(size, torch.SymInt) or has_static_value(size) for size in sizes])


def is_traced(device: torch.device | str | None) -> bool:
    """Return whether tensors created now on `device` have no values (meta device) or are recorded, as `_is_recorded` tells."""
    return _device(device).type == "meta" or _is_recorded()


def _is_recorded() -> bool:
    """Return whether a tracer, function transform or fake mode, other than torch.compile, holds the tensors created now.

    Such tensors must not be cached.
    """
    modes = torch._C._TorchDispatchModeKey
    return (
        torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any([torch._C._get_dispatch_mode(mode) is not None for mode in (modes.FAKE, modes.PROXY, modes.FUNCTIONAL)])
    )


def _lookup(name: str, key: tuple, device: torch.device | str | None) -> tuple[Tensor, ...]:
    """Return the cached tensors of a function (by name) and key; compute and cache them if they are not.

    Others, the least recently used first, are then dropped until all have at most `limit` bytes; what a captured CUDA graph
    reads stays in memory.
    Raises RuntimeError if they would be computed while a CUDA graph is captured.
    """
    global _cached_bytes
    device = _device(device)
    entry = (name, key, device)
    with _lock:
        if (tensors := _cache.get(entry)) is not None:
            _cache.move_to_end(entry)
            if _is_capturing(device):
                _captured[id(tensors)] = tensors
            return tensors
    if _is_capturing(device):
        raise RuntimeError(
            f"{name}{key} cannot be computed while a CUDA graph is captured: run the model once with images of this size first"
        )
    tensors = _computed(name, key, device)
    with _lock:
        if entry in _cache:  # another thread was faster
            return _cache[entry]
        _cache[entry] = tensors
        _cached_bytes += sum(map(_bytes, tensors))
        while len(_cache) > 1 and _cached_bytes > limit:
            _cached_bytes -= sum(map(_bytes, _cache.popitem(last=False)[1]))
    return tensors


def _traced(function: Callable[..., Any], kinds: Sequence[type], key: tuple, device: torch.device | str | None) -> Any:
    """Return function(*key, device=device) in a trace, which records its operators.

    An export, unless strict, records them once per key: its tracing mode keeps results. `kinds` are the types of key parts.
    """
    mode = None
    if is_exporting() and not torch.compiler.is_dynamo_compiling():  # which export(strict=True) is
        mode = get_proxy_mode()
    if mode is None:
        return function(*key, device=device)
    results = vars(mode).setdefault("vitrel_constants", {})  # the mode ends with its trace
    words, integers, floats = _flat(kinds, key)
    sizes = [n.node.expr if isinstance(n, torch.SymInt) else n for n in integers]
    entry = (function, words, *sizes, *floats, device)
    if entry not in results:
        results[entry] = function(*key, device=device)
    return results[entry]


def _computed(name: str, key: tuple, device: torch.device) -> tuple[Tensor, ...]:
    """Compute the function `name` on the CPU and copy its tensors to the device: one copy instead of a hundred small kernels.

    On the meta device they have no values and are computed there.
    """
    # The first caller may be in any of these modes, but all callers share the result.
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        value = _makers[name](*key, device=device if device.type == "meta" else torch.device("cpu"))
        return tuple(t.to(device) for t in ((value,) if isinstance(value, Tensor) else value))


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _device(device: torch.device | str | None) -> torch.device:
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _bytes(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else tensor.numel() * tensor.element_size()


def _integers(key: tuple) -> list[int]:
    alone = [part for part in key if isinstance(part, int) and not isinstance(part, bool)]
    return alone + [n for part in key if isinstance(part, tuple) for n in part]


def _plain(part: Any) -> Any:
    """Return a part of a key in which symbols of torch.compile that can have one value only are plain numbers.

    Such symbols are a side of a window cut from any grid, and under dynamic=True every number that a module holds.
    """
    if isinstance(part, tuple):
        return tuple([operator.index(n) for n in part])
    if isinstance(part, float):
        return part.__float__()  # float(part) stays a symbol
    return operator.index(part) if isinstance(part, int) and not isinstance(part, bool) else part


@torch._dynamo.assume_constant_result
def _graph_attributes(name: str, device: torch.device | str | None, *key: Any) -> str:
    """Return the names of the attributes of `_graphs` that hold a result, joined by spaces: torch.compile handles strings.

    The first call for a key computes the result of the function `name` and sets them. They are constants in the compiled graph.
    """
    device = _device(device)
    with _lock:
        entry = (name, key, device)
        names = _attributes.get(entry)
        if names is None:
            tensors = _lookup(name, key, device)
            for tensor in tensors:
                torch._dynamo.mark_static_address(tensor)  # otherwise every replay of a CUDA graph begins with a copy of it
            names = " ".join(f"constant{next(_numbers)}" for _ in tensors)
            vars(_graphs).update(zip(names.split(" "), tensors, strict=True))
            _attributes[entry] = names
        return names


def _flat(kinds: Sequence[type], key: tuple) -> tuple[str, list[int], list[float]]:
    """Split a key into the types of an operator's schema: its strings, joined by blanks, its integers and its floats.

    A boolean is the integer 0 or 1, a tuple its length and its integers.

    Args:
        kinds: types of the parts of the key: str, float, bool, tuple or int.
        key: the parts.
    """
    words: list[str] = []
    integers: list[int] = []
    floats: list[float] = []
    for kind, part in zip(kinds, key, strict=True):
        if kind is str:
            words.append(part)
        elif kind is float:
            floats.append(float(part))
        elif kind is tuple:
            integers.append(len(part))
            integers.extend(part)
        else:
            integers.append(int(part) if kind is bool else part)
    return " ".join(words), integers, floats


def _key(kinds: Sequence[type], words: str, integers: Sequence[int], floats: Sequence[float]) -> tuple:
    """Return the key that `_flat` has split."""
    word, whole, real, key = iter(words.split(" ")), iter(integers), iter(floats), []
    for kind in kinds:
        if kind is str:
            key.append(next(word))
        elif kind is float:
            key.append(next(real))
        elif kind is tuple:
            key.append(tuple([next(whole) for _ in range(next(whole))]))
        else:
            key.append(bool(next(whole)) if kind is bool else next(whole))
    return tuple(key)


# What this operator computes for the first time, it keeps, which memory of a CUDA graph would not allow: the next replay writes
# there. The tag makes torch.compile(mode="reduce-overhead") run the operator between graphs.
@torch.library.custom_op("vitrel::cached_geometry", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def _operator(name: str, words: str, integers: Sequence[int], floats: Sequence[float], device: torch.device) -> list[Tensor]:
    # Copies, since a compiled graph may reuse the memory of an operator's outputs.
    return [t.clone() for t in _lookup(name, _key(_kinds[name], words, integers, floats), device)]


@_operator.register_fake
def _(name: str, words: str, integers: Sequence[int], floats: Sequence[float], device: torch.device) -> list[Tensor]:
    value = _makers[name](*_key(_kinds[name], words, integers, floats), device=device)
    return [value] if isinstance(value, Tensor) else list(value)


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()  # a thread of the parent may have held the old lock


os.register_at_fork(after_in_child=_in_child)
