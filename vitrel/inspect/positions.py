"""Whether tokens keep their position at another image size: all that meets the image in forward and does not come from it.

The image is on the meta device and has no values. What has values in forward then comes from parameters, buffers and the size
alone; where it meets the image it is noted: weights, biases, positions. What two sizes note is compared on the rows and columns
that both grids have, counted from the first or from the middle. An encoding that depends on the place keeps its values by one
of these two counts; one that is normalised by the grid by neither.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from vitrel.inspect.resolution_report import Pair
from vitrel.inspect.trace import MOST_PREFIX, blank_image, float32, interpolates, patch_grid
from vitrel.position import PositionEncoding

_FILLED = {name for kind in ("zeros", "ones", "full", "empty") for name in (f"{kind}_like", f"new_{kind}")}
_ROUNDING = 1e-4  # of the largest value
_ONE_DEVICE = (F.scaled_dot_product_attention, torch._VF.lstm, torch._VF.gru)  # which ask for it before they compute
_CPU = torch.device("cpu")
Reading = tuple[Tensor, Tensor]  # of an axis: the indices of one and the same places at two sizes


class PositionChange(NamedTuple):
    """Values that meet one and the same token, or pair of tokens, and are others than at the trained size."""

    name: str  # of the module that makes them, of a parameter or buffer they come from, or of the module they are used in
    largest: float  # change
    of: float  # largest value at the trained size


class Source(NamedTuple):
    """Where values come from that do not come from the image."""

    name: str = ""  # of a module, a parameter or a buffer; "" for none
    held: bool = False  # by the model, in parameters or buffers, of which `trace` counts what is interpolated
    told: bool = False  # what happens to them at another size is told elsewhere


class Constant(NamedTuple):
    """Values that do not come from the image, where they meet it."""

    name: str
    value: Tensor
    told: bool


Constants = dict[tuple[str, str, int], Constant]  # by the module they are used in, their name, and the time


def constants(
    model: nn.Module, size: Pair, told: Set[str] = frozenset(), instead: Mapping[str, Tensor] | None = None
) -> Constants:
    """What meets the image in forward at `size` (h, w) pixels and does not come from it; masks and integers are left out.

    told: names of parameters and buffers whose change is told elsewhere; so is that of what forward interpolates from them and
    of what our encodings make. instead: values to take for some parameters. `model` stays as it is, its copy shares its values.
    Raises what forward raises, and RuntimeError where values of the image are written over others.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: _on_cpu((instead or {}).get(name, value)) for name, value in named.items()}
    model = copy.deepcopy(model, {id(value): values[name] for name, value in named.items()})
    model.train()  # empties what timm's models have cached in evaluation, maybe on the meta device
    model.eval()
    watch = _Watch({values[name]: name for name in named}, told)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: watch.inside.append(name))
        module.register_forward_hook(lambda module, _, out, name=name: watch.leave(name, module, out))
    image = blank_image(model, size)
    with torch.no_grad(), _OnCPU(image.new_zeros(())), watch:
        model(image)
    return watch.found


def compare(
    old: Constants, new: Constants, grids: list[tuple[Pair, Pair]]
) -> tuple[tuple[PositionChange, ...], tuple[str, ...]]:
    """Changes from one size to another, and the names of what cannot be compared. grids: see `common_grids`."""
    changes, unknown = [], [key for key in old if key not in new]
    for key, (name, value, told) in new.items():
        if told:
            continue
        if key not in old:
            unknown.append(key)
            continue
        before = old[key].value
        if before.shape == value.shape and torch.equal(before, value):
            continue
        change = _change(before, value, grids) if before.dim() == value.dim() else None
        largest = _largest(before[before.isfinite()])
        if change is None:
            unknown.append(key)
        elif not change <= _ROUNDING * largest:
            changes.append(PositionChange(name, change, largest))
    return tuple(changes), tuple(dict.fromkeys((new.get(key) or old[key]).name for key in unknown))


