"""clipped: a bias table whose far offsets share the edge row (iRPE's clip function, arXiv 2107.14222; Shaw, arXiv 1803.02155),
logit[i, j] += B[clip(y_i - y_j, R_h), clip(x_i - x_j, R_w)].

(2R_h+1)(2R_w+1) H parameters however large the grid, and every row is trained: at a larger grid nothing changes.
"""

from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.clip import clip_radius, clipped_rows
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_prefix


class Clipped(PositionEncoding):
    """`relative_position_bias_table` [(2R_h+1)(2R_w+1) (+3), H], offset (dy, dx) in row (dy + R_h)(2R_w+1) + dx + R_w."""

    behaviour = "nothing changes"

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        radius: int | tuple[int, int] | None = None,
        per_head: bool = True,
        init_std: float = 0.02,
        **factory: Unpack[Factory],
    ):
        """radius: R in patches, for both axes or (rows, columns); half of the training grid unless given. per_head False: one
        bias for all heads, a table of one column.
        """
        super().__init__()
        self.grid, self.radius, self.init_std = grid, clip_radius("clipped", radius, grid), init_std
        rows = (2 * self.radius[0] + 1) * (2 * self.radius[1] + 1) + (3 if grid.prefix else 0)
        self.num_heads = num_heads
        self.relative_position_bias_table = nn.Parameter(torch.empty(rows, num_heads if per_head else 1, **factory))
        self.reset_parameters()

    def forward(self, grid: Grid) -> Terms:
        check_prefix("clipped", self.grid, grid)
        table = self.relative_position_bias_table
        rows, columns = (clipped_rows(n, r, device=table.device) for n, r in zip(grid[:2], self.radius, strict=True))
        index = (rows[:, None] * (2 * self.radius[1] + 1) + columns).flatten()  # [R]
        prefix = table[(2 * self.radius[0] + 1) * (2 * self.radius[1] + 1) :]
        bias = torch.cat((table.index_select(0, index), prefix)).mT  # [H|1, R]
        return Terms(tables=(Table("hw", bias=bias.expand(self.num_heads, -1)),))
