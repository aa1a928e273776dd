"""transformer_xl: relative attention with a sinusoid of the offset (Transformer-XL, arXiv 1901.02860, sec. 3.3),
logit[i, j] = s [(q_i + u) . k_j + (q_i + v) . W_R r(y_i - y_j, x_i - x_j)], r = [sincos(dy), sincos(dx)], s = D^-1/2.

W_R r is a vector of dy plus a vector of dx, so it is given as one query table per axis. Attention adds the same bias v to every
query; a key table with the same row u - v for every offset turns (q + v) . k into (q + u) . k. r is defined for every offset,
so a larger grid evaluates it at larger offsets. Pairs with a prefix token have (q + u) . k alone. On a training grid of one row
or column any even width serves; where 4 does not divide it, r is the sinusoid along that axis alone.
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid
from vitrel.position.bands import band_frequencies, split_axes
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, no_autocast, pad_prefix, upcast


class TransformerXL(PositionEncoding):
    """Query-dependent bias: D^-1/2 (q + v_bias) . (w_r (sines and cosines of the offset)), 0 with prefix tokens.

    Args:
        base: of the sinusoid's frequencies base^(-t / (C/4)).
        init_std: standard deviation of the initial values.

    Attributes:
        u: learned [H, D], added to q in the content term.
        v_bias: learned [H, D], added to q in the position term.
        w_r: learned [H, D, C], C = H D: its first C/2 columns multiply the sines and cosines of dy, the others those of dx.

    Raises:
        ValueError: C is not divisible by 4 (by 2 on a training grid of one row or column).
    """

    lr_scale = 2.0  # a weight of a projection, many of which move every row: faster than that, rows jump
    positive = ("base", "init_std")

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        base: float = 10000.0,
        init_std: float = 0.02,
        **factory: Unpack[Factory],
    ):
        super().__init__()
        width = num_heads * head_dim
        self.grid, self.base, self.init_std = grid, base, init_std
        self.axes, self.bands = split_axes("transformer_xl", "width", width, grid)
        self.u = nn.Parameter(torch.empty(num_heads, head_dim, **factory))
        self.v_bias = nn.Parameter(torch.empty(num_heads, head_dim, **factory))
        self.w_r = nn.Parameter(torch.empty(num_heads, head_dim, width, **factory))
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        dtype, tables = self.w_r.dtype, []
        for axis, weight in zip(self.axes, upcast(self.w_r).split(2 * self.bands, -1), strict=True):
            r = _sinusoid(*grid[:2], axis, self.bands, float(self.base), device=weight.device).to(weight.dtype)  # [R, C/2]
            with no_autocast(r.device):
                rows = r @ weight.mT  # [H, R, D]
            tables.append(Table(axis, query=pad_prefix(rows, grid, -2).to(dtype)))
        tables[0] = tables[0]._replace(key=(self.u - self.v_bias)[:, None].expand(-1, grid.classes(self.axes[0]), -1))
        return Terms(query_bias=self.v_bias, tables=tuple(tables))


@cached_geometry
def _sinusoid(h: int, w: int, axis: str, bands: int, base: float, device: torch.device) -> Tensor:
    """Return sines, then cosines, of every offset along the axis "h" or "w" times the frequencies base^(-t / bands).

    They are [R, 2 * bands] float32, for offsets query minus key in patches.
    """
    angle = Grid(h, w).offsets(axis, device).float()[:, None] * band_frequencies(bands, base, "float32", device)
    return torch.cat((angle.sin(), angle.cos()), -1)
