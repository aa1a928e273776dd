"""rope_normalised: rotary position in normalised coordinates (DINOv3, arXiv 2508.10104, and its code):
angle = 2 pi y / period_t or 2 pi x / period_t, y = 2 (i + 1/2) / h - 1 and so for x, period_t = base^(4t/D), base 100.

Coordinates run from -1 to 1 on every grid, so positions rescale with the image: a larger grid is a finer sampling of the
angles trained. In training they may be perturbed (vitrel.position.perturb). Half-split pairs, rows before columns; prefix
tokens are not rotated.
"""

import math
from typing import Unpack

import torch
from torch import Tensor

from vitrel.constants import constant
from vitrel.grid import Grid
from vitrel.position.rope import Rotary, axial_frequencies, checked_bands, rotary_terms
from vitrel.position.terms import Factory, PositionEncoding, Terms


class RopeNormalised(PositionEncoding):
    """No parameters; one rotation for all heads."""

    rotates = True

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, base: float = 100.0, **factory: Unpack[Factory]):
        super().__init__()
        self.grid, self.base, self.bands = grid, base, checked_bands("rope_normalised", head_dim)
        self.mark_device(factory.get("device"))

    def forward(self, grid: Grid) -> Terms:
        device, how = self.device_marker.device, (self.bands, float(self.base))
        if not self.perturbs:
            return Terms(rotary=tuple(_rotation(*grid, *how, device=device)))
        return Terms(rotary=tuple(_rotated_by(self._augmented(_coordinates(*grid[:2], device=device)), grid, *how)))

    def unseen(self, grid: Grid) -> float:
        return 0.0


@constant
def _rotation(h: int, w: int, prefix: int, bands: int, base: float, device: torch.device) -> Rotary:
    return _rotated_by(_coordinates(h, w, device=device), Grid(h, w, prefix), bands, base)


@constant
def _coordinates(h: int, w: int, device: torch.device) -> Tensor:
    y, x = Grid(h, w).coordinates(device).float().unbind(-1)
    return torch.stack((2 * (y + 0.5) / h - 1, 2 * (x + 0.5) / w - 1), -1)  # [h*w, 2]


def _rotated_by(coordinates: Tensor, grid: Grid, bands: int, base: float) -> Rotary:
    frequency = axial_frequencies(torch.arange(bands, device=coordinates.device), base)
    return rotary_terms((2 * math.pi * coordinates[..., None] * frequency).flatten(1)[None], grid)
