"""lookhere: directed attention (LookHere, arXiv 2405.13985), heads with a fixed field of view and a distance penalty,
logit[i, j] -= slope m_H |(y_i - y_j, x_i - x_j)| inside the field of view of the head, -inf outside.

fov 180: half planes up, down, left, right. 90: four quadrants and four wedges around the axes. 45: eight wedges. Borders are
seen and so is the token itself. The last min(4, H // 3) heads (at least one) are undirected with m = 4^-1, 4^-2, ..; the
others cycle through the views with m = 2^-1 for the first round, 2^-2 for the second, .. The paper's numbers of heads are 12
(8 and 4) and 16; with fewer than 11 (5 for 180) the last views have no head, and a single head has no field of view at all.
It also weighs layers by 1.5 to 0.5 from first to last; an encoding does not know its layer, so all have the mean, 1: `slope`
is the global factor. Nothing is learned, so at a larger grid nothing changes; the paper then lowers `slope`.
Prefix tokens see all and are seen by all without a bias.
"""

import warnings
from typing import Unpack

import torch
from torch import Tensor

from vitrel.constants import constant
from vitrel.grid import Grid
from vitrel.position.distance import distances
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, pad_prefix

FIELDS_OF_VIEW = (180, 90, 45)


class LookHere(PositionEncoding):
    """No parameters. Heads are directed in order of their number, the undirected ones come last."""

    behaviour = "nothing changes"

    def __init__(
        self, grid: Grid, num_heads: int, head_dim: int, *, fov: int = 90, slope: float = 1.0, **factory: Unpack[Factory]
    ):
        """fov: field of view of the directed heads in degrees, 180, 90 or 45. slope: factor of all penalties."""
        super().__init__()
        if fov not in FIELDS_OF_VIEW:
            raise ValueError(f"lookhere has fields of view of {', '.join(map(str, FIELDS_OF_VIEW))} degrees, not {fov}")
        if _directed(num_heads) == 0:
            views = 4 if fov == 180 else 8
            every = next(heads for heads in range(2, 16) if _directed(heads) == views)
            warnings.warn(
                f"lookhere with num_heads={num_heads} has no field of view, since its last head sees in all directions: "
                f"one needs num_heads of 2 or more, all {views} of fov={fov} need {every} or more",
                stacklevel=2,
            )
        self.grid, self.num_heads, self.fov, self.slope = grid, num_heads, fov, slope
        self.mark_device(factory.get("device"))

    def forward(self, grid: Grid) -> Terms:
        bias = _bias(*grid, self.num_heads, self.fov, float(self.slope), device=self.device_marker.device)
        return Terms(tables=(Table("hw", bias=bias),))


@constant
def _bias(h: int, w: int, prefix: int, num_heads: int, fov: int, slope: float, device: torch.device) -> Tensor:
    grid, head, directed = Grid(h, w, prefix), torch.arange(num_heads, device=device), _directed(num_heads)
    offsets = grid.offsets(device=device).float()
    views = _views(offsets, fov)  # [V, R] bool
    round_, view = head // len(views), head % len(views)
    # Tensors come first: ONNX does not take a number minus whole numbers.
    slopes = torch.where(head < directed, 2.0 ** -(round_ + 1.0), 4.0 ** -(head + (1.0 - directed)))  # [H]
    bias = -slope * slopes[:, None] * distances(offsets, "euclidean")  # [H, R]
    seen = views.index_select(0, view) | (head >= directed)[:, None]
    return pad_prefix(bias.masked_fill(~seen, float("-inf")), grid)


def _directed(num_heads: int) -> int:
    return num_heads - max(1, min(4, num_heads // 3))


def _views(offsets: Tensor, fov: int) -> Tensor:
    """Which offsets (query minus key) each view sees, [V, R] bool."""
    y, x = offsets.unbind(-1)
    halves = up, down, left, right = y >= 0, y <= 0, x >= 0, x <= 0  # "up": keys above the query
    if fov == 180:
        return torch.stack(halves)
    wedges = (y >= x.abs(), -y >= x.abs(), x >= y.abs(), -x >= y.abs())
    if fov == 90:
        return torch.stack((up & left, up & right, down & left, down & right, *wedges))
    first = [wedge & side for wedge, side in zip(wedges, (left, left, up, up), strict=True)]
    second = [wedge & side for wedge, side in zip(wedges, (right, right, down, down), strict=True)]
    return torch.stack((*first, *second))
