"""fire: functional interpolation for relative positions (FIRE, arXiv 2310.04418), in two dimensions:
logit[i, j] += MLP(psi(|(y_i - y_j, x_i - x_j)|) / psi(max(L n, h, w))), psi(d) = log(1 + c d), c and L learned.

n is the longer side of the training grid, h x w the current grid. The paper divides by psi of the query's position in a causal
sequence; here every query sees the whole grid, so the divisor is psi of the longer side. L begins at 1; below 1 it has no
effect on the training grid or a larger one. Because of the division a larger grid is interpolated, not extrapolated: the
MLP's input keeps its range. Pairs with a prefix token read three learned rows.
"""

from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.distance import scaled_distances
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_prefix, run_upcast, upcast


class FIRE(PositionEncoding):
    """Bias that an MLP computes from psi(distance of query and key) / psi(longer side of the grid), psi(d) = log(1 + |c| d).

    Distance (Euclidean) and side are in patches.

    Args:
        hidden: width of the MLP.

    Attributes:
        c: learned [1], in psi.
        L: learned [1]: |L| times the longer training side replaces the longer side of a grid that is smaller than that.
        mlp: Linear(1, hidden), ReLU, Linear(hidden, H).
        prefix_bias: learned biases [3, H] of the prefix classes, if there are prefix tokens.
    """

    lr_scale = 2.0  # an MLP, many of whose weights move every row: faster than that, rows jump
    positive = ("hidden",)

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, hidden: int = 32, **factory: Unpack[Factory]):
        super().__init__()
        self.grid = grid
        self.c, self.L = (nn.Parameter(torch.empty(1, **factory)) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(1, hidden, **factory), nn.ReLU(), nn.Linear(hidden, num_heads, **factory))
        self.prefix_bias = nn.Parameter(torch.empty(3, num_heads, **factory)) if grid.prefix else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize c to 0.1 and L to 1 as in the paper's code, the MLP as torch does, and the prefix bias near 0."""
        nn.init.constant_(self.c, 0.1)
        nn.init.ones_(self.L)
        for layer in (self.mlp[0], self.mlp[2]):
            layer.reset_parameters()
        if self.prefix_bias is not None:
            nn.init.trunc_normal_(self.prefix_bias, std=0.02)

    @property
    def refers_to_grid(self) -> bool:
        return True  # L counts in sides of the training grid

    def terms(self, grid: Grid) -> Terms:
        check_prefix("fire", self.grid, grid)
        c, least = upcast(self.c).abs(), upcast(self.L).abs() * max(self.grid.h, self.grid.w)
        distance = scaled_distances(grid, grid, "keep", "euclidean", c.device)
        one = torch.ones_like(least)  # tensors, since max() of integers would branch on the size
        side = torch.maximum(least, torch.maximum(one * grid.h, one * grid.w))
        position = torch.log1p(c * distance) / torch.log1p(c * side)  # [R]
        rows = run_upcast(self.mlp, position[:, None]).to(self.c.dtype)  # [R, H]
        rows = rows if self.prefix_bias is None else torch.cat((rows, self.prefix_bias))
        return Terms(tables=(Table("hw", bias=rows.mT),))
