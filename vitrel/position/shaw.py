"""shaw: relative position representations (Shaw et al., arXiv 1803.02155, eq. 3 and 4), per axis and summed:
logit[i, j] = s q_i . (k_j + a^K[clip(y_i - y_j)] + a^K'[clip(x_i - x_j)]), out_i += sum_j p_ij (a^V[..] + a^V'[..]).

s = D^-1/2, p the attention weights. a^K, a^V (rows) and a^K', a^V' (columns) have 4 (2R+1) D parameters, shared by all heads as
in the paper. Offsets are clipped to the radius R, so a larger grid reads the same rows (`clip_table` of
vitrel.position.resample). For example, on a training grid of 7x28 patches R is (3, 14) by default, and on any grid offsets of 3
and more rows share a vector, as do those of 14 and more columns. Pairs with a prefix token (class or register token) have no
vectors. The value vectors need the attention weights, which PyTorch's scaled_dot_product_attention does not return;
`values=False` leaves them out.
"""

from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.resample import clip_table
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, clip_radius


class Shaw(PositionEncoding):
    """Learned vectors for every clipped offset along each axis, which are added to keys and to values.

    The vector of an offset, query minus key, is row clip(offset) + R of a table [2R+1, D], or [H, 2R+1, D] with per_head. Pairs
    with a prefix token have none.

    Args:
        radius: R in patches, one number or (rows, columns); None: half of each side of the training grid, rounded down.
        per_head: separate vectors for each head.
        values: also add vectors to values; False: to keys alone, without value_h and value_w.
        init_std: standard deviation of the initial values.

    Attributes:
        key_h: vectors a^K added to keys, by row offset, 2R_h+1 rows.
        key_w: vectors a^K' added to keys, by column offset, 2R_w+1 rows.
        value_h: vectors a^V added to values, by row offset, 2R_h+1 rows.
        value_w: vectors a^V' added to values, by column offset, 2R_w+1 rows.
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
        per_head: bool = False,
        values: bool = True,
        init_std: float = 0.02,
        **factory: Unpack[Factory],
    ):
        super().__init__()
        self.grid, self.radius, self.values, self.init_std = grid, clip_radius("shaw", radius, grid), values, init_std
        heads = (num_heads,) if per_head else ()
        for name in ("key", "value") if values else ("key",):
            for axis, r in zip("hw", self.radius, strict=True):
                table = torch.empty(*heads, 2 * r + 1, head_dim, **factory)
                self.register_parameter(f"{name}_{axis}", nn.Parameter(table))
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        tables = []
        for axis, r in zip("hw", self.radius, strict=True):
            key = clip_table(getattr(self, f"key_{axis}"), r, axis, grid)
            value = clip_table(getattr(self, f"value_{axis}"), r, axis, grid) if self.values else None
            tables.append(Table(axis, query=key, value=value))
        return Terms(tables=tuple(tables))
