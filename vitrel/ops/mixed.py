"""Images of several grids in one padded batch: what is done per token runs on the whole batch, attention runs per grid."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid


class Mixed(NamedTuple):
    """Which images of the batch have which grid. x is [B, N, C] or [B, h, w, C], their tokens first, padding behind."""

    grids: tuple[Grid, ...]  # each once
    images: tuple[Tensor, ...]  # indices of the images of each grid
    order: Tensor  # [B], where each image is once they are sorted by grid

    @classmethod
    def of(cls, grids: list[Grid], device: torch.device) -> "Mixed":
        """From the grid of every image of the batch."""
        kinds = tuple(dict.fromkeys(grids))
        images = tuple(torch.tensor([b for b, grid in enumerate(grids) if grid == kind], device=device) for kind in kinds)
        return cls(kinds, images, torch.cat(images).argsort())

    def map(self, x: Tensor, function: Callable[[Tensor, int], Tensor], lengths: tuple[int, ...] | None = None) -> Tensor:
        """function(tokens of the images of grid g, g) for every g, padded with zeros to `lengths` (those of x) and in order."""
        parts, lengths = [], x.shape[1:-1] if lengths is None else lengths
        for g, (grid, images) in enumerate(zip(self.grids, self.images, strict=True)):
            inside = (grid.tokens,) if x.dim() == 3 else (grid.h, grid.w)
            part = function(x[(images, *(slice(n) for n in inside))], g)
            missing = [n for length, own in zip(lengths, part.shape[1:-1], strict=True) for n in (length - own, 0)]
            parts.append(F.pad(part, (0, 0, *missing[::-1])))
        return torch.cat(parts)[self.order]
