"""none: no position at all, the control of every comparison.

Attention is permutation-equivariant: a ViT with it sees a bag of patches (a Swin still knows its windows and their merging).
"""

import torch

from vitrel.grid import Grid
from vitrel.position.terms import PositionEncoding, Terms


class NoPosition(PositionEncoding):
    """Adds nothing on any grid."""

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()

    def forward(self, grid: Grid) -> Terms:
        return Terms()
