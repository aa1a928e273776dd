"""fourier: waves of the relative place on the grid, mapped to the width of the tokens (XCiT, arXiv 2106.09681, sec. 3.4, and
its code; EdgeNeXt), x_i += W [waves(2 pi (y_i + 1) / h), waves(2 pi (x_i + 1) / w)] + b.

waves(a) = [sin(a f_0), cos(a f_0), sin(a f_1), cos(a f_1), ...] with f_t = base^(-2t / bands), `bands` numbers per axis. The
angles run up to 2 pi on every grid, so positions scale with the image: a larger grid samples the same range more finely, and
nothing is resampled. Prefix tokens get no embedding.
"""

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.geometry import cached_geometry, dtype_name
from vitrel.grid import Grid
from vitrel.position.terms import Factory, PositionEncoding, Terms, first_of, run_upcast, upcast


class Fourier(PositionEncoding):
    """Learned linear function of sines and cosines of the row / height and column / width, which is added to the patches.

    Args:
        bands: sines and cosines per axis, an even number in all.
        base: of the frequencies base^(-2t / bands); the angles run up to 2 pi on every grid.

    Attributes:
        token_projection: Linear(2 * bands, C), C = num_heads * head_dim.

    Raises:
        ValueError: `bands` is odd or less than 2.
    """

    site = "tokens"
    keeps_range = True
    positive = ("base",)

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        bands: int = 32,
        base: float = 10000.0,
        **factory: Unpack[Factory],
    ):
        super().__init__()
        if bands < 2 or bands % 2:
            raise ValueError(f"fourier needs an even number of bands, sines and cosines, not {bands}")
        self.grid, self.bands, self.base = grid, bands, base
        self.token_projection = nn.Linear(2 * bands, num_heads * head_dim, **factory)

    def reset_parameters(self) -> None:
        """Initialize the linear layer as torch does; XCiT does not change torch's initial values either."""
        self.token_projection.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        weight = first_of(self.token_projection)
        options = self.bands, float(self.base), dtype_name(upcast(weight).dtype)
        waves = fourier_waves(grid.h, grid.w, *options, device=weight.device)  # [h*w, 2 * bands]
        tokens = run_upcast(self.token_projection, waves).to(weight.dtype)
        return Terms(tokens=F.pad(tokens, (0, 0, grid.prefix, 0)))


@cached_geometry
def fourier_waves(h: int, w: int, bands: int, base: float, dtype: str, device: torch.device) -> Tensor:
    """Return sines and cosines of every patch, [h*w, 2 * bands] in `dtype`: first of its row's angle a, then of its column's.

    They are sin(a f_0), cos(a f_0), sin(a f_1), ... with f_t = base^(-2t / bands); a = 2 pi (y + 1) / h or 2 pi (x + 1) / w.
    """
    kind = getattr(torch, dtype)
    period = base ** (2 * (torch.arange(bands, device=device) // 2).to(kind) / bands)
    axes = []
    for n in (h, w):
        at = torch.arange(1, n + 1, device=device).to(kind)
        at = at / (torch.ones((), dtype=kind, device=device) * n + 1e-6) * (2 * math.pi)  # 1e-6: of XCiT's code
        angle = at[:, None] / period  # [n, bands]
        axes.append(torch.stack((angle[:, 0::2].sin(), angle[:, 1::2].cos()), 2).flatten(1))
    y, x = axes[0][:, None].expand(-1, w, -1), axes[1].expand(h, -1, -1)
    return torch.cat((y, x), -1).flatten(0, 1)
