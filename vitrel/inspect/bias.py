"""Whether position in attention means the same at a new image size: the relative bias or rotation at one and the same offset.

A table that was resampled, coordinates that are normalised by the window, or angles that are scaled to the grid give two
tokens at the same distance another bias than in training, although no error says so.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from timm.layers import resize_rel_pos_bias_table, to_2tuple
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.inspect.foreign import middle
from vitrel.inspect.resolution_report import Pair
from vitrel.position.terms import Composition, PositionEncoding, Terms

_TABLES = ("relative_position_bias_table", "relative_coords_table", "rel_coords_log")  # what biases are made of


class BiasChange(NamedTuple):
    """The layers in which what position adds at an offset is another than at the trained size."""

    what: str  # "bias" | "rotation"
    layers: int
    largest: float  # of a bias: change over its standard deviation at the trained offsets; of a rotation: radians


@torch.no_grad()
def own_changes(encodings: Iterable[tuple[PositionEncoding, Grid]]) -> tuple[BiasChange, ...]:
    """For our encodings, each on the grid it is asked on (see `trace`), against the grid of its parameters."""
    parts = (
        (part, grid)
        for encoding, grid in encodings
        for part in (encoding.parts.values() if isinstance(encoding, Composition) else (encoding,))
    )
    return _summed(
        change
        for part, grid in parts
        if part.grid is not None and part.grid[:2] != grid[:2]
        for change in _terms_changes(part(part.grid), part(grid), part.grid, grid)
    )


@torch.no_grad()
def foreign_changes(before: nn.Module, after: nn.Module, old: Pair, new: Pair, tables: bool) -> tuple[BiasChange, ...]:
    """For timm's modules: `before` at its own size, `after` the same at another; their patch grids (h, w).

    tables False: those of `after` are not made from those of `before`; what timm would make of them on loading is compared.
    """
    found = []
    for name, module in before.named_modules():
        if isinstance(module, PositionEncoding):
            continue
        twin = after.get_submodule(name)
        for lattice in (_from_coordinates(module, twin), _from_table(module, twin, tables)):
            if lattice is not None:
                found.append(BiasChange("bias", 1, _largest(*lattice)))
        if hasattr(module, "get_embed") and old != new:
            angles = [_neighbours(*_rotation(m, grid).chunk(2, -1), grid) for m, grid in ((module, old), (twin, new))]
            found.append(BiasChange("rotation", 1, _turn(*angles)))
    return _summed(found)


def names_compared(model: nn.Module, old: Pair, new: Pair) -> set[str]:
    """Names of the parameters and buffers whose effect `foreign_changes` compares on these patch grids (h, w)."""
    found = set()
    for name, module in model.named_modules():
        leaves = [leaf for leaf in _TABLES if isinstance(getattr(module, leaf, None), Tensor)]
        if hasattr(module, "get_embed") and old != new:
            leaves += [leaf for leaf, _ in (*module.named_parameters(), *module.named_buffers())]
        found.update(f"{name}.{leaf}".removeprefix(".") for leaf in leaves)
    return found


def _terms_changes(a: Terms, b: Terms, old: Grid, new: Grid) -> Iterator[BiasChange]:
    for first, second in zip(a.tables, b.tables, strict=True):
        pairs = [(x, y) for x, y in zip(first[1:], second[1:], strict=True) if x is not None]
        pairs = [(x[-1], y[-1]) if isinstance(x, tuple) else (x, y) for x, y in pairs]  # gated: (weights, rows)
        yield BiasChange("bias", 1, max(_largest(_rows(x, first.axis, old), _rows(y, first.axis, new)) for x, y in pairs))
    if a.rotary is not None:
        angles = [
            _neighbours(*(part[..., grid.prefix :, :] for part in terms.rotary[::-1]), grid[:2])
            for terms, grid in ((a, old), (b, new))
        ]
        yield BiasChange("rotation", 1, _turn(*angles))


def _rows(rows: Tensor, axis: str, grid: Grid) -> Tensor:
    """Rows of a table, [H, R] or [H, R, D] -> [2h-1, 2w-1, values], with one row or column for an axis it does not have."""
    shape = (2 * grid.h - 1 if "h" in axis else 1, 2 * grid.w - 1 if "w" in axis else 1)
    return rows[:, : shape[0] * shape[1]].movedim(0, -1).reshape(*shape, -1)


def _from_coordinates(module: nn.Module, twin: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The bias [..., 2h-1, 2w-1, H] that an MLP makes of both sizes' coordinates, with one and the same weights."""
    if hasattr(module, "cpb_mlp") and hasattr(module, "relative_coords_table"):  # Swin V2
        return tuple(16 * module.cpb_mlp(m.relative_coords_table).sigmoid() for m in (module, twin))
    if hasattr(module, "rel_coords_log"):  # timm's RelPosMlp
        return tuple(module.bias_act(module.mlp(m.rel_coords_log)) for m in (module, twin))
    return None


def _from_table(module: nn.Module, twin: nn.Module, made: bool) -> tuple[Tensor, Tensor] | None:
    """Both sizes' tables of bias, [2h-1, 2w-1, H] each."""
    old, new = (getattr(m, "relative_position_bias_table", None) for m in (module, twin))
    if not isinstance(old, Tensor):
        return None
    windows = [to_2tuple(m.window_size) for m in (module, twin)]
    if not made:
        new = resize_rel_pos_bias_table(old, windows[1], new.shape, windows[0])
    return tuple(_lattice(table, window) for table, window in zip((old, new), windows, strict=True))


def _lattice(table: Tensor, window: Pair) -> Tensor:
    if table.dim() == 3:
        return table.movedim(0, -1)
    h, w = window
    return table[: (2 * h - 1) * (2 * w - 1)].unflatten(0, (2 * h - 1, 2 * w - 1))


def _rotation(rope: nn.Module, grid: Pair) -> Tensor:
    """Sines and cosines [..., h*w, 2D] of timm's rotary embedding on a grid."""
    embed = rope.get_embed(shape=list(grid))
    return embed if embed.shape[-2] == grid[0] * grid[1] else rope.get_embed()  # made for one grid, it ignores the shape


def _largest(a: Tensor, b: Tensor) -> float:
    """Largest difference at the offsets both have, over the standard deviation of `a`."""
    shared = [min(n, m) for n, m in zip(a.shape[-3:-1], b.shape[-3:-1], strict=True)]
    change = (middle(a, shared) - middle(b, shared)).abs().max()
    return float(change / a.std(correction=0)) if change > 0 else 0.0


def _neighbours(sin: Tensor, cos: Tensor, grid: Pair) -> Tensor:
    """Angles between the first token and its neighbours below and to the right, [2, ..., D] of [..., h*w, D]."""
    sin, cos = (part.unflatten(-2, grid) for part in (sin, cos))
    first, below, right = ((..., y, x, slice(None)) for y, x in ((0, 0), (min(1, grid[0] - 1), 0), (0, min(1, grid[1] - 1))))
    return torch.stack(
        [
            torch.atan2(sin[to] * cos[first] - cos[to] * sin[first], cos[to] * cos[first] + sin[to] * sin[first])
            for to in (below, right)
        ]
    )


def _turn(a: Tensor, b: Tensor) -> float:
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
