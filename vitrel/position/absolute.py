"""absolute: learned embedding per token (ViT, arXiv 2010.11929, eq. 1), x_i += P[i].

P [N, C] has one row per token of the training grid: prefix tokens first, then patches row by row. On any other grid the patch
rows are resampled by antialiased bicubic interpolation, always from the trained P (as in DeiT and timm's
`resample_abs_pos_embed`). The rows of prefix tokens are never resampled, and their number cannot change.

`shift_coords`, `jitter_coords` and `rescale_coords` perturb coordinates in training (vitrel.position.perturb). They are counted
in patches of the current grid from its center; each token then reads the resampled rows by bilinear interpolation, and a
position outside the grid reads the nearest border row.
"""

from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid, same_size
from vitrel.position.resample import resample_embedding, sample_embedding
from vitrel.position.terms import Factory, PositionEncoding, Terms, check_prefix


class Absolute(PositionEncoding):
    """Learned embedding of every token, which is added to the tokens; on other grids that of patches is resampled bicubically.

    Args:
        init_std: standard deviation of the initial values.
        shift_coords: in training, each axis moves by a random number of patches up to this, either way; None: no shift.
        jitter_coords: s; in training, each axis is stretched about the center by its own random factor in 1/s..s; None: not.
        rescale_coords: s; in training, both axes are stretched about the center by one random factor in 1/s..s; None: not.

    Attributes:
        pos_embed: learned rows [1, P + h*w, C] of P prefix tokens, then all patches, as in timm; C = num_heads * head_dim.
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
        init_std: float = 0.02,
        shift_coords: float | None = None,
        jitter_coords: float | None = None,
        rescale_coords: float | None = None,
        **factory: Unpack[Factory],
    ):
        super().__init__(shift_coords, jitter_coords, rescale_coords)
        self.grid, self.init_std = grid, init_std
        self.pos_embed = nn.Parameter(torch.empty(1, grid.tokens, num_heads * head_dim, **factory))
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        check_prefix("absolute", self.grid, grid, row_each=True)
        rows = self.pos_embed[0]  # [P + h*w, C]
        if self.perturbs or not same_size(grid, self.grid):
            prefix, rows = rows[: grid.prefix], resample_embedding(rows[grid.prefix :].unflatten(0, self.grid[:2]), grid)
            if self.perturbs:
                at = grid.coordinates(rows.device).float()  # [h*w, 2]
                center = at[-1] / 2
                rows = sample_embedding(rows.unflatten(0, grid[:2]), self._perturbed(at - center) + center)
            rows = torch.cat((prefix, rows))
        return Terms(tokens=rows)

    def resampled(self, grid: Grid) -> dict[str, int]:
        if grid[:2] == self.grid[:2]:
            return {}
        return {"absolute bicubic": self.pos_embed[:, self.grid.prefix :].numel()}
