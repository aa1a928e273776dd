"""clipped: a bias table whose far offsets share the edge row (iRPE's clip function, arXiv 2107.14222; Shaw, arXiv 1803.02155),
logit[i, j] += B[clip(y_i - y_j, R_h), clip(x_i - x_j, R_w)].

It has (2R_h+1)(2R_w+1) H parameters on any grid. A larger grid reads the same rows, all of them trained if the radius lies
within the training grid. Pairs with a prefix token read three more learned rows.
"""

from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.resample import resample_table
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_prefix, clip_radius


class Clipped(PositionEncoding):
    """Learned bias per head and offset, where all offsets beyond a radius share the bias at the radius.

    Args:
        radius: in patches, one number or (R_h, R_w) of rows and columns; None: half of each training side, rounded down.
        per_head: False for one bias for all heads, a table of one column.
        init_std: standard deviation of the initial values.

    Attributes:
        relative_position_bias_table: learned biases [(2R_h+1)(2R_w+1) (+3), H]. Offset (dy, dx) reads row (dy + R_h)(2R_w+1) +
            dx + R_w; the 3 last rows exist if there are prefix tokens.
    """

    at_larger_grid = "nothing changes"
    lr_scale = 10.0  # rows are logits, which have to move by tenths in some hundred updates

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
        super().__init__()
        self.grid, self.radius, self.init_std = grid, clip_radius("clipped", radius, grid), init_std
        self.reach = Grid(self.radius[0] + 1, self.radius[1] + 1, grid.prefix)  # a grid with exactly the offsets of the table
        self.num_heads = num_heads
        table = torch.empty(self.reach.classes(), num_heads if per_head else 1, **factory)
        self.relative_position_bias_table = nn.Parameter(table)
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        check_prefix("clipped", self.grid, grid)
        rows = resample_table(self.relative_position_bias_table, self.reach, grid, "clip")  # [R, H|1]
        return Terms(tables=(Table("hw", bias=rows.mT.expand(self.num_heads, -1)),))
