"""table: one learned bias per offset and head (Swin, arXiv 2103.14030, eq. 4; BEiT), logit[i, j] += B[y_i - y_j, x_i - x_j].

The parameter keeps Swin's name and layout, [(2h-1)(2w-1), H], with BEiT's three more rows when there are prefix tokens.
At another grid: an axis that shrinks reads the exact centre of the table; an axis that grows follows the policy `resize`. A
windowed model keeps its window, so for it nothing changes at any image size.
"""

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.resize import POLICIES, check_policy, resize_table, unseen_share
from vitrel.position.terms import PositionEncoding, Table, Terms


class OffsetTable(PositionEncoding):
    """`relative_position_bias_table` [R, H], trained on `grid`, drawn with standard deviation `init_std`."""

    policies = POLICIES

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        resize: str = POLICIES[0],
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.grid, self.resize, self.init_std = grid, check_policy(resize), init_std
        table = torch.empty(grid.classes(), num_heads, device=device, dtype=dtype)
        self.relative_position_bias_table = nn.Parameter(table)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.relative_position_bias_table, std=self.init_std)

    def forward(self, grid: Grid) -> Terms:
        if bool(grid.prefix) != bool(self.grid.prefix):
            raise ValueError(f"table was built for {self.grid.prefix} prefix tokens, the grid has {grid.prefix}")
        table, n = self.relative_position_bias_table, self.grid.offset_classes()
        if torch.compiler.is_compiling() or grid[:2] != self.grid[:2]:
            table = torch.cat((resize_table(table[:n], self.grid, grid, self.resize), table[n:]))
        return Terms(tables=(Table("hw", bias=table.mT),))

    def resized(self, grid: Grid) -> dict[str, int]:
        if grid.h <= self.grid.h and grid.w <= self.grid.w:
            return {}
        heads = self.relative_position_bias_table.shape[1]
        return {f"table {self.resize}": 0 if self.resize == "clip" else self.grid.offset_classes() * heads}

    def unseen(self, grid: Grid) -> float:
        return unseen_share(self.grid, grid)
