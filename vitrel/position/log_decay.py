"""log_decay: logarithmic decay with distance (KERPLE's logarithmic kernel, arXiv 2205.09921), in two dimensions:
logit[i, j] -= a_n log(1 + b_n |(y_i - y_j, x_i - x_j)|) for head n; with `decay`, lambda log(1 + |.|) for all heads.

a, b > 0 are learned per head, as logarithms so that they stay positive (KERPLE clamps them). Every parameter acts at every
distance, so a larger grid continues the same trained function. policy="renormalize" and `directional` as in alibi. Pairs with a
prefix token have no bias.
"""

from typing import Unpack

import torch
from torch import nn

from vitrel.grid import Grid
from vitrel.position.distance import POLICIES, scaled_distances
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_choice, pad_prefix, upcast


class LogDecay(PositionEncoding):
    """Bias that falls with the logarithm of the distance between query and key: -a log(1 + b distance), a and b per head.

    It is 0 with prefix tokens. The policy "renormalize" multiplies offsets by training side / side.

    Args:
        decay: a fixed value of a, 0 or more, for all heads, with b = 1; None: a and b are learned.
        distance: "euclidean" or "l1", in patches.
        directional: learn four factors per head on the offset's components, one for each direction, starting at 1.

    Attributes:
        log_a: learned logarithms of a, [H], unless `decay` is fixed.
        log_b: learned logarithms of b, [H], unless `decay` is fixed.
        direction: learned logarithms [4, H] of the factors on the offset component of keys above, below, to the left and to the
            right, if directional.

    Raises:
        ValueError: `decay` is negative, or `distance` unknown.
    """

    at_larger_grid = "nothing changes"
    policies = POLICIES
    lr_scale = 10.0  # one number per head, a logarithm, which has to move by tenths in some hundred updates

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        decay: float | None = None,
        distance: str = "euclidean",
        directional: bool = False,
        **factory: Unpack[Factory],
    ):
        super().__init__()
        if decay is not None and not decay >= 0:
            raise ValueError(f"log_decay option decay={decay!r} must be 0 or more: a negative decay rewards distance")
        self.grid, self.num_heads, self.decay = grid, num_heads, decay
        self.distance = check_choice("log_decay", "distance", distance, ("euclidean", "l1"))
        self.log_a = nn.Parameter(torch.empty(num_heads, **factory)) if decay is None else None
        self.log_b = nn.Parameter(torch.empty(num_heads, **factory)) if decay is None else None
        self.direction = nn.Parameter(torch.empty(4, num_heads, **factory)) if directional else None
        self.mark_device(factory.get("device"))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw a from (0.02, 2) and b from (0.01, 1) uniformly (KERPLE's ranges, without values near 0), unless `decay` is set.

        The factors of `directional` become 1.
        """
        if self.decay is None:
            self.log_a.uniform_(0.02, 2).log_()
            self.log_b.uniform_(0.01, 1).log_()
        if self.direction is not None:
            self.direction.zero_()

    def terms(self, grid: Grid) -> Terms:
        grids, device = (self.grid, grid, self.policy), self.device_marker.device
        distance = scaled_distances(*grids, self.distance, device, direction=self.direction)  # [R] or [H, R]
        if self.decay is None:
            distance = upcast(self.log_b).exp()[:, None] * distance
        factor = upcast(self.log_a).exp()[:, None] if self.decay is None else self.decay
        bias = -factor * torch.log1p(distance).expand(self.num_heads, -1)  # [H, R]
        bias = bias.to(next(self.parameters(), bias).dtype)  # float32 where nothing is learned
        return Terms(tables=(Table("hw", bias=pad_prefix(bias, grid)),))
