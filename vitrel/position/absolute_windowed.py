"""absolute_windowed: an embedding that is stretched over the grid plus one that repeats in every window (Hiera with "absolute
win", arXiv 2311.05613, eq. 3; SAM 2), x_i += P[y_i, x_i] + W[y_i mod m, x_i mod m'].

P has one row per window of m x m' patches of the training grid; antialiased bicubic interpolation brings it to every grid, the
training grid too. W is read unchanged at every grid, so the tokens of a window are told apart by trained values, where
interpolating one embedding for all would blur the pattern of windows that it learned. Windows are counted from the first row
and column; the last ones may be cut. Prefix tokens have rows of their own, which come first in P.
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid
from vitrel.position.resample import resample_embedding
from vitrel.position.terms import Factory, PositionEncoding, Terms, check_pair, check_prefix, upcast


class AbsoluteWindowed(PositionEncoding):
    """Learned embedding, interpolated from one row per window to all patches, plus one that repeats in every window.

    Both are added to patches; a prefix token gets its row of `pos_embed`.

    Args:
        period: sides (m, m') of the windows in patches, one number for both.
        init_std: standard deviation of the initial values.

    Attributes:
        pos_embed: learned rows [1, P + ceil(h/m)*ceil(w/m'), C] of P prefix tokens, then all windows, C = num_heads * head_dim.
        pos_embed_win: learned rows [1, m*m', C] of the patches of a window.

    Raises:
        ValueError: `period` is anything but one or two positive whole numbers.
    """

    site = "tokens"
    keeps_range = True
    at_larger_grid = "resampled"
    policies = ("bicubic",)

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        period: int | tuple[int, int] = 8,
        init_std: float = 0.02,
        **factory: Unpack[Factory],
    ):
        super().__init__()
        self.grid, self.init_std = grid, init_std
        self.period = m, n = check_pair("absolute_windowed", "period", period)
        self.coarse = -(-grid.h // m), -(-grid.w // n)  # windows of the training grid
        width = num_heads * head_dim
        self.pos_embed = nn.Parameter(torch.empty(1, grid.prefix + self.coarse[0] * self.coarse[1], width, **factory))
        self.pos_embed_win = nn.Parameter(torch.empty(1, m * n, width, **factory))
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        check_prefix("absolute_windowed", self.grid, grid, row_each=True)
        rows = upcast(self.pos_embed[0])  # [P + windows, C]
        whole = resample_embedding(rows[grid.prefix :].unflatten(0, self.coarse), grid)  # [h*w, C]
        place = _place_in_window(grid.h, grid.w, self.period, device=rows.device)
        tokens = whole + upcast(self.pos_embed_win[0]).index_select(0, place)
        return Terms(tokens=torch.cat((rows[: grid.prefix], tokens)).to(self.pos_embed.dtype))

    def resampled(self, grid: Grid) -> dict[str, int]:
        if grid[:2] == self.grid[:2]:  # type: ignore[index]
            return {}
        return {"absolute_windowed bicubic": self.pos_embed[:, self.grid.prefix :].numel()}  # type: ignore[union-attr]


@cached_geometry
def _place_in_window(h: int, w: int, period: tuple[int, int], device: torch.device) -> Tensor:
    """Return the row of `pos_embed_win` that every patch reads, (y mod m) m' + x mod m', (m, m') the period: [h*w] int64."""
    y, x = Grid(h, w).coordinates(device).unbind(-1)
    return (y % period[0]) * period[1] + x % period[1]
