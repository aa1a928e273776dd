"""What changes about position at another image size: the bias or rotation at an offset, the values that a token is given.

Offsets: a table that was resampled, coordinates that are normalised by the window, or angles that are scaled to the grid give
two tokens at the same distance another bias than in training, although no error says so (`own_bias_changes`,
`timm_bias_changes`).

Tokens: the image is on the meta device and has no values, so that what has values in forward comes from parameters, buffers and
the size alone. Where it meets the image it is recorded: weights, biases, positions (`independent_values`). The records of two
sizes are compared on the rows and columns that both grids have, counted from the first or from the middle (`token_changes`). An
encoding that depends on the place keeps its values by one of these two counts; one that is normalised by the grid by neither.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import resize_rel_pos_bias_table, to_2tuple
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from vitrel.grid import Grid
from vitrel.inspect.any_model import MOST_PREFIX, blank_image, float32, interpolates, patch_grid, shared_offsets
from vitrel.position import PositionEncoding
from vitrel.position.terms import Terms, parts_of
from vitrel.sizes import Size

_TABLES = ("relative_position_bias_table", "relative_coords_table", "rel_coords_log")  # what biases are made of
_FILLED = {name for kind in ("zeros", "ones", "full", "empty") for name in (f"{kind}_like", f"new_{kind}")}
_ROUNDING = 1e-4  # of the largest value
_ONE_DEVICE = (F.scaled_dot_product_attention, torch._VF.lstm, torch._VF.gru)  # which ask for it before they compute
_CPU = torch.device("cpu")
_Reading = tuple[Tensor, Tensor]  # of an axis: the indices of one and the same places at two sizes


class BiasChange(NamedTuple):
    """The layers in which position adds something else at an offset than at the trained size."""

    what: str  # "bias" | "rotation"
    layers: int
    largest: float  # of a bias: change over its standard deviation at the trained offsets; of a rotation: radians


class PositionChange(NamedTuple):
    """Values given to one and the same token, or pair of tokens, that differ from those at the trained size."""

    name: str  # of the module that makes them, of a parameter or buffer they come from, or of the module they are used in
    largest: float  # change
    of: float  # largest value at the trained size


@torch.no_grad()
def own_bias_changes(encodings: Iterable[tuple[PositionEncoding, Grid]]) -> tuple[BiasChange, ...]:
    """Changes in our encodings, each on the grid given with it (see `trace`), against the grid of its parameters."""
    return _summed(
        change
        for encoding, grid in encodings
        for part in parts_of(encoding)
        if part.grid is not None and part.grid[:2] != grid[:2]
        for change in _terms_changes(part(part.grid), part(grid), part.grid, grid)
    )


@torch.no_grad()
def timm_bias_changes(before: nn.Module, after: nn.Module, old: Size, new: Size, tables: bool) -> tuple[BiasChange, ...]:
    """Changes in timm's modules: `before` at its own size, `after` the same at another; their patch grids (h, w).

    tables False: those of `after` are not made from those of `before`; what timm would make of them on loading is compared.
    """
    found = []
    for name, module in before.named_modules():
        if isinstance(module, PositionEncoding):
            continue
        other = after.get_submodule(name)
        for pair in (_from_coordinates(module, other), _from_table(module, other, tables)):
            if pair is not None:
                found.append(BiasChange("bias", 1, _relative_change(*pair)))
        if hasattr(module, "get_embed") and old != new:
            angles = [_neighbours(_rotation(m, grid).chunk(2, -1), grid) for m, grid in ((module, old), (other, new))]
            found.append(BiasChange("rotation", 1, _angle_change(*angles)))
    return _summed(found)


def names_compared(model: nn.Module, old: Size, new: Size) -> set[str]:
    """Names of the parameters and buffers whose effect `timm_bias_changes` compares on these patch grids (h, w)."""
    found: set[str] = set()
    for name, module in model.named_modules():
        leaves = [leaf for leaf in _TABLES if isinstance(getattr(module, leaf, None), Tensor)]
        if hasattr(module, "get_embed") and old != new:
            leaves += [leaf for leaf, _ in (*module.named_parameters(), *module.named_buffers())]
        found.update(f"{name}.{leaf}".removeprefix(".") for leaf in leaves)
    return found


class _Source(NamedTuple):
    """Where values come from that do not come from the image."""

    name: str = ""  # of a module, a parameter or a buffer; "" for none
    stored: bool = False  # in parameters or buffers of the model, of which `trace` counts what is interpolated
    reported: bool = False  # what happens to them at another size is reported elsewhere


class IndependentValue(NamedTuple):
    """Values that do not depend on the image, recorded where they are combined with it."""

    name: str
    value: Tensor
    reported: bool  # what happens to it at another size is reported elsewhere


IndependentValues = dict[tuple[str, str, int], IndependentValue]  # by the module they are used in, their name, and the time


def independent_values(
    model: nn.Module, size: Size, reported: Set[str] = frozenset(), instead: Mapping[str, Tensor] | None = None
) -> IndependentValues:
    """All that is combined with the image in forward at `size` (h, w) pixels and does not depend on it, but masks and integers.

    reported: names of parameters and buffers whose change is reported elsewhere; so is that of what forward interpolates from
    them and of what our encodings make. instead: values to take for some parameters. `model` stays as it is, its copy shares
    its values. Raises what forward raises, and RuntimeError where values of the image are written over others.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: _on_cpu((instead or {}).get(name, value)) for name, value in named.items()}
    model = copy.deepcopy(model, {id(value): values[name] for name, value in named.items()})
    model.train()  # empties what timm's models have cached in evaluation, maybe on the meta device
    model.eval()
    recorder = _IndependentValueRecorder({values[name]: name for name in named}, reported)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: recorder.inside.append(name))
        module.register_forward_hook(lambda module, _, out, name=name: recorder.leave(name, module, out))
    image = blank_image(model, size)
    with torch.no_grad(), _OnCPU(image.new_zeros(())), recorder:
        model(image)
    return recorder.found


