"""absolute_factorized: learned embedding per row plus one per column (NaViT, arXiv 2307.06304, sec. 2.1; NaFlexViT in timm),
x_i += P_h[y_i] + P_w[x_i].

(h + w) C parameters instead of the h w C of `absolute`. On another grid each part is resampled along its axis by antialiased
bicubic interpolation, always from the trained one, so the sum is what `absolute` gives for P[y, x] = P_h[y] + P_w[x]; timm
interpolates linearly. Prefix tokens get no embedding.
"""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.position.resample import resample_embedding
from vitrel.position.terms import Factory, PositionEncoding, Terms, upcast


class AbsoluteFactorized(PositionEncoding):
    """Learned embedding of a patch's row plus one of its column, added to the patches; both are resampled on other grids.

    Args:
        init_std: standard deviation of the initial values.

    Attributes:
        pos_embed_h: learned embeddings of the rows, [1, h, C], C = num_heads * head_dim.
        pos_embed_w: learned embeddings of the columns, [1, w, C].
    """

    site = "tokens"
    keeps_range = True
    at_larger_grid = "resampled"
    policies = ("bicubic",)

    def __init__(self, grid: Grid, num_heads: int, head_dim: int, *, init_std: float = 0.02, **factory: Unpack[Factory]):
        super().__init__()
        self.grid, self.init_std = grid, init_std
        self.pos_embed_h = nn.Parameter(torch.empty(1, grid.h, num_heads * head_dim, **factory))
        self.pos_embed_w = nn.Parameter(torch.empty(1, grid.w, num_heads * head_dim, **factory))
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        rows, columns = _resampled(self.pos_embed_h[0], grid.h), _resampled(self.pos_embed_w[0], grid.w)
        tokens = (rows[:, None] + columns).flatten(0, 1).to(self.pos_embed_h.dtype)  # [h*w, C]
        return Terms(tokens=F.pad(tokens, (0, 0, grid.prefix, 0)))

    def resampled(self, grid: Grid) -> dict[str, int]:
        axes = zip(grid[:2], self.grid[:2], (self.pos_embed_h, self.pos_embed_w), strict=True)  # type: ignore[index]
        count = sum(part.numel() for n, trained, part in axes if n != trained)
        return {"absolute_factorized bicubic": count} if count else {}


def _resampled(part: Tensor, length: int) -> Tensor:
    """Resample an embedding along its only axis, [n, C] -> [length, C], antialiased bicubic; float32 if it was half."""
    return resample_embedding(upcast(part)[:, None], Grid(length, 1))
