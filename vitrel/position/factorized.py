"""factorized: one learned bias per row offset and one per column offset (iRPE, arXiv 2107.14222, "cross" method, bias mode),
logit[i, j] += B_h[y_i - y_j] + B_w[x_i - x_j].

(2h-1 + 2w-1) H parameters instead of the (2h-1)(2w-1) H of `table`. On another grid each axis is resampled like `table`: an
axis that shrinks reads its exact center rows, an axis that grows follows the option `policy`. Pairs with a prefix token read
three more rows of `table_h`.
"""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import nn

from vitrel.grid import Grid
from vitrel.position.resample import POLICIES, resample_axis, resampled_axes
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_prefix


class Factorized(PositionEncoding):
    """Learned bias per head and row offset, plus one per column offset; only axes that grow are resampled, by `policy`.

    Args:
        init_std: standard deviation of the initial values.

    Attributes:
        table_h: learned biases [2h-1, H] by row offset, H the number of heads; 3 more rows with prefix tokens.
        table_w: learned biases [2w-1, H] by column offset.
    """

    at_larger_grid = "resampled"
    policies = POLICIES
    lr_scale = 10.0  # rows are logits, which have to move by tenths in some hundred updates

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, init_std: float = 0.02, **factory: Unpack[Factory]):
        super().__init__()
        self.grid, self.init_std = grid, init_std
        self.table_h = nn.Parameter(torch.empty(grid.classes("h"), num_heads, **factory))
        self.table_w = nn.Parameter(torch.empty(grid.offset_classes("w"), num_heads, **factory))
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        check_prefix("factorized", self.grid, grid)
        n = self.grid.offset_classes("h")
        rows = resample_axis(self.table_h[:n], self.grid.h, grid.h, self.policy)
        columns = resample_axis(self.table_w, self.grid.w, grid.w, self.policy)
        rows = torch.cat((rows, self.table_h[n:]))  # [2h'-1 (+3), H]
        columns = F.pad(columns, (0, 0, 0, len(self.table_h) - n))  # prefix rows are in table_h only
        return Terms(tables=(Table("h", bias=rows.mT), Table("w", bias=columns.mT)))

    def resampled(self, grid: Grid) -> dict[str, int]:
        return resampled_axes("factorized", self.policy, self.grid, grid, self.table_w.shape[1])