def token_changes(
    old: IndependentValues, new: IndependentValues, grids: list[tuple[Size, Size]]
) -> tuple[tuple[PositionChange, ...], tuple[str, ...]]:
    """Changes from one size to another, and the names of what cannot be compared. grids: see `common_grids`."""
    changes, unknown = [], [key for key in old if key not in new]
    for key, (name, value, reported) in new.items():
        if reported:
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


def common_grids(model: nn.Module, old: Size, new: Size) -> list[tuple[Size, Size]]:
    """Pairs of grids (h, w) that tokens of `model` may have at images of these two sizes (h, w): its patches, every stride."""
    found: list[tuple[Size | None, Size | None]] = [(patch_grid(model, old), patch_grid(model, new))]
    for stride in range(1, max(*old, *new) + 1):
        found.append(tuple(tuple(-(-n // stride) for n in size) for size in (old, new)))
        found.append(tuple(tuple(n // stride for n in size) for size in (old, new)))
    return [(a, b) for a, b in dict.fromkeys(found) if a is not None and b is not None and min(*a, *b) > 0]


def rows_by_offset(rows: Tensor, axis: str, grid: Grid) -> Tensor:
    """Rows [H, R, D] of a table over `axis` -> [H, 2h-1, 2w-1, D], one row or column along an axis that it does not have."""
    shape = (2 * grid.h - 1 if "h" in axis else 1, 2 * grid.w - 1 if "w" in axis else 1)
    return rows[:, : shape[0] * shape[1]].unflatten(1, shape)


def _terms_changes(a: Terms, b: Terms, old: Grid, new: Grid) -> Iterator[BiasChange]:
    for first, second in zip(a.tables, b.tables, strict=True):
        pairs = [(x, y) for x, y in zip(first[1:], second[1:], strict=True) if x is not None]
        pairs = [(x[-1], y[-1]) if isinstance(x, tuple) else (x, y) for x, y in pairs]  # gated: (weights, rows)
        pairs = [(x[..., None], y[..., None]) if x.dim() == 2 else (x, y) for x, y in pairs]  # biases: [H, R]
        rows = ((rows_by_offset(x, first.axis, old), rows_by_offset(y, first.axis, new)) for x, y in pairs)
        yield BiasChange("bias", 1, max(_relative_change(x, y) for x, y in rows))
    if a.rotary is not None:
        angles = [
            _neighbours([part[..., grid.prefix :, :] for part in terms.rotary[::-1]], grid[:2])
            for terms, grid in ((a, old), (b, new))
        ]
        yield BiasChange("rotation", 1, _angle_change(*angles))


def _from_coordinates(module: nn.Module, other: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The bias [..., 2h-1, 2w-1, H] that an MLP makes of both sizes' coordinates, with one and the same weights."""
    if hasattr(module, "cpb_mlp") and hasattr(module, "relative_coords_table"):  # Swin V2
        return tuple(16 * module.cpb_mlp(m.relative_coords_table).sigmoid() for m in (module, other))
    if hasattr(module, "rel_coords_log"):  # timm's RelPosMlp
        return tuple(module.bias_act(module.mlp(m.rel_coords_log)) for m in (module, other))
    return None


def _from_table(module: nn.Module, other: nn.Module, made: bool) -> tuple[Tensor, Tensor] | None:
    """Both sizes' tables of bias, [2h-1, 2w-1, H] each. made: that of `other` is made from that of `module`."""
    old, new = (getattr(m, "relative_position_bias_table", None) for m in (module, other))
    if not isinstance(old, Tensor):
        return None
    windows = [to_2tuple(m.window_size) for m in (module, other)]
    if not made:
        new = resize_rel_pos_bias_table(old, windows[1], new.shape, windows[0])
    return _table_by_offset(old, windows[0]), _table_by_offset(new, windows[1])


def _table_by_offset(table: Tensor, window: Size) -> Tensor:
    """timm's table of bias as [2h-1, 2w-1, H]."""
    if table.dim() == 3:
        return table.movedim(0, -1)
    h, w = window
    return table[: (2 * h - 1) * (2 * w - 1)].unflatten(0, (2 * h - 1, 2 * w - 1))


def _rotation(rope: nn.Module, grid: Size) -> Tensor:
    """Sines and cosines [..., h*w, 2D] of timm's rotary embedding on a grid."""
    embed = rope.get_embed(shape=list(grid))
    return embed if embed.shape[-2] == grid[0] * grid[1] else rope.get_embed()  # made for one grid, it ignores the shape


def _relative_change(a: Tensor, b: Tensor) -> float:
    """Largest difference at the offsets that both [..., 2h-1, 2w-1, D] have, over the standard deviation of `a`."""
    old, new = shared_offsets(a, b)
    change = (old - new).abs().max()
    return float(change / a.std(correction=0)) if change > 0 else 0.0


def _neighbours(sin_and_cos: Sequence[Tensor], grid: Size) -> Tensor:
    """Angles between the first token and its neighbours below and to the right, [2, ..., D] of sin, cos [..., h*w, D]."""
    sin, cos = (part.unflatten(-2, grid) for part in sin_and_cos)
    first, below, right = ((..., y, x, slice(None)) for y, x in ((0, 0), (min(1, grid[0] - 1), 0), (0, min(1, grid[1] - 1))))
    return torch.stack(
        [
            torch.atan2(sin[to] * cos[first] - cos[to] * sin[first], cos[to] * cos[first] + sin[to] * sin[first])
            for to in (below, right)
        ]
    )


def _angle_change(a: Tensor, b: Tensor) -> float:
    """Largest difference of angles, in radians, 0 to pi."""
    difference = torch.remainder(a - b + torch.pi, 2 * torch.pi) - torch.pi
    return float(difference.abs().max())


def _summed(changes: Iterable[BiasChange]) -> tuple[BiasChange, ...]:
    """One line for each kind, of those that are more than rounding."""
    lines: dict[str, BiasChange] = {}
    for change in changes:
        if change.largest > 1e-4:
            known = lines.get(change.what, BiasChange(change.what, 0, 0.0))
            lines[change.what] = BiasChange(change.what, known.layers + 1, max(known.largest, change.largest))
    return tuple(lines.values())


def _change(old: Tensor, new: Tensor, grids: list[tuple[Size, Size]]) -> float | None:
    """Largest difference in one and the same row and column, counted from the first; 0 where there is none from the middle.

    None where the values cannot be placed on a grid.
    """
    first, middle = (
        min((_difference(old, new, readings) for readings in itertools.product(*axes)), default=None)
        for axes in ([[*_readings(*sides, grids, way)] for sides in zip(old.shape, new.shape, strict=True)] for way in (0, 1))
    )
    return 0.0 if middle is not None and middle <= _ROUNDING * _largest(old[old.isfinite()]) else first


def _difference(old: Tensor, new: Tensor, readings: Sequence[_Reading]) -> float:
    for axis, (first, second) in enumerate(readings):
        old, new = old.index_select(axis, first), new.index_select(axis, second)
    return _largest(torch.where(old == new, 0.0, old - new))


def _readings(n: int, m: int, grids: list[tuple[Size, Size]], middle: bool) -> Iterator[_Reading]:
    """Ways to match an axis of n values at one size and m at the other: as no places, rows or columns, or tokens of a grid."""
    if n == m:
        yield torch.arange(n), torch.arange(n)
    elif any((n, m) in zip(*pair, strict=True) for pair in grids):
        yield _line(n, m, middle)
    fits = [(n - h * w, pair) for pair in grids for (h, w), (y, x) in [pair] if n - h * w == m - y * x and (h, w) != (y, x)]
    prefix, pair = min((fit for fit in fits if 0 <= fit[0] <= MOST_PREFIX), default=(0, None))
    if pair is not None:
        lines = [_line(*sides, middle) for sides in zip(*pair, strict=True)]
        first, second = (_flat(rows, columns, w, prefix) for rows, columns, (_, w) in zip(*lines, pair, strict=True))
        yield first, second


def _line(n: int, m: int, middle: bool) -> _Reading:
    shared = torch.arange(min(n, m))
    first, second = (shared + (side - len(shared)) // 2 * middle for side in (n, m))
    return first, second


def _flat(rows: Tensor, columns: Tensor, width: int, prefix: int) -> Tensor:
    return torch.cat((torch.arange(prefix), (rows[:, None] * width + columns).flatten() + prefix))


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _on_cpu(value: Tensor) -> Tensor:
    """The values in float32 on the CPU; the very tensor where it is so already."""
    there = value.detach().to(_CPU, float32(value))
    if value.device == _CPU and there.dtype == value.dtype:
        return value
    return nn.Parameter(there, requires_grad=False) if isinstance(value, nn.Parameter) else there


class _OnCPU(TorchFunctionMode):
    """Makes forward believe that the image is on the CPU, so that it makes its positions there, with values."""

    def __init__(self, nothing: Tensor):
        super().__init__()
        self._nothing = nothing  # of the image: zero, without dimensions

    def _without_device(self, value: Any) -> Any:
        return value + self._nothing if isinstance(value, Tensor) and not value.is_meta else value

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.device.__get__:
            return _CPU
        if func is Tensor.new_tensor:
            return torch.tensor(*args[1:], **(kwargs or {}))
        if func in _ONE_DEVICE and any(value.is_meta for value in _tensors((args, kwargs))):
            args, kwargs = tree_map(self._without_device, (args, kwargs))
        return func(*args, **(kwargs or {}))


class _IndependentValueRecorder(TorchDispatchMode):
    """Computes what does not depend on the image, and records it where it is combined with the image."""

    def __init__(self, names: Mapping[Tensor, str], reported: Set[str]):
        super().__init__()
        self.found: IndependentValues = {}
        self.inside = [""]  # names of the modules that are running
        self._sources = WeakTensorKeyDictionary()  # {values: _Source}
        self._sources.update({value: _Source(name, True, name in reported) for value, name in names.items()})
        self._times: dict[tuple[str, str], int] = {}

    def leave(self, name: str, module: nn.Module, out: Any) -> None:
        """A module has run: its outputs that do not depend on the image are named after it."""
        self.inside.pop()
        for value in _tensors(out):
            if not value.is_meta:
                source = self._sources.get(value, _Source())
                reported = source.reported or isinstance(module, PositionEncoding)
                self._sources[value] = source._replace(name=name, reported=reported)

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
            self._record(value)
        args, kwargs = tree_map(_as_meta, (args, kwargs))
        return func(*args, **kwargs)

    def _computed(self, func: Any, name: str, read: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        sources = [self._sources[value] for value in read if value in self._sources]
        stored = any(source.stored for source in sources)
        reported = any(source.reported for source in sources) or (stored and interpolates(name))
        if name == "_softmax":  # each value depends on all keys, however few there are: what it is taken of is compared
            self._record(args[0])
            reported = True
        source = _Source(next((source.name for source in sources if source.name), ""), stored, reported)
        self._sources.update({value: source for value in _tensors(out)})
        return out

    def _record(self, value: Tensor) -> None:
        if value.is_meta or isinstance(value, nn.Parameter) or not (value.is_floating_point() or value.is_complex()):
            return
        name, _, reported = self._sources.get(value, _Source())
        if not reported and _is_mask(value):
            return
        place = self.inside[-1], name
        self._times[place] = time = self._times.get(place, 0) + 1
        once = value[tuple(slice(None) if step else slice(1) for step in value.stride())]  # where an axis repeats it
        self.found[*place, time] = IndependentValue(name or self.inside[-1] or "forward", once, reported)


def _is_mask(value: Tensor) -> bool:
    """Several values, but of two kinds at most."""
    first = value[(0,) * (value.dim() - 1)] if value.dim() else value  # tells of most values that they are no mask
    return value.numel() > 1 and len(first.unique()) <= 2 and len(value.unique()) <= 2


def _as_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) and not value.is_meta else value


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
