"""table: one learned bias per offset and head (Swin, arXiv 2103.14030, eq. 4; BEiT), logit[i, j] += B[y_i - y_j, x_i - x_j].

The parameter has Swin's name and layout, [(2h-1)(2w-1), H]; with prefix tokens BEiT's three rows follow. On another grid, an
axis that shrinks reads the exact centre of the table, and an axis that grows is resampled by the policy `resize`. In a windowed
model the grid is the window; while the window stays the same, the table is read unchanged at any image size.
"""

from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.resize import POLICIES, resize_table
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_prefix


class OffsetTable(PositionEncoding):
    """Bias table over all offsets, `relative_position_bias_table` [R, H], for the R offset classes of the training grid."""

    behaviour = "resized"
    policies = POLICIES

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, init_std: float = 0.02, **factory: Unpack[Factory]):
        super().__init__()
        self.grid, self.init_std = grid, init_std
        table = torch.empty(grid.classes(), num_heads, **factory)
        self.relative_position_bias_table = nn.Parameter(table)
        self.reset_parameters()

    def forward(self, grid: Grid) -> Terms:
        check_prefix("table", self.grid, grid)
        table = resize_table(self.relative_position_bias_table, self.grid, grid, self.resize)
        return Terms(tables=(Table("hw", bias=table.mT),))

    def resized(self, grid: Grid) -> dict[str, int]:
        if grid.h <= self.grid.h and grid.w <= self.grid.w:
            return {}
        heads = self.relative_position_bias_table.shape[1]
        return {f"table {self.resize}": 0 if self.resize == "clip" else self.grid.offset_classes() * heads}
