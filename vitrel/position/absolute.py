"""absolute: learned embedding per token (ViT, arXiv 2010.11929, eq. 1), x_i += P[i]. The encoding to compare with.

P has one row per token of the training grid, so any other grid needs interpolation: bicubic, antialiased, always from the
trained P (DeiT, timm `resample_abs_pos_embed`). Prefix tokens have rows of their own, which are never resampled.
Coordinates perturbed in training (vitrel.position.perturb) count in patches of the grid at hand, from its middle: there the
rows are read bilinearly, beyond the border those of the edge.
"""

from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid, same_size
from vitrel.position.resize import resize_embedding, sample_embedding
from vitrel.position.terms import Factory, PositionEncoding, Terms


class Absolute(PositionEncoding):
    """`pos_embed` [1, P + h*w, C] as in timm, C = num_heads * head_dim; trained grid `grid`."""

    site = "tokens"
    behaviour = "resized"
    policies = ("bicubic",)

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, **factory: Unpack[Factory]):
        super().__init__()
        self.grid = grid
        self.pos_embed = nn.Parameter(torch.empty(1, grid.tokens, num_heads * head_dim, **factory))
        self.reset_parameters()

    def forward(self, grid: Grid) -> Terms:
        if grid.prefix != self.grid.prefix:
            raise ValueError(f"absolute was built for {self.grid.prefix} prefix tokens, the grid has {grid.prefix}")
        rows = self.pos_embed[0]  # [P + h*w, C]
        if self.perturbs or not same_size(grid, self.grid):
            prefix, rows = rows[: grid.prefix], resize_embedding(rows[grid.prefix :].unflatten(0, self.grid[:2]), grid)
            if self.perturbs:
                at = grid.coordinates(rows.device).float()  # [h*w, 2]
                middle = at[-1] / 2
                rows = sample_embedding(rows.unflatten(0, grid[:2]), self._augmented(at - middle) + middle)
            rows = torch.cat((prefix, rows))
        return Terms(tokens=rows)

    def resized(self, grid: Grid) -> dict[str, int]:
        if grid[:2] == self.grid[:2]:
            return {}
        return {"absolute bicubic": self.pos_embed[:, self.grid.prefix :].numel()}

    def unseen(self, grid: Grid) -> float:
        return 0.0
