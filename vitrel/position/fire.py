"""fire: functional interpolation for relative positions (FIRE, arXiv 2310.04418), in two dimensions:
logit[i, j] += MLP(psi(|(y_i - y_j, x_i - x_j)|) / psi(max(L n, h, w))), psi(d) = log(1 + c d), c and L learned.

The paper divides by psi of the query's position in a causal sequence; here every query sees the whole grid, so it is the
longer side of the grid, or L times that of the training grid (n) if that is more. L begins at 1, and below 1 it does not act.
So on a larger grid distances are interpolated, not extrapolated (up to the diagonal). Prefix tokens have three learned rows.
"""

from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.distance import scaled_distances
from vitrel.position.mlp import run_wide
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_prefix, upcast


class FIRE(PositionEncoding):
    """`c`, `L` [1], `mlp` Linear(1, 32), ReLU, Linear(32, H); `prefix_bias` [3, H] with a prefix."""

    refers_to_grid = True

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, hidden: int = 32, **factory: Unpack[Factory]):
        super().__init__()
        self.grid = grid
        self.c, self.L = (nn.Parameter(torch.empty(1, **factory)) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(1, hidden, **factory), nn.ReLU(), nn.Linear(hidden, num_heads, **factory))
        self.prefix_bias = nn.Parameter(torch.empty(3, num_heads, **factory)) if grid.prefix else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """c 0.1 and L 1 as in the paper's code, the network as torch initialises it."""
        nn.init.constant_(self.c, 0.1)
        nn.init.ones_(self.L)
        for layer in (self.mlp[0], self.mlp[2]):
            layer.reset_parameters()
        if self.prefix_bias is not None:
            nn.init.trunc_normal_(self.prefix_bias, std=0.02)

    def forward(self, grid: Grid) -> Terms:
        check_prefix("fire", self.grid, grid)
        c, threshold = upcast(self.c).abs(), upcast(self.L).abs() * max(self.grid.h, self.grid.w)
        distance = scaled_distances(grid, grid, "keep", "euclidean", c.device)
        one = torch.ones_like(threshold)  # tensors, for max() would branch on the size
        side = torch.maximum(threshold, torch.maximum(one * grid.h, one * grid.w))
        position = torch.log1p(c * distance) / torch.log1p(c * side)  # [R]
        rows = run_wide(self.mlp, position[:, None]).to(self.c.dtype)  # [R, H]
        rows = rows if self.prefix_bias is None else torch.cat((rows, self.prefix_bias))
        return Terms(tables=(Table("hw", bias=rows.mT),))
