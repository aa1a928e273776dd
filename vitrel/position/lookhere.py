"""lookhere: directed attention (LookHere, arXiv 2405.13985), heads with a fixed field of view and a distance penalty,
logit[i, j] -= slope m_n |(y_i - y_j, x_i - x_j)| inside the field of view of head n, -inf outside.

Views with fov=180: the half planes up, down, left and right. 90: four quadrants, and four wedges around the axes. 45: eight
wedges. A view includes its borders and the token itself. The last min(4, H // 3) heads, at least one, see in all directions
with m = 4^-1, 4^-2, ...; the heads before them cycle through the views, with m = 2^-1 in the first round, 2^-2 in the second,
and so on. The paper has 12 heads (8 directed, 4 undirected) or 16. With fewer than 11 heads (5 for fov=180) some views have no
head, and a single head is undirected.

The paper also multiplies penalties by a factor per layer, from 1.5 in the first to 0.5 in the last; an encoding does not know
its layer, so every layer has their mean, 1, times `slope`. Nothing is learned, so a larger grid continues the same function;
the paper then lowers `slope`. Pairs with a prefix token are never masked and have no bias.
"""

from typing import Unpack

import torch
from torch import Tensor

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid
from vitrel.position.distance import distances
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, pad_prefix

FIELDS_OF_VIEW = (180, 90, 45)


class LookHere(PositionEncoding):
    """Bias that falls linearly with the distance; a directed head also hides the keys outside its field of view.

    The last min(4, num_heads // 3) heads, at least one, are undirected, with slopes 1/4, 1/16, ..; the heads before them are
    directed and cycle through the views, with slope 1/2 in the first round, 1/4 in the second, .. There are no parameters.
    Pairs with a prefix token have bias 0.

    Args:
        fov: field of view of the directed heads in degrees, 180, 90 or 45.
        slope: factor on these slopes, by which the biases fall per patch.

    Raises:
        ValueError: fov is another number.
    """

    at_larger_grid = "nothing changes"
    positive = ("slope",)

    def __init__(
        self, grid: Grid, num_heads: int, head_dim: int, *, fov: int = 90, slope: float = 1.0, **factory: Unpack[Factory]
    ):
        super().__init__()
        if fov not in FIELDS_OF_VIEW:
            raise ValueError(f"lookhere has fields of view of {', '.join(map(str, FIELDS_OF_VIEW))} degrees, not {fov}")
        self.grid, self.num_heads, self.fov, self.slope = grid, num_heads, fov, slope
        self.mark_device(factory.get("device"))

    def terms(self, grid: Grid) -> Terms:
        bias = _bias(*grid, self.num_heads, self.fov, float(self.slope), device=self.device_marker.device)
        return Terms(tables=(Table("hw", bias=bias),))


@cached_geometry
def _bias(h: int, w: int, prefix: int, num_heads: int, fov: int, slope: float, device: torch.device) -> Tensor:
    """Return the bias of every head and offset class, [H, R]; it is -inf outside the field of view, 0 for prefix classes.

    Elsewhere it is -`slope` times the slope of the head times the distance; `fov` is in degrees.
    """
    grid, head = Grid(h, w, prefix), torch.arange(num_heads, device=device)
    directed = num_heads - max(1, min(4, num_heads // 3))
    offsets = grid.offsets(device=device).float()
    views = _views(offsets, fov)  # [V, R] bool
    cycle, view = head // len(views), head % len(views)
    # -(cycle + 1.0), not -1.0 - cycle: ONNX does not take a float minus an integer tensor.
    slopes = torch.where(head < directed, 2.0 ** -(cycle + 1.0), 4.0 ** -(head + (1.0 - directed)))  # [H]
    bias = -slope * slopes[:, None] * distances(offsets, "euclidean")  # [H, R]
    visible = views.index_select(0, view) | (head >= directed)[:, None]
    return pad_prefix(bias.masked_fill(~visible, float("-inf")), grid)


def _views(offsets: Tensor, fov: int) -> Tensor:
    """Return for each of V fields of view whether it contains the key at each offset (dy, dx): [R, 2] -> [V, R] bool.

    Offsets are query minus key; `fov` is the angle of a view in degrees. V is 4 for 180 (up, down, left, right), else 8. A view
    contains its borders and the query's own place.
    """
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
