"""sincos: fixed 2-D sine-cosine embedding (MoCo v3, arXiv 2104.02057; MAE, arXiv 2111.06377), x_i += sincos2d(y_i, x_i).

The first half of the C channels encodes the row p = y, the second the column p = x; each half is [sin(p f_0), sin(p f_1), ...,
cos(p f_0), ...] with f_t = base^(-t / (C/4)), base 10000. MAE's code has the column first. The rows of prefix tokens are zero.
On a training grid of one row or column any even C serves; where 4 does not divide C, all channels encode that axis, with f_t =
base^(-t / (C/2)). Nothing is learned or resampled: a larger grid adds values that the model was not trained on.
"""

from typing import Unpack

import torch
from torch import Tensor

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid
from vitrel.position.bands import band_frequencies, of_axes, split_axes
from vitrel.position.terms import Factory, PositionEncoding, Terms


class SinCos(PositionEncoding):
    """Fixed embedding added to patches: sines, then cosines, of the row in the first half of the channels, then of the column.

    Args:
        base: of the frequencies f_t = base^(-t / (C/4)).

    Raises:
        ValueError: C = num_heads * head_dim is not divisible by 4 (by 2 on a training grid of one row or column).
    """

    site = "tokens"
    positive = ("base",)

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, base: float = 10000.0, **factory: Unpack[Factory]):
        super().__init__()
        self.grid, self.base = grid, base
        self.axes, self.bands = split_axes("sincos", "width", num_heads * head_dim, grid)
        self.mark_device(factory.get("device"), factory.get("dtype"))

    def terms(self, grid: Grid) -> Terms:
        options = self.axes, self.bands, float(self.base), self.precision
        return Terms(tokens=_rows(*grid, *options, device=self.device_marker.device))


@cached_geometry
def _rows(h: int, w: int, prefix: int, axes: str, bands: int, base: float, dtype: str, device: torch.device) -> Tensor:
    """Return the embedding of every token, [N, C]; 0 for prefix tokens. `axes` and `bands` are those of `split_axes`."""
    frequency = band_frequencies(bands, base, dtype, device)  # [T]
    angle = of_axes(axes, Grid(h, w).coordinates(device), 1)[..., None] * frequency  # [h*w, 1|2, T]
    rows = torch.cat((angle.sin(), angle.cos()), -1).flatten(1)  # [h*w, C]
    return torch.cat((rows.new_zeros(prefix, rows.shape[1]), rows))
