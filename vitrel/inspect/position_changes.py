"""Changes of position at another image size: of the bias or rotation at an offset, and of the values added at a token.

Offsets: resampled tables, coordinates normalized by the window, and angles scaled to the grid give two tokens at the same
distance another bias than in training, without an error (`own_bias_changes`, `timm_bias_changes`).

Tokens: forward runs with an image on the meta device, which has no values. Every tensor that does have values therefore comes
from parameters, buffers and the size alone; it is recorded where it is combined with the image (`independent_values`). The
records of two sizes are compared on the rows and columns that both grids have, counted from the first or from the middle
(`token_changes`). Absolute encodings keep their values by one of these two counts, encodings normalized by the grid by neither.
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

from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import (
    MOST_PREFIX,
    blank_image,
    coordinate_bias,
    float32,
    interpolates,
    patch_grid,
    shared_offsets,
)
from vitrel.ops.reference import rows_by_offset
from vitrel.position import PositionEncoding
from vitrel.position.terms import Terms, parts_of

_TABLES = ("relative_position_bias_table", "relative_coords_table", "rel_coords_log")  # biases, or an MLP's input
_FILLED = {name for kind in ("zeros", "ones", "full", "empty") for name in (f"{kind}_like", f"new_{kind}")}
_ROUNDING = 1e-4  # differences below this share of the largest value are rounding
_ONE_DEVICE = (
    F.scaled_dot_product_attention,
    torch._VF.lstm,
    torch._VF.gru,
)  # they check devices first
_CPU = torch.device("cpu")
_Reading = tuple[Tensor, Tensor]  # indices along an axis that stand for the same positions at two sizes


class BiasChange(NamedTuple):
    """Layers in which the bias or rotation at an offset differs from that at the trained size.

    A "bias" is any row of a table (also of query, key and value tables); a "rotation" is compared by its angles from the first
    token to the neighbors below and right.
    """

    what: str  # "bias" | "rotation"
    layers: int
    largest: float  # largest change: of a bias in units of its standard deviation, of a rotation in radians


class PositionChange(NamedTuple):
    """Values at a token, or pair of tokens, that differ from those at the trained size."""

    name: str  # of the module that computes them, the parameter or buffer they come from, or the module that uses them
    largest: float  # largest change
    of: float  # largest value at the trained size


@torch.no_grad()
def own_bias_changes(encodings: Iterable[tuple[PositionEncoding, Grid]]) -> tuple[BiasChange, ...]:
    """Changes in vitrel's encodings between their training grid and the grid paired with each (see `Trace.encodings`).

    At most one change per kind, with the number of layers and the largest change (`_summed`). What encodings add to tokens, and
    temperatures, are not compared.
    """
    return _summed(
        change
        for encoding, grid in encodings
        for part in parts_of(encoding)
        if part.grid is not None and part.grid[:2] != grid[:2]
        for change in _terms_changes(part(part.grid), part(grid), part.grid, grid)
    )


@torch.no_grad()
def timm_bias_changes(before: nn.Module, after: nn.Module, old: Size, new: Size, tables: bool) -> tuple[BiasChange, ...]:
    """Changes in timm's modules between `before` and `after`, one model at two sizes with patch grids `old` and `new` (h, w).

    tables False: `after` was built anew; the tables of `before` are compared with their resampling by timm on loading.
    """
    changes = []
    for name, module in before.named_modules():
        if isinstance(module, PositionEncoding):
            continue
        other = after.get_submodule(name)
        biases = coordinate_bias(module, module)
        pairs = [None if biases is None else (biases, coordinate_bias(module, other)), _from_table(module, other, tables)]
        changes += [BiasChange("bias", 1, _relative_change(*pair)) for pair in pairs if pair is not None]
        if hasattr(module, "get_embed") and old != new:
            angles = [_neighbors(_rotation(m, grid).chunk(2, -1), grid) for m, grid in ((module, old), (other, new))]
            changes.append(BiasChange("rotation", 1, _angle_change(*angles)))
    return _summed(changes)


def names_compared(model: nn.Module, old: Size, new: Size) -> set[str]:
    """Names of the parameters and buffers that `timm_bias_changes` covers for these patch grids (h, w)."""
    names: set[str] = set()
    for name, module in model.named_modules():
        leaves = [leaf for leaf in _TABLES if isinstance(getattr(module, leaf, None), Tensor)]
        if hasattr(module, "get_embed") and old != new:
            leaves += [leaf for leaf, _ in (*module.named_parameters(), *module.named_buffers())]
        names.update(f"{name}.{leaf}".removeprefix(".") for leaf in leaves)
    return names


class _Source(NamedTuple):
    """Origin of values that do not depend on the image."""

    name: str = ""  # of a module, a parameter or a buffer; "" for none
    stored: bool = False  # True: from parameters or buffers, whose interpolation `trace` counts
    reported: bool = False  # True: their change at another size is reported elsewhere


class IndependentValue(NamedTuple):
    """Values that do not depend on the image, recorded where they are combined with it."""

    name: str
    value: Tensor
    reported: bool  # True: its change at another size is reported elsewhere


IndependentValues = dict[tuple[str, str, int], IndependentValue]  # by module of use, name, and number of the use


def independent_values(
    model: nn.Module, size: Size, reported: Set[str] = frozenset(), instead: Mapping[str, Tensor] | None = None
) -> IndependentValues:
    """Record every tensor that forward at `size` (h, w) pixels combines with the image and that does not depend on the image.

    Left out are masks, integers, and parameters that are used as they are stored. reported: names of parameters and buffers
    whose change is reported elsewhere; what forward interpolates from them, and what vitrel's encodings return, is marked as
    reported too. instead: {name: values} to use for some parameters. `model` is not changed: a copy that shares its values is
    run. Raises what forward raises, and RuntimeError where values of the image are written into another tensor.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: _on_cpu((instead or {}).get(name, value)) for name, value in named.items()}
    model = copy.deepcopy(model, {id(value): values[name] for name, value in named.items()})
    model.train()  # clears caches that timm's models filled in evaluation mode, possibly on the meta device
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
    """Changes of values at the same token from size `old` to size `new`, and the names of values that cannot be compared.

    grids: the pairs that `common_grids` returns. Values marked `reported` and differences by rounding are left out.
    """
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
    """Pairs of grids (h, w) that tokens of `model` may have at two image sizes (h, w): its patch grid, and every stride."""
    pairs: list[tuple[Size | None, Size | None]] = [(patch_grid(model, old), patch_grid(model, new))]
    for stride in range(1, max(*old, *new) + 1):
        pairs.append(tuple(tuple(-(-n // stride) for n in size) for size in (old, new)))
        pairs.append(tuple(tuple(n // stride for n in size) for size in (old, new)))
    return [(a, b) for a, b in dict.fromkeys(pairs) if a is not None and b is not None and min(*a, *b) > 0]


def _terms_changes(a: Terms, b: Terms, old: Grid, new: Grid) -> Iterator[BiasChange]:
    for first, second in zip(a.tables, b.tables, strict=True):
        pairs = [(x, y) for x, y in zip(first[1:], second[1:], strict=True) if x is not None]
        pairs = [(x[-1], y[-1]) if isinstance(x, tuple) else (x, y) for x, y in pairs]  # gated: (weights, rows)
        pairs = [(x.unsqueeze(-1), y.unsqueeze(-1)) if x.dim() == 2 else (x, y) for x, y in pairs]  # biases: [H, R]
        rows = ((rows_by_offset(x, first.axis, old), rows_by_offset(y, first.axis, new)) for x, y in pairs)
        yield BiasChange("bias", 1, max(_relative_change(x, y) for x, y in rows))
    if a.rotary is not None:
        angles = [
            _neighbors([part[..., grid.prefix :, :] for part in terms.rotary[::-1]], grid[:2])
            for terms, grid in ((a, old), (b, new))
        ]
        yield BiasChange("rotation", 1, _angle_change(*angles))


def _from_table(module: nn.Module, other: nn.Module, resampled: bool) -> tuple[Tensor, Tensor] | None:
    """Bias tables [2h-1, 2w-1, H] of both sizes; None if `module` has none.

    resampled: the table of `other` was resampled from `module`'s. False: it has new values, so `module`'s table, resampled as
    timm does on loading, takes its place.
    """
    old, new = (getattr(m, "relative_position_bias_table", None) for m in (module, other))
    if not isinstance(old, Tensor):
        return None
    windows = [to_2tuple(m.window_size) for m in (module, other)]
    if not resampled:
        new = resize_rel_pos_bias_table(old, windows[1], new.shape, windows[0])
    return _table_by_offset(old, windows[0]), _table_by_offset(new, windows[1])


def _table_by_offset(table: Tensor, window: Size) -> Tensor:
    """timm's bias table as [2h-1, 2w-1, H]."""
    if table.dim() == 3:
        return table.movedim(0, -1)
    h, w = window
    return table[: (2 * h - 1) * (2 * w - 1)].unflatten(0, (2 * h - 1, 2 * w - 1))


def _rotation(rope: nn.Module, grid: Size) -> Tensor:
    """Sines and cosines [..., h*w, 2D] of timm's rotary embedding on a grid."""
    embed = rope.get_embed(shape=list(grid))
    return embed if embed.shape[-2] == grid[0] * grid[1] else rope.get_embed()  # a module built for one grid ignores the shape


def _relative_change(a: Tensor, b: Tensor) -> float:
    """Largest difference of two tables [..., 2h-1, 2w-1, D] at shared offsets, over the standard deviation of `a`."""
    old, new = shared_offsets(a, b)
    change = (old - new).abs().max()
    return float(change / a.std(correction=0)) if change > 0 else 0.0


def _neighbors(sin_and_cos: Sequence[Tensor], grid: Size) -> Tensor:
    """Angles [2, ..., D] from the first token to its neighbors below and right, from sines and cosines [..., h*w, D]."""
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
    """One change per kind ("bias", "rotation"): the number of changes as `layers`, and the largest of them.

    Changes of at most 1e-4 are rounding and are left out.
    """
    lines: dict[str, BiasChange] = {}
    for change in changes:
        if change.largest > 1e-4:
            total = lines.get(change.what, BiasChange(change.what, 0, 0.0))
            lines[change.what] = BiasChange(change.what, total.layers + 1, max(total.largest, change.largest))
    return tuple(lines.values())


def _change(old: Tensor, new: Tensor, grids: list[tuple[Size, Size]]) -> float | None:
    """Largest difference between values of the same row and column at two sizes; None if they cannot be placed on a grid.

    Rows and columns are counted from the first, or from the middle: 0 if the values agree, but for rounding, when counted from
    the middle, otherwise the largest difference when counted from the first.
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
    """Ways to match an axis of n values at one size with m at the other: by index, as rows or columns, as tokens of a grid.

    middle: count rows and columns from the middle of each grid, not from the first.
    """
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
    """The values in float32 on the CPU; the same tensor if nothing has to change."""
    copied = value.detach().to(_CPU, float32(value))
    if value.device == _CPU and copied.dtype == value.dtype:
        return value
    return nn.Parameter(copied, requires_grad=False) if isinstance(value, nn.Parameter) else copied


class _OnCPU(TorchFunctionMode):
    """Reports the CPU as the device of every tensor, so that forward creates its positions there, with values."""

    def __init__(self, nothing: Tensor):
        super().__init__()
        self._nothing = nothing  # a zero on the image's device, without dimensions

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
    """Computes values that do not depend on the image, and records them where they are combined with the image."""

    def __init__(self, names: Mapping[Tensor, str], reported: Set[str]):
        super().__init__()
        self.found: IndependentValues = {}
        self.inside = [""]  # names of the modules that are running
        self._sources = WeakTensorKeyDictionary()  # {values: _Source}
        self._sources.update({value: _Source(name, True, name in reported) for value, name in names.items()})
        self._times: dict[tuple[str, str], int] = {}

    def leave(self, name: str, module: nn.Module, out: Any) -> None:
        """Forward hook: name the outputs of a module that do not depend on the image after the module.

        Those of vitrel's encodings are also marked as reported.
        """
        self.inside.pop()
        for value in _tensors(out):
            if not value.is_meta:
                source = self._sources.get(value, _Source())
                reported = source.reported or isinstance(module, PositionEncoding)
                self._sources[value] = source._replace(name=name, reported=reported)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunction():  # PyTorch's code needs the real devices
            return self._run(func, func.__name__.partition(".")[0], args, dict(kwargs or {}))

    def _run(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if name in _FILLED and args[0].is_meta:  # they use only the shape of the image
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
        if name == "_softmax":  # its values depend on the number of keys, so its input is compared instead
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
        once = value[tuple(slice(None) if step else slice(1) for step in value.stride())]  # without repeated values
        self.found[*place, time] = IndependentValue(name or self.inside[-1] or "forward", once, reported)


def _is_mask(value: Tensor) -> bool:
    """True for two or more entries with at most two different values."""
    first = value[(0,) * (value.dim() - 1)] if value.dim() else value  # a quick check that rules out most tensors
    return value.numel() > 1 and len(first.unique()) <= 2 and len(value.unique()) <= 2


def _as_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) and not value.is_meta else value


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
