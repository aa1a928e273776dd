"""Offsets clipped to a radius per axis: all farther offsets share the edge row (Shaw et al., arXiv 1803.02155).

By default the radius is half of the training axis, so that many training pairs train the edge row. With a radius larger than
the training grid some rows are never trained.
"""

import torch
from torch import Tensor

from vitrel.constants import constant
from vitrel.grid import Grid
from vitrel.position.terms import pad_prefix


def clip_radius(key: str, radius: int | tuple[int, int] | None, grid: Grid) -> tuple[int, int]:
    """Return the radius (rows, columns) in patches from `radius`: one number for both axes, a pair, or None for half of `grid`.

    Raises ValueError, naming the encoding `key`, for anything but whole numbers of 0 or more.
    """
    if radius is None:
        return grid.h // 2, grid.w // 2
    pair = tuple(radius) if isinstance(radius, tuple | list) else (radius, radius)
    if len(pair) != 2 or not all(isinstance(r, int) and r >= 0 for r in pair):
        raise ValueError(f"{key} needs a radius of 0 or more patches, one number or (rows, columns), not {radius}")
    return pair


@constant
def clipped_rows(length: int, radius: int, device: torch.device) -> Tensor:
    """Row of every offset of an axis of `length` patches in a table of 2*radius+1 rows, [2*length-1] int64."""
    return torch.arange(1 - length, length, device=device).clamp(-radius, radius) + radius


def clipped_table(table: Tensor, radius: int, axis: str, grid: Grid, mirrored: bool = False) -> Tensor:
    """Rows of `table` [(H,) 2*radius+1, D] for every offset class of `grid` along "h" or "w", [H|1, R, D]; zero for prefix
    classes.

    mirrored: read the row of the opposite offset.
    """
    index = clipped_rows(getattr(grid, axis), radius, device=table.device)
    rows = pad_prefix(table.index_select(-2, index.flip(0) if mirrored else index), grid, -2)
    return rows if rows.dim() == 3 else rows[None]
