"""none: no position at all, the control of every comparison.

Attention is permutation-equivariant, so a ViT without position sees a set of patches. A Swin still has its windows and patch
merging, which depend on position.
"""

from typing import Unpack

from vitrel.grid import Grid
from vitrel.position.terms import Factory, PositionEncoding, Terms


class NoPosition(PositionEncoding):
    """Encoding that adds nothing on any grid."""

    at_larger_grid = "nothing"
    keeps_range = True

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, **factory: Unpack[Factory]):
        super().__init__()

    def terms(self, grid: Grid) -> Terms:
        return Terms()
