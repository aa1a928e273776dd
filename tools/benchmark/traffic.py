"""Bytes that a computation moves through a GPU's memory, counted on the meta device from what it launches.

An operator reads every element of its inputs and writes every element of its outputs once: of an expanded tensor the elements
in memory, of a table in which it looks up at most as many as it returns. Views move nothing. What an operator does beyond that
(a second pass over its input, scratch memory) is left out, so the count of PyTorch's operators is a lower bound. The traffic of
scaled_dot_product_attention, too, is that of its inputs and outputs.

The operators of vitrel's Triton kernels run their own Python code, with kernels recorded instead of launched: a launch reads
and writes the tensors it is given once, in the parts that ACCESSES lists. This assumes a cache: elements that several
programs of a launch load (keys and values, for every tile of queries; the bias table) come from memory the first time only.
Tests compare ACCESSES with the addresses that the kernels load and store in Triton's interpreter.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitrel import geometry

_VIEWS = ("detach", "alias", "_unsafe_view")  # besides those that are declared as views
_OVERWRITES = ("copy_", "fill_", "zero_")  # operators in place that do not read what they overwrite
_LOOKUPS = ("index", "index_select", "gather", "embedding")
_SCATTERS = {  # operators that touch as many elements as this argument has
    "index_add_": "source",
    "scatter_add_": "src",
    "index_put_": "values",
    "_index_put_impl_": "values",
}
_ALIGNED = 8  # elements to which the memory-efficient kernel needs the strides of a bias aligned


class Launch(NamedTuple):
    """An operator or kernel that was launched, and the bytes that it reads and writes."""

    name: str
    read: int
    written: int


class Traffic(TorchDispatchMode):
    """Dispatch mode that records the operators launched, views apart, and the bytes that each reads and writes.

    Operators that compute a constant (vitrel.geometry) are left out, since a constant is computed once and then cached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    @property
    def read(self) -> int:
        """Bytes read by all launches."""
        return sum(launch.read for launch in self.launches)

    @property
    def written(self) -> int:
        """Bytes written by all launches."""
        return sum(launch.written for launch in self.launches)

    def __torch_dispatch__(
        self, operator: torch._ops.OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operator.namespace == "vitrel" and (kernels := _kernel_operators().get(operator)):
            with self, _recorded(self.launches):
                return kernels(*args, **kwargs)
        out = operator(*args, **kwargs)
        name = operator.name().partition("::")[2].partition(".")[0]
        allocates = "empty" in name  # and neither reads nor writes
        if not (operator.is_view or name in _VIEWS or allocates or _computes_constant()):
            self.launches.append(Launch(name, *_moved(operator, name, args, kwargs, out)))
        return out


class MemoryEfficient(TorchFunctionMode):
    """Mode in which scaled_dot_product_attention is the memory-efficient kernel, which serves a learned bias on a GPU.

    As PyTorch does, a bias whose strides are not multiples of 8 elements is first copied to rows that are (attention.cpp,
    preprocess_mask). Its gradient is [B, H, M, N] and summed afterwards if the bias was expanded.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _memory_efficient(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _memory_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    bias = attn_mask
    if bias is not None:
        if any(stride % _ALIGNED for stride in bias.stride()[:-1]) or bias.stride(-1) != 1:
            n = bias.shape[-1]
            bias = F.pad(bias, (0, _ALIGNED - n % _ALIGNED))[..., :n]
        bias = bias.expand(*q.shape[:-1], k.shape[-2])
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, grad, dropout_p, is_causal, scale=scale)[0]


def _moved(operator: torch._ops.OpOverload, name: str, args: tuple, kwargs: dict[str, Any], out: Any) -> tuple[int, int]:
    """Bytes that an operator reads and writes."""
    arguments = operator._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    changed = [x for a in arguments if a.alias_info is not None and a.alias_info.is_write for x in _tensors(given.get(a.name))]
    inputs = {} if name.startswith("new_") or name.endswith("_like") else {id(x): x for x in _tensors(given)}
    read, written = {key: _in_memory(x) for key, x in inputs.items()}, {id(x): _in_memory(x) for x in _tensors(out)}
    written |= {id(x): _in_memory(x) for x in changed}
    first = args[0] if args else None
    if name in _LOOKUPS and isinstance(first, Tensor):
        read[id(first)] = min(read[id(first)], out.numel() * out.element_size())
    for x in changed:
        if name in _SCATTERS:
            added = given[_SCATTERS[name]]
            read[id(x)] = written[id(x)] = min(written[id(x)], added.numel() * added.element_size())
        elif name in _OVERWRITES:
            read.pop(id(x), None)
    return sum(read.values()), sum(written.values())


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _in_memory(x: Tensor) -> int:
    """Bytes of the elements of x; an element that an expanded axis repeats counts once."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


def _computes_constant() -> bool:
    """True if a function decorated with vitrel.geometry.cached_geometry is being computed."""
    codes = {maker.__code__ for maker in geometry._makers.values()}
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Access(NamedTuple):
    """What a launch of a kernel does to the tensors among its arguments; those that are not named are read.

    Keys are names of arguments; of an argument that is a tuple, all its tensors, or the tensor of this number ("stats.1").
    Values are the fractions of the elements touched. A tensor in both dicts is added to. What a launch has written itself it
    does not read from memory.
    """

    written: dict[str, float]
    read: dict[str, float] = {}  # noqa: RUF012


_WITHOUT_OUT = {"inputs.3": 0.0}
ACCESSES = {  # module in vitrel.ops.backends and kernel
    "triton_window._forward": Access({"OUT": 1, "LSE": 1}),
    "triton_window._whole": Access({"DQKV": 1, "TABLE": 1, "DANGLES": 1}),
    "triton_window._tiles": Access({"DQKV": 1, "DELTA": 1, "DQ": 1, "TABLE": 1, "DANGLES": 1}),
    "triton_global._forward": Access({"out": 1, "lse": 1}),
    "triton_global._queries": Access({"grads": 1, "stats.1": 1}),
    "triton_global._keys": Access({"grads": 1}, _WITHOUT_OUT),
    "triton_global._table": Access({"parts": 1}, {"parts": 1} | _WITHOUT_OUT),
}


class Touched(NamedTuple):
    """A tensor among the arguments of a kernel, and the fractions of its elements that a launch reads and writes."""

    name: str
    tensor: Tensor
    read: float
    written: float


def touched(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> list[Touched]:
    """Return what a launch of a Triton kernel reads and writes, by ACCESSES; KeyError for a kernel that is not listed there."""
    name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.__name__}"
    if name not in ACCESSES:
        raise KeyError(f"tools.benchmark.traffic.ACCESSES does not say what {name} writes")
    access, found = ACCESSES[name], []
    for argument, value in (dict(zip(kernel.arg_names, args, strict=False)) | kwargs).items():
        for place, tensor in _places(argument, value):
            written = access.written.get(place, access.written.get(argument, 0.0))
            read = access.read.get(place, access.read.get(argument, 0.0 if written else 1.0))
            found.append(Touched(place, tensor, read, written))
    return found


def _places(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an argument; a tensor with its strides, (x, int, ..), is one place."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple):
        if value and isinstance(value[0], Tensor) and all(isinstance(x, int) for x in value[1:]):
            yield name, value[0]
            return
        for number, part in enumerate(value):
            yield from _places(f"{name}.{number}", part)


@contextlib.contextmanager
def _recorded(launches: list[Launch]) -> Iterator[None]:
    """Context in which Triton kernels are not launched but recorded, with tiles as on a GPU of sm_90."""
    from triton.runtime import driver
    from triton.runtime.jit import KernelInterface

    from tools.benchmark.kernels import Driver

    def record(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        found = touched(kernel, args, kwargs)
        read = sum(round(_in_memory(x.tensor) * x.read) for x in found)
        written = sum(round(_in_memory(x.tensor) * x.written) for x in found)
        launches.append(Launch(kernel.__name__, read, written))

    def item(kernel: Any, grid: tuple) -> Callable[..., None]:
        return lambda *args, **kwargs: record(kernel, args, kwargs)

    with mock.patch.object(KernelInterface, "__getitem__", item), mock.patch.object(driver, "_active", Driver(90)):
        yield


@functools.cache
def _kernel_operators() -> dict[Any, Callable[..., Any]]:
    """The operators of the Triton kernels and their Python code."""
    from vitrel.ops.backends import triton_ops

    operators = (triton_ops.window_op, triton_ops.window_backward_op, triton_ops.biased_op, triton_ops.biased_backward_op)
    return {operator._opoverload: operator._init_fn for operator in operators}
