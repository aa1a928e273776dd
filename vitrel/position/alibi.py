"""alibi: attention with linear biases (ALiBi, arXiv 2108.12409, sec. 3), symmetric and in two dimensions:
logit[i, j] -= m_n |(y_i - y_j, x_i - x_j)|, m_n = 2^(-8n/H) for head n = 1..H.

The distance is Euclidean, in patches, unless `distance` chooses another. Slopes are fixed unless `learnable` is set. A larger
grid continues the same function; with policy="renormalize" offsets are first multiplied by trained side / side of the grid,
along each axis. The bias depends on the distance alone; `directional` adds direction by four learned factors per head, for the
offset component of keys above, below, to the left and to the right. Pairs with a prefix token have no bias.
"""

from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.distance import DISTANCES, POLICIES, alibi_slopes, scaled_distances
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_choice, pad_prefix, upcast


class Alibi(PositionEncoding):
    """Bias that falls linearly with the distance between query and key: -slope * distance, 0 with prefix tokens.

    Without options it has no parameters, and the slope of head n = 1..H is 2^(-8n/H). The policy "renormalize" multiplies
    offsets by training side / side.

    Args:
        distance: "euclidean", "l1", or "squared" (the sum of the squared components), in patches.
        learnable: learn one slope per head, starting at 2^(-8n/H).
        directional: learn four factors per head on the offset's components, one for each direction, starting at 1.

    Attributes:
        slopes: learned slopes [H], if learnable.
        direction: learned logarithms [4, H] of the factors for keys above, below, to the left and to the right, if directional.
    """

    at_larger_grid = "nothing changes"
    policies = POLICIES
    lr_scale = 10.0  # one number per head, which has to move by tenths in some hundred updates

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        distance: str = "euclidean",
        learnable: bool = False,
        directional: bool = False,
        **factory: Unpack[Factory],
    ):
        super().__init__()
        self.grid, self.distance = grid, check_choice("alibi", "distance", distance, DISTANCES)
        self.num_heads = num_heads
        self.mark_device(factory.get("device"))
        self.slopes = nn.Parameter(torch.empty(num_heads, **factory)) if learnable else None
        self.direction = nn.Parameter(torch.empty(4, num_heads, **factory)) if directional else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.slopes is not None:
            self.slopes.copy_(alibi_slopes(self.num_heads, device=self.device_marker.device))
        if self.direction is not None:
            self.direction.zero_()

    def terms(self, grid: Grid) -> Terms:
        device = self.device_marker.device
        slopes = alibi_slopes(self.num_heads, device=device) if self.slopes is None else upcast(self.slopes)
        tables = []
        for axis in ("hw",) if self.distance == "euclidean" else ("h", "w"):  # others are sums over both axes
            length = scaled_distances(self.grid, grid, self.policy, self.distance, device, axis, self.direction)
            bias = -slopes[:, None] * length  # [H, R]
            bias = bias.to(next(self.parameters(), bias).dtype)  # float32 where nothing is learned
            tables.append(Table(axis, bias=pad_prefix(bias, grid)))
        return Terms(tables=tuple(tables))
