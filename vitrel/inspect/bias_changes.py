"""Changes at another image size of what attention adds at one offset: the bias, or the angle of the rotation.

Resampled tables, coordinates normalized by the window and angles scaled to the grid give two tokens at the same distance
another bias than in training, without an error. vitrel's encodings are compared by their terms (`own_bias_changes`), timm's
modules by their tables, MLPs and rotary embeddings (`timm_bias_changes`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import coordinate_bias, shared_offsets
from vitrel.ops.reference import rows_by_offset
from vitrel.position import PositionEncoding
from vitrel.position.terms import Terms, parts_of

_ROUNDING = 1e-4  # changes of at most this are rounding


class BiasChange(NamedTuple):
    """Layers in which the bias or rotation at an offset differs from that at the trained size.

    A "bias" is any row of a table (also of query, key and value tables); a "rotation" is compared by its angles from the first
    token to the neighbors below and right.
    """

    what: str  # "bias" | "rotation"
    layers: int
    largest: float  # largest change: of a bias in units of its standard deviation, of a rotation in radians


@torch.no_grad()
def own_bias_changes(encodings: Iterable[tuple[PositionEncoding, Grid]]) -> tuple[BiasChange, ...]:
    """Changes in vitrel's encodings between their training grid and the grid paired with each (see `Trace.encodings`).

    At most one change per kind, with the number of layers and the largest change. What encodings add to tokens, and
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
def timm_bias_changes(before: nn.Module, after: nn.Module, old: Size, new: Size) -> tuple[BiasChange, ...]:
    """Changes in timm's modules from `before` to `after`, one model at two sizes with patch grids `old` and `new` (h, w)."""
    changes = []
    for name, module in before.named_modules():
        if isinstance(module, PositionEncoding):
            continue
        other = after.get_submodule(name)
        for pair in ((coordinate_bias(module, module), coordinate_bias(module, other)), (_table(module), _table(other))):
            if pair[0] is not None:
                changes.append(BiasChange("bias", 1, _relative_change(*pair)))
        if hasattr(module, "get_embed") and old != new:
            angles = [_neighbors(_rotation(m, grid).chunk(2, -1), grid) for m, grid in ((module, old), (other, new))]
            changes.append(BiasChange("rotation", 1, _angle_change(*angles)))
    return _summed(changes)


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


def _table(module: nn.Module) -> Tensor | None:
    """The bias table [2h-1, 2w-1, H] of a module of timm; None if it has none."""
    table = getattr(module, "relative_position_bias_table", None)
    if not isinstance(table, Tensor):
        return None
    if table.dim() == 3:
        return table.movedim(0, -1)
    h, w = to_2tuple(module.window_size)
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
    """One change per kind ("bias", "rotation"): the number of changes as `layers`, and the largest of them."""
    lines: dict[str, BiasChange] = {}
    for change in changes:
        if change.largest > _ROUNDING:
            total = lines.get(change.what, BiasChange(change.what, 0, 0.0))
            lines[change.what] = BiasChange(change.what, total.layers + 1, max(total.largest, change.largest))
    return tuple(lines.values())
