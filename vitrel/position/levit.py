"""levit: one learned bias per absolute row and column offset and head (LeViT, arXiv 2104.01136, sec. 4.2; EfficientFormer,
TinyViT), logit[i, j] += B[|y_i - y_j|, |x_i - x_j|].

h w H parameters instead of the (2h-1)(2w-1) H of `table`: a query does not tell left from right or above from below. The
parameter has LeViT's name and layout, [H, h*w]; with prefix tokens three columns follow, as BEiT's rows in `table`. On another
grid the table over signed offsets, in which every value stands up to four times, is resampled like `table`.
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid
from vitrel.position.resample import POLICIES, resample_table
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_prefix


class LeViT(PositionEncoding):
    """Learned bias per head, |row offset| and |column offset|; an axis longer than in training is resampled by `policy`.

    Args:
        init_std: standard deviation of the initial values.

    Attributes:
        attention_biases: learned biases [H, h*w (+3 with prefix tokens)] by |row offset| * w + |column offset|.
    """

    at_larger_grid = "resampled"
    policies = POLICIES
    lr_scale = 10.0  # values are logits, which have to move by tenths in some hundred updates

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, init_std: float = 0.02, **factory: Unpack[Factory]):
        super().__init__()
        self.grid, self.init_std = grid, init_std
        prefix_classes = grid.classes() - grid.offset_classes()
        self.attention_biases = nn.Parameter(torch.empty(num_heads, grid.h * grid.w + prefix_classes, **factory))
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        check_prefix("levit", self.grid, grid)
        table = signed_offsets(self.attention_biases, self.grid)
        return Terms(tables=(Table("hw", bias=resample_table(table, self.grid, grid, self.policy).mT),))

    def resampled(self, grid: Grid) -> dict[str, int]:
        if grid.h <= self.grid.h and grid.w <= self.grid.w:
            return {}
        values = self.grid.h * self.grid.w * len(self.attention_biases)
        return {f"levit {self.policy}": 0 if self.policy == "clip" else values}


def signed_offsets(biases: Tensor, grid: Grid) -> Tensor:
    """Return LeViT's biases with a row for each of the R offset classes of `grid`: [H, h*w (+3)] -> [R, H].

    Args:
        biases: as `attention_biases` of LeViT.
        grid: the grid of the biases.
    """
    return biases.index_select(1, absolute_offsets(grid.h, grid.w, bool(grid.prefix), device=biases.device)).mT


@cached_geometry
def absolute_offsets(h: int, w: int, prefix: bool, device: torch.device) -> Tensor:
    """Return the column of `attention_biases` that each offset class reads, [R] int64: |dy| * w + |dx|.

    With `prefix`, the three prefix classes follow, which read the last three columns.
    """
    dy, dx = Grid(h, w).offsets(device=device).abs().unbind(-1)
    index = dy * w + dx
    return torch.cat((index, torch.arange(3, device=device) + h * w)) if prefix else index
