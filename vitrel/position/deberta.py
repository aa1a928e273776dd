"""deberta: disentangled attention (DeBERTa, arXiv 2006.03654, eq. 4), per axis and summed:
logit[i, j] = (q_i . k_j + q_i . K[d(i, j)] + k_j . Q[d(j, i)]) / sqrt(3 D), d(i, j) = clip(y_i - y_j, R), likewise for x.

The third term is indexed by (j, i), the offset seen from the key. Both axes have their tables, which makes five terms in all;
the factor stays 1 / sqrt(3 D). Offsets -R..R have 2R+1 rows, where the paper has 2R and leaves out +R. The tables are
parameters themselves, where the paper projects shared embeddings. Since offsets are clipped, a larger grid reads the same rows.
Pairs with a prefix token have the content term only.
"""

from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.resample import clip_table
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, clip_radius


class DeBERTa(PositionEncoding):
    """Content-to-position and position-to-content terms of the logits between patches, by clipped offset along each axis.

    At offset d (query minus key), the query is multiplied by row clip(d) + R of `key_*` (K), and the key by row clip(-d) + R of
    `query_*` (Q). The content term and these terms are divided by sqrt(3 D).

    Args:
        radius: R in patches, one number or (rows, columns); None: half of each side of the training grid, rounded down.
        init_std: standard deviation of the initial values.

    Attributes:
        key_h: learned rows [H, 2R_h+1, D] by which queries are multiplied, along y.
        query_h: learned rows [H, 2R_h+1, D] by which keys are multiplied, along y.
        key_w: as key_h, [H, 2R_w+1, D], along x.
        query_w: as query_h, [H, 2R_w+1, D], along x.
    """

    at_larger_grid = "nothing changes"
    lr_scale = 5.0  # a logit is a sum over D channels of a row, so a channel has to move less than the row of a table

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        radius: int | tuple[int, int] | None = None,
        init_std: float = 0.02,
        **factory: Unpack[Factory],
    ):
        super().__init__()
        self.grid, self.radius, self.init_std = grid, clip_radius("deberta", radius, grid), init_std
        for name in ("key", "query"):
            for axis, r in zip("hw", self.radius, strict=True):
                table = torch.empty(num_heads, 2 * r + 1, head_dim, **factory)
                self.register_parameter(f"{name}_{axis}", nn.Parameter(table))
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        tables = []
        for axis, r in zip("hw", self.radius, strict=True):
            key = clip_table(getattr(self, f"key_{axis}"), r, axis, grid)
            query = clip_table(getattr(self, f"query_{axis}"), r, axis, grid, mirrored=True)  # indexed by (j, i)
            tables.append(Table(axis, query=key, key=query))
        return Terms(scale=3**-0.5, tables=tuple(tables))
