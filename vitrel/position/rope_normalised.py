"""rope_normalised: rotary position in normalised coordinates (DINOv3, arXiv 2508.10104, and its code):
angle = 2 pi y / period_t or 2 pi x / period_t, y = 2 (i + 1/2) / h - 1 and so for x, period_t = base^(4t/D), base 100.

Coordinates run from -1 to 1 on every grid, so positions rescale with the image: a larger grid is a finer sampling of the
angles trained. In training they may be perturbed (vitrel.position.perturb). Half-split pairs, rows before columns; prefix
tokens are not rotated.
"""

import math
from typing import Unpack

import torch

from vitrel.grid import Grid
from vitrel.position.rope import axial_frequencies, check_bands, rotary_terms
from vitrel.position.terms import Factory, PositionEncoding, Terms


class RopeNormalised(PositionEncoding):
    """No parameters; one rotation for all heads."""

    rotates = True

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, base: float = 100.0, **factory: Unpack[Factory]):
        super().__init__()
        self.grid, self.base = grid, base
        self.register_integers("band", check_bands("rope_normalised", head_dim), factory.get("device"))

    def forward(self, grid: Grid) -> Terms:
        y, x = grid.coordinates(self.band.device).float().unbind(-1)
        coordinates = torch.stack((2 * (y + 0.5) / grid.h - 1, 2 * (x + 0.5) / grid.w - 1), -1)  # [h*w, 2]
        angle = 2 * math.pi * self._augmented(coordinates)[..., None] * axial_frequencies(self.band, self.base)  # [h*w, 2, D/4]
        return Terms(rotary=rotary_terms(angle.flatten(1)[None], grid))

    def unseen(self, grid: Grid) -> float:
        return 0.0
