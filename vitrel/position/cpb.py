"""cpb: log-spaced continuous position bias (Swin V2, arXiv 2111.09883, eq. 3 and 4),
logit[i, j] += 16 sigmoid(MLP(g(y_i - y_j), g(x_i - x_j))), g(d) = sign(d) log2(1 + 8 |d| / (M0 - 1)) / log2 8.

M0 is the side, in patches, of the training window (or grid) along the axis. With policy="keep" M0 is the same on every grid: a
near offset keeps its bias, and the MLP extrapolates to a far one. With "renormalize" M0 is the side of the current grid, as
timm does silently when a window grows: the MLP's input for offset 1 then falls from 0.3665 to 0.2056 between windows of 8 and
16. The constants 8, log2 8 and 16 sigmoid are those of the published code. Pairs with a prefix token, which the paper does not
have, read three learned rows.
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid
from vitrel.position.distance import POLICIES
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_pair, check_prefix, first_of, run_upcast


class CPB(PositionEncoding):
    """Bias 16 sigmoid(MLP(..)) that a small MLP computes from the offset (dy, dx) on a logarithmic scale.

    Args:
        hidden: width of the MLP.
        pretrained_window: M0, a side in patches or (h, w), for weights trained in a window that is not `grid`; offsets are
            divided by M0 - 1. None: the sides of `grid`. The policy "renormalize" takes those of the current grid instead.

    Attributes:
        cpb_mlp: Linear(2, hidden), ReLU, Linear(hidden, H) without bias, as in Swin V2.
        prefix_bias: learned biases [3, H] of the prefix classes, if there are prefix tokens.
    """

    policies = POLICIES
    lr_scale = 2.0  # an MLP, many of whose weights move every row: faster than that, rows jump
    positive = ("hidden",)

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        hidden: int = 512,
        pretrained_window: int | tuple[int, int] | None = None,
        **factory: Unpack[Factory],
    ):
        super().__init__()
        self.grid = grid
        m0 = grid[:2] if pretrained_window is None else pretrained_window
        self.pretrained_window = check_pair("cpb", "pretrained_window", m0)
        first, second = nn.Linear(2, hidden, **factory), nn.Linear(hidden, num_heads, bias=False, **factory)
        self.cpb_mlp = nn.Sequential(first, nn.ReLU(), second)
        self.prefix_bias = nn.Parameter(torch.empty(3, num_heads, **factory)) if grid.prefix else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as Swin V2: linear weights truncated normal with standard deviation 0.02, biases zero.

        `prefix_bias` starts near 8, the bias 16 sigmoid(0) of a new MLP.
        """
        for layer in (self.cpb_mlp[0], self.cpb_mlp[2]):
            nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.cpb_mlp[0].bias)
        if self.prefix_bias is not None:
            nn.init.trunc_normal_(self.prefix_bias, mean=8.0, std=0.02, a=7.0, b=9.0)  # 16 sigmoid(0) = 8

    def terms(self, grid: Grid) -> Terms:
        check_prefix("cpb", self.grid, grid)
        weight = first_of(self.cpb_mlp)
        side = grid[:2] if self.policy == "renormalize" else self.pretrained_window
        coordinates = _log_spaced_offsets(*grid[:2], side, device=weight.device)  # [R, 2]
        rows = 16 * run_upcast(self.cpb_mlp, coordinates).sigmoid().to(weight.dtype)  # [R, H]
        rows = rows if self.prefix_bias is None else torch.cat((rows, self.prefix_bias))
        return Terms(tables=(Table("hw", bias=rows.mT),))


@cached_geometry
def _log_spaced_offsets(h: int, w: int, side: tuple[int, int], device: torch.device) -> Tensor:
    """Return (g(dy), g(dx)) of every offset in the order of `Grid.offsets`, [(2h-1)(2w-1), 2] float32.

    g(d) = sign(d) log2(1 + 8 |d| / max(M0 - 1, 1)) / 3, where M0 is `side` along the axis.
    """
    y, x = Grid(h, w).offsets(device=device).float().unbind(-1)
    return torch.stack((_log_spaced(y, side[0]), _log_spaced(x, side[1])), -1)


def _log_spaced(offset: Tensor, side: int) -> Tensor:
    normalized = 8 * offset / (torch.ones((), device=offset.device) * (side - 1)).clamp(min=1)
    return normalized.sign() * torch.log2(1 + normalized.abs()) / 3  # log2 8
