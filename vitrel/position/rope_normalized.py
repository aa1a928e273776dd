"""rope_normalized: rotary position in normalized coordinates (DINOv3, arXiv 2508.10104, and its code):
angle = 2 pi y / period_t or 2 pi x / period_t, y = 2 (i + 1/2) / h - 1, x = 2 (j + 1/2) / w - 1, period_t = base^(4t/D).

(i, j) is the patch's row and column, base 100. Coordinates run from -1 to 1 on every grid, so positions scale with the image: a
larger grid samples the trained range of angles more finely. `shift_coords`, `jitter_coords` and `rescale_coords` perturb
coordinates in training (vitrel.position.perturb). Channels p and p + D/2 form a pair, the pairs of y come before those of x,
and prefix tokens are not rotated. On a training grid of one row or column any even D serves, as in rope_axial.
"""

import math
from typing import Unpack

import torch
from torch import Tensor

from vitrel.geometry import cached_geometry, dtype_name
from vitrel.grid import Grid
from vitrel.position.bands import band_frequencies, split_axes
from vitrel.position.rope import Rotary, rotary_terms
from vitrel.position.terms import Factory, PositionEncoding, Terms


class RopeNormalized(PositionEncoding):
    """Rotation by angles 2 pi y / period or 2 pi x / period, y and x from -1 to 1 over the grid; it has no parameters.

    The channel pairs (p, p + D/2) of y come before those of x. Prefix tokens are not rotated.

    Args:
        base: of the periods base^(4t/D), t = 0..D/4-1, in half sides of the grid; D = head_dim.
        shift_coords: in training, each axis moves by a random number of half sides up to this, either way; None: no shift.
        jitter_coords: s; in training, each axis is multiplied by its own random factor in 1/s..s; None: no stretch.
        rescale_coords: s; in training, both axes are multiplied by one random factor in 1/s..s; None: no scale.

    Raises:
        ValueError: head_dim is not divisible by 4 (by 2 on a training grid of one row or column).
    """

    rotates = True
    keeps_range = True
    positive = ("base",)

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        base: float = 100.0,
        shift_coords: float | None = None,
        jitter_coords: float | None = None,
        rescale_coords: float | None = None,
        **factory: Unpack[Factory],
    ):
        super().__init__(shift_coords, jitter_coords, rescale_coords)
        self.grid, self.base = grid, base
        self.axes, self.bands = split_axes("rope_normalized", "head width", head_dim, grid)
        self.mark_device(factory.get("device"), factory.get("dtype"))

    def terms(self, grid: Grid) -> Terms:
        device, options = self.device_marker.device, (self.axes, self.bands, float(self.base))
        if not self.perturbs:
            return Terms(rotary=tuple(_rotation(*grid, *options, self.precision, device=device)))
        coordinates = self._perturbed(_coordinates(*grid[:2], self.precision, device=device))
        return Terms(rotary=tuple(_rotation_at(coordinates, grid, *options)))


@cached_geometry
def _rotation(
    h: int, w: int, prefix: int, axes: str, bands: int, base: float, dtype: str, device: torch.device
) -> Rotary:  # fmt: skip
    return _rotation_at(_coordinates(h, w, dtype, device=device), Grid(h, w, prefix), axes, bands, base)


@cached_geometry
def _coordinates(h: int, w: int, dtype: str, device: torch.device) -> Tensor:
    """Return row and column (y, x) of every patch's center, [h*w, 2] in `dtype`, where the grid reaches from -1 to 1."""
    y, x = Grid(h, w).coordinates(device).to(getattr(torch, dtype)).unbind(-1)
    return torch.stack((2 * (y + 0.5) / h - 1, 2 * (x + 0.5) / w - 1), -1)


def _rotation_at(coordinates: Tensor, grid: Grid, axes: str, bands: int, base: float) -> Rotary:
    """Return the rotation of the tokens of `grid`, whose patches have these coordinates [h*w, 2], -1 to 1 unless perturbed.

    `axes` and `bands` are those of `split_axes`, `base` is that of the periods.
    """
    frequency = band_frequencies(bands, base, dtype_name(coordinates.dtype), coordinates.device)
    return rotary_terms(2 * math.pi * coordinates[..., None] * frequency, axes, grid)
