"""pape: parabolic position encoding (PaPE, arXiv 2602.01418), a sum of parabolas in projected offsets,
logit[i, j] += s sum_m [-softplus(a_m . q_i) (w_m . o)^2 + (b_m . q_i) (w_m . o)], o = (y_i - y_j, x_i - x_j), s = D^-1/2.

The first term decays with distance along a learned direction w_m, the second prefers one side; the query's content sets the
strength of both. The paper computes both coefficients from the block's input by a separate projection; an encoding has no
access to that input, so here they come from the query. A larger grid evaluates the same function at larger offsets. Pairs with
a prefix token have no term.
"""

import math
from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, no_autocast, pad_prefix, upcast


class PaPE(PositionEncoding):
    """Sum of M parabolas per head. Parameters: `position` [H, M, 2] (w, per patch of y and x), `a` and `b` [H, M, D]."""

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, parabolas: int = 50, **factory: Unpack[Factory]):
        """parabolas: number M of parabolas per head."""
        super().__init__()
        self.grid = grid
        self.position = nn.Parameter(torch.empty(num_heads, parabolas, 2, **factory))
        self.a = nn.Parameter(torch.empty(num_heads, parabolas, head_dim, **factory))
        self.b = nn.Parameter(torch.empty(num_heads, parabolas, head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as torch's linear layers, which the published code uses: uniform in +-1/sqrt(inputs)."""
        for parameter in (self.position, self.a, self.b):
            reach = 1 / math.sqrt(parameter.shape[-1])
            nn.init.uniform_(parameter, -reach, reach)

    def forward(self, grid: Grid) -> Terms:
        dtype, position = self.position.dtype, upcast(self.position)
        offsets = grid.offsets(device=position.device).to(position.dtype)  # [R, 2]
        with no_autocast(position.device):
            projected = offsets @ position.mT  # [H, R, M]
            slope = position.mT @ upcast(self.b)  # [H, 2, D]: linear in the offset, so one small table per axis
        tables = [Table("hw", gated=(self.a, pad_prefix(-projected.square(), grid, -2).to(dtype)))]
        for axis, axis_slope in zip("hw", slope.split(1, 1), strict=True):
            rows = grid.offsets(axis, axis_slope.device)[:, None] * axis_slope  # [H, R, D]
            tables.append(Table(axis, query=pad_prefix(rows, grid, -2).to(dtype)))
        return Terms(tables=tuple(tables))
