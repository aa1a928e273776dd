"""pape: parabolic position encoding (PaPE, arXiv 2602.01418), a sum of parabolas in projected offsets,
logit[i, j] += s sum_m [-softplus(a_m . q_i) (w_m . D)^2 + (b_m . q_i) (w_m . D)], D = (y_i - y_j, x_i - x_j).

The first term decays with distance, the second leans to one side; both depend on the query's content. The paper computes their
coefficients from the block's input by a projection of their own; an encoding does not see that, so here they come from the
query, which is another projection of it. Evaluated at any offset. Prefix pairs have no term.
"""

import math
from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, no_autocast, pad_prefix, upcast


class PaPE(PositionEncoding):
    """`position` [H, M, 2] (w, per patch of y and x), `a` and `b` [H, M, D]."""

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, parabolas: int = 50, **factory: Unpack[Factory]):
        """parabolas: M of each head."""
        super().__init__()
        self.grid = grid
        self.position = nn.Parameter(torch.empty(num_heads, parabolas, 2, **factory))
        self.a = nn.Parameter(torch.empty(num_heads, parabolas, head_dim, **factory))
        self.b = nn.Parameter(torch.empty(num_heads, parabolas, head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's linear layers, which the published code uses: uniform in +-1/sqrt(inputs)."""
        for parameter in (self.position, self.a, self.b):
            reach = 1 / math.sqrt(parameter.shape[-1])
            nn.init.uniform_(parameter, -reach, reach)

    def forward(self, grid: Grid) -> Terms:
        kind, position = self.position.dtype, upcast(self.position)
        offsets = grid.offsets(device=position.device).to(position.dtype)  # [R, 2]
        with no_autocast(position.device):
            along = offsets @ position.mT  # [H, R, M]
            slope = position.mT @ upcast(self.b)  # [H, 2, D]: b . q is linear in the offset, so its axes have small tables
        tables = [Table("hw", gated=(self.a, pad_prefix(-along.square(), grid, -2).to(kind)))]
        for axis, lean in zip("hw", slope.split(1, 1), strict=True):
            rows = grid.offsets(axis, lean.device)[:, None] * lean  # [H, R, D]
            tables.append(Table(axis, query=pad_prefix(rows, grid, -2).to(kind)))
        return Terms(tables=tuple(tables))
