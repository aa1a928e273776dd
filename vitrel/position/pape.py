"""pape: parabolic position encoding (PaPE, arXiv 2602.01418), a sum of parabolas in projected offsets,
logit[i, j] += s sum_m [-softplus(a_m . q_i) (w_m . o)^2 + (b_m . q_i) (w_m . o)], o = (y_i - y_j, x_i - x_j), s = D^-1/2.

The first term decays with distance along a learned direction w_m, the second prefers one side; the query's content sets the
strength of both. The paper computes both coefficients from the block's input by a separate projection; an encoding has no
access to that input, so here they come from the query. A larger grid evaluates the same function at larger offsets. Pairs with
a prefix token have no term.

Per query and head the first term is a quadratic form of the offset (dy, dx), A_yy dy^2 + 2 A_yx dy dx + A_xx dx^2, and so a sum
of tables over rows, columns and diagonals, since 2 dy dx = (dy + dx)^2 - dy^2 - dx^2. Nothing is computed for all (2h-1)(2w-1)
offsets. The three tables cancel where parabolas are flat, so the error of a logit is about eps |A| |o|^2, not eps times the
logit. Measured at 64x64 for logits above -12, it is 6e-6 in float32 with initial weights, and 7e-3 with all w_m within 2 % of
one diagonal. In that case tables rounded to bfloat16 would give logits that are wrong by 100. So attention sums the tables in
float32 and rounds the sum (an error of 0.04, as of any bias), and its backend augmented_qk refuses half precision.
"""

import math
from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, no_autocast, pad_prefix, upcast


class PaPE(PositionEncoding):
    """Query-dependent bias that is a sum of M parabolas per head, each of the offset along a learned direction.

    With t = w . (dy, dx), query minus key in patches, a parabola is -softplus(a . q) t^2 + (b . q) t; the sum is multiplied by
    D^-1/2, and 0 with prefix tokens.

    Args:
        parabolas: number M of parabolas per head.

    Attributes:
        position: learned directions w [H, M, 2], per patch of y and x.
        a: learned [H, M, D], for the curvature of each parabola.
        b: learned [H, M, D], for the slope of each parabola.
    """

    lr_scale = 2.0  # the logits grow with the square of the offset: faster than that, far ones jump
    positive = ("parabolas",)

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, parabolas: int = 50, **factory: Unpack[Factory]):
        super().__init__()
        self.grid = grid
        self.position = nn.Parameter(torch.empty(num_heads, parabolas, 2, **factory))
        self.a = nn.Parameter(torch.empty(num_heads, parabolas, head_dim, **factory))
        self.b = nn.Parameter(torch.empty(num_heads, parabolas, head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as torch's linear layers, which the published code uses: uniform in +-1/sqrt(length of the last axis)."""
        for parameter in (self.position, self.a, self.b):
            reach = 1 / math.sqrt(parameter.shape[-1])
            nn.init.uniform_(parameter, -reach, reach)

    def terms(self, grid: Grid) -> Terms:
        position = upcast(self.position)
        w_y, w_x = position.unbind(-1)  # [H, M] each
        with no_autocast(position.device):
            slopes = position.mT @ upcast(self.b)  # [H, 2, D]: linear in the offset, so one small table per axis
        curvatures = {"h": w_y * (w_y - w_x), "w": w_x * (w_x - w_y), "h+w": w_y * w_x}
        tables = []
        for axis, curvature in curvatures.items():
            offsets = grid.offsets(axis, position.device)[:, None].to(position.dtype)  # [R, 1]
            query = None
            if axis != "h+w":
                query = pad_prefix(offsets * slopes[:, "hw".index(axis), None], grid, -2).to(self.b.dtype)  # [H, R, D]
            # Not rounded to half precision: where the parabolas are flat, the three tables cancel.
            rows = pad_prefix(-offsets.square() * curvature[:, None], grid, -2)  # [H, R, M]
            tables.append(Table(axis, query=query, gated=(self.a, rows)))
        return Terms(tables=tuple(tables))
