"""decomposed: decomposed relative position embeddings (MViTv2, arXiv 2112.01526, eq. 4; used by ViTDet and SAM):
logit[i, j] += q_i . R_h[y_i - y_j] + q_i . R_w[x_i - x_j].

q is not multiplied by D^-1/2 here, as in the published code; a temperature (vitrel.position.log_n) does multiply both terms.
(2h-1 + 2w-1) D parameters, shared by all heads. On another grid, an axis that grows is resampled by the option `policy`,
linearly by default as in the published code; an axis that shrinks reads its exact center rows (the published code interpolates
those too). Pairs with a prefix token have no term.
"""

import math
from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.resample import resample_axis, resampled_axes
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, pad_prefix, upcast


class Decomposed(PositionEncoding):
    """Query-dependent bias per row offset and per column offset, with parameters named as in SAM; none with prefix tokens.

    The products q . row are added to the logits without the factor D^-1/2. Axes longer than in training are resampled by
    `policy`, shorter ones read their center rows.

    Args:
        init_std: standard deviation of the initial values.

    Attributes:
        rel_pos_h: learned rows [2h-1, D] by row offset, D the width of a head.
        rel_pos_w: learned rows [2w-1, D] by column offset.
    """

    at_larger_grid = "resampled"
    policies = ("linear", "clip", "geometric", "bicubic")
    lr_scale = 5.0  # a logit is a sum over D channels of a row, so a channel has to move less than the row of a table

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, init_std: float = 0.02, **factory: Unpack[Factory]):
        super().__init__()
        self.grid, self.init_std = grid, init_std
        self.rel_pos_h = nn.Parameter(torch.empty(grid.offset_classes("h"), head_dim, **factory))
        self.rel_pos_w = nn.Parameter(torch.empty(grid.offset_classes("w"), head_dim, **factory))
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        tables = []
        for axis, table in (("h", self.rel_pos_h), ("w", self.rel_pos_w)):
            rows = resample_axis(upcast(table), getattr(self.grid, axis), getattr(grid, axis), self.policy)
            # Attention multiplies query tables by D**-0.5; the factor here cancels it.
            rows = (rows * math.sqrt(rows.shape[-1])).to(table.dtype)
            tables.append(Table(axis, query=pad_prefix(rows, grid, -2)[None]))
        return Terms(tables=tuple(tables))

    def resampled(self, grid: Grid) -> dict[str, int]:
        return resampled_axes("decomposed", self.policy, self.grid, grid, self.rel_pos_h.shape[1])