def common_grids(model: nn.Module, old: Pair, new: Pair) -> list[tuple[Pair, Pair]]:
    """Pairs of grids (h, w) that tokens of `model` may have at images of these two sizes (h, w): its patches, every stride."""
    found = [(patch_grid(model, old), patch_grid(model, new))]
    for stride in range(1, max(*old, *new) + 1):
        found.append(tuple(tuple(-(-n // stride) for n in size) for size in (old, new)))
        found.append(tuple(tuple(n // stride for n in size) for size in (old, new)))
    return [grids for grids in dict.fromkeys(found) if None not in grids and min(map(min, grids)) > 0]


def _change(old: Tensor, new: Tensor, grids: list[tuple[Pair, Pair]]) -> float | None:
    """Largest difference in one and the same row and column, counted from the first; 0 where there is none from the middle.

    None where the values cannot be placed on a grid.
    """
    first, middle = (
        min((_difference(old, new, readings) for readings in itertools.product(*axes)), default=None)
        for axes in ([[*_readings(*sides, grids, way)] for sides in zip(old.shape, new.shape, strict=True)] for way in (0, 1))
    )
    return 0.0 if middle is not None and middle <= _ROUNDING * _largest(old[old.isfinite()]) else first


def _difference(old: Tensor, new: Tensor, readings: Sequence[Reading]) -> float:
    for axis, (first, second) in enumerate(readings):
        old, new = old.index_select(axis, first), new.index_select(axis, second)
    return _largest(torch.where(old == new, 0.0, old - new))


def _readings(n: int, m: int, grids: list[tuple[Pair, Pair]], middle: bool) -> Iterator[Reading]:
    """What an axis of n values at one size and m at the other may be: no place, rows or columns, or all tokens of a grid."""
    if n == m:
        yield torch.arange(n), torch.arange(n)
    elif any((n, m) in zip(*pair, strict=True) for pair in grids):
        yield _line(n, m, middle)
    fits = [(n - h * w, pair) for pair in grids for (h, w), (y, x) in [pair] if n - h * w == m - y * x and (h, w) != (y, x)]
    prefix, pair = min((fit for fit in fits if 0 <= fit[0] <= MOST_PREFIX), default=(0, None))
    if pair is not None:
        lines = [_line(*sides, middle) for sides in zip(*pair, strict=True)]
        yield tuple(_flat(rows, columns, w, prefix) for rows, columns, (_, w) in zip(*lines, pair, strict=True))


def _line(n: int, m: int, middle: bool) -> Reading:
    shared = torch.arange(min(n, m))
    return tuple(shared + (side - len(shared)) // 2 * middle for side in (n, m))


def _flat(rows: Tensor, columns: Tensor, width: int, prefix: int) -> Tensor:
    return torch.cat((torch.arange(prefix), (rows[:, None] * width + columns).flatten() + prefix))


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _on_cpu(value: Tensor) -> Tensor:
    """The very tensor where it is in float32 on the CPU."""
    there = value.detach().to(_CPU, float32(value))
    if value.device == _CPU and there.dtype == value.dtype:
        return value
    return nn.Parameter(there, requires_grad=False) if isinstance(value, nn.Parameter) else there


class _OnCPU(TorchFunctionMode):
    """Tells forward that the image is on the CPU, where it then makes its positions and keeps their values."""

    def __init__(self, nothing: Tensor):
        super().__init__()
        self._nothing = nothing  # of the image: zero, without dimensions

    def _met(self, value: Any) -> Any:
        return value + self._nothing if isinstance(value, Tensor) and not value.is_meta else value

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.device.__get__:
            return _CPU
        if func is Tensor.new_tensor:
            return torch.tensor(*args[1:], **(kwargs or {}))
        if func in _ONE_DEVICE and any(value.is_meta for value in _tensors((args, kwargs))):
            args, kwargs = tree_map(self._met, (args, kwargs))
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Computes what does not come from the image, and notes it where it meets the image."""

    def __init__(self, names: Mapping[Tensor, str], told: Set[str]):
        super().__init__()
        self.found: Constants = {}
        self.inside = [""]  # names of the modules that are running
        self._sources = WeakTensorKeyDictionary()  # {values: Source}
        self._sources.update({value: Source(name, True, name in told) for value, name in names.items()})
        self._times: dict[tuple[str, str], int] = {}

    def leave(self, name: str, module: nn.Module, out: Any) -> None:
        """A module has run: what it gives without having seen the image bears its name."""
        self.inside.pop()
        for value in _tensors(out):
            if not value.is_meta:
                source = self._sources.get(value, Source())
                told = source.told or isinstance(module, PositionEncoding)
                self._sources[value] = source._replace(name=name, told=told)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunction():  # torch's own code is to see the devices as they are
            return self._run(func, func.__name__.partition(".")[0], args, dict(kwargs or {}))

    def _run(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if name in _FILLED and args[0].is_meta:  # of the image they take the shape alone
            args = torch.empty((), dtype=args[0].dtype).expand(args[0].shape), *args[1:]
        read = _tensors((args, kwargs))
        image = any(value.is_meta for value in read)
        if kwargs.get("device"):
            kwargs["device"] = torch.device("meta") if image else _CPU
        if not image:
            return self._computed(func, name, read, args, kwargs)
        if func._schema.is_mutable and not args[0].is_meta:
            raise RuntimeError(f"values of the image are written over others by {name}")
        for value in read:
            self._note(value)
        args, kwargs = tree_map(_without_values, (args, kwargs))
        return func(*args, **kwargs)

    def _computed(self, func: Any, name: str, read: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        sources = [self._sources[value] for value in read if value in self._sources]
        held = any(source.held for source in sources)
        told = any(source.told for source in sources) or (held and interpolates(name))
        if name == "_softmax":  # each value depends on all keys, however few there are: what it is taken of is compared
            self._note(args[0])
            told = True
        source = Source(next((source.name for source in sources if source.name), ""), held, told)
        self._sources.update({value: source for value in _tensors(out)})
        return out

    def _note(self, value: Tensor) -> None:
        if value.is_meta or isinstance(value, nn.Parameter) or not (value.is_floating_point() or value.is_complex()):
            return
        name, _, told = self._sources.get(value, Source())
        if not told and _is_mask(value):
            return
        place = self.inside[-1], name
        self._times[place] = time = self._times.get(place, 0) + 1
        once = value[tuple(slice(None) if step else slice(1) for step in value.stride())]  # where an axis repeats it
        self.found[*place, time] = Constant(name or self.inside[-1] or "forward", once, told)


def _is_mask(value: Tensor) -> bool:
    """Several values, but of two kinds at most."""
    first = value[(0,) * (value.dim() - 1)] if value.dim() else value  # tells of most values that they are no mask
    return value.numel() > 1 and len(first.unique()) <= 2 and len(value.unique()) <= 2


def _without_values(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) and not value.is_meta else value


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
