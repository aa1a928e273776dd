"""Offsets clipped to a radius per axis, for the encodings whose far offsets share one row (Shaw et al., arXiv 1803.02155).

By default the radius is half of the training axis: then the edge row, which stands for everything far, is trained by many
pairs. A radius beyond the training grid leaves rows that no training pair addresses.
"""

import torch
from torch import Tensor

from vitrel.constants import constant
from vitrel.grid import Grid
from vitrel.position.terms import pad_prefix


def clip_radius(key: str, radius: int | tuple[int, int] | None, grid: Grid) -> tuple[int, int]:
    """(rows, columns) in patches: `radius` for one or both axes, or half of the training grid. ValueError if negative."""
    if radius is None:
        return grid.h // 2, grid.w // 2
    pair = tuple(radius) if isinstance(radius, tuple | list) else (radius, radius)
    if len(pair) != 2 or not all(isinstance(r, int) and r >= 0 for r in pair):
        raise ValueError(f"{key} needs a radius of 0 or more patches, one or (rows, columns), not {radius}")
    return pair


@constant
def clipped_rows(length: int, radius: int, device: torch.device) -> Tensor:
    """Row of a table of 2*radius+1 for every offset of an axis of `length` patches, [2*length-1]."""
    return torch.arange(1 - length, length, device=device).clamp(-radius, radius) + radius


def clipped_table(table: Tensor, radius: int, axis: str, grid: Grid, mirrored: bool = False) -> Tensor:
    """Rows of `table` [(H,) 2*radius+1, D] for every offset class of `grid` along "h" or "w", [H|1, R, D]; prefix rows zero.

    mirrored: the row of the opposite offset instead.
    """
    index = clipped_rows(getattr(grid, axis), radius, device=table.device)
    rows = pad_prefix(table.index_select(-2, index.flip(0) if mirrored else index), grid, -2)
    return rows if rows.dim() == 3 else rows[None]
