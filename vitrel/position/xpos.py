"""xpos: extrapolatable rotary position (xPos, arXiv 2212.10554) with one-sided heads, in two dimensions:
logit[i, j] = s sum_t zeta_t^(|d| / scale_base) (rotated q_i)_t . (rotated k_j)_t, zeta_t = (t/T + gamma) / (1 + gamma).

Rotation as in rope_axial, with T = D/4 bands per axis, or D/2 on one axis alone; s = D^-1/2. Head n = 0, 1, ... looks up, down,
left or right (n mod 4): it sees the keys on that side, its own row or column included, and d is the offset along that axis. A
layer with a single head sees one side only. One-sided heads are necessary because the decay is a product of queries scaled by
zeta^(p / scale_base) and keys scaled by its inverse: for keys on the other side the factor would grow without bound.

Prefix tokens are not rotated and are seen by all heads. A pair of a patch and a prefix token keeps the scale of the patch, with
p counted from the center of the grid. On a grid larger than the training grid the prefix side is scaled down, so that this
factor never exceeds its maximum in training. A larger grid is evaluated at angles and distances beyond those of training.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid
from vitrel.position.bands import band_frequencies, split_axes
from vitrel.position.rope import rotary_terms
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, pad_prefix


class XPos(PositionEncoding):
    """Rotation with decay, without parameters. Heads 0, 1, ... see only keys above, below, left, right, above, and so on.

    They also see the query's own row or column and prefix tokens; a bias of -inf masks other keys. Band t of T is multiplied by
    zeta_t^(distance / scale_base), zeta_t = (t/T + gamma) / (1 + gamma), for the distance in patches along that direction.

    Args:
        base: of the frequencies base^(-t/T), T = D/4 bands per axis, D = head_dim.
        scale_base: patches over which band t decays by zeta_t; None: half of the longer training side.
        gamma: the larger, the slower the decay.

    Raises:
        ValueError: head_dim is not divisible by 4 (by 2 on a training grid of one row or column).
    """

    rotates = True
    positive = ("base", "scale_base", "gamma")

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        base: float = 100.0,
        scale_base: float | None = None,
        gamma: float = 0.4,
        **factory: Unpack[Factory],
    ):
        super().__init__()
        self.grid, self.base, self.gamma = grid, base, gamma
        self.scale_base = max(grid.h, grid.w) / 2 if scale_base is None else scale_base
        self.num_heads = num_heads
        self.axes, self.bands = split_axes("xpos", "head width", head_dim, grid)
        self.mark_device(factory.get("device"), factory.get("dtype"))

    @property
    def refers_to_grid(self) -> bool:
        return True  # the default `scale_base` is half of the longer training side

    def terms(self, grid: Grid) -> Terms:
        heads, device = self.num_heads, self.device_marker.device
        options = (heads, self.axes, self.bands, float(self.base), float(self.gamma), float(self.scale_base))
        rotations = _rotations(*grid, self.grid[:2], *options, self.precision, device=device)
        bias = _one_sided(*grid, heads, self.precision, device=device)
        return Terms(rotary=rotations[:2], key_rotary=rotations[2:], tables=(Table("hw", bias=bias),))


class _Rotations(NamedTuple):
    """Cosines and sines of the angles of all tokens, multiplied by the decay's factors of queries and of keys."""

    query_cos: Tensor  # [H, N, D/2]
    query_sin: Tensor  # [H, N, D/2]
    key_cos: Tensor  # [H, N, D/2]
    key_sin: Tensor  # [H, N, D/2]


@cached_geometry
def _rotations(
    h: int, w: int, prefix: int, trained: tuple[int, int], num_heads: int, axes: str, bands: int, base: float,
    gamma: float, scale_base: float, dtype: str, device: torch.device,
) -> _Rotations:  # fmt: skip
    """Return the rotations of all tokens, multiplied by the factors of the decay, [H, N, D/2] each.

    `trained` is (h, w) of the training grid, `axes` and `bands` are those of `split_axes`, base, gamma and scale_base of XPos.
    """
    grid, band = Grid(h, w, prefix), torch.arange(bands, device=device)
    at = grid.coordinates(device).to(getattr(torch, dtype))  # [h*w, 2]
    cos, sin = rotary_terms(at[..., None] * band_frequencies(bands, base, dtype, device), axes, grid)  # [1, N, D/2]
    # Positions are centered to keep both factors small; prefix rows are scaled down on a grid larger than the training grid.
    along, one = _along(at - at.mean(0), num_heads), at.new_ones(())  # [H, h*w]
    grown = torch.stack((one * h - trained[0], one * w - trained[1])).clamp(min=0) / 2
    excess = grown.index_select(0, torch.arange(num_heads, device=device) % 4 // 2)[:, None].expand(-1, prefix)  # [H, P]
    rate = ((band.to(at.dtype) / bands + gamma) / (1 + gamma)).log() / scale_base  # [T]
    q, k = ((torch.cat((excess, p), 1)[..., None] * rate.repeat(len(axes))).exp() for p in (along, -along))  # [H, N, D/2]
    return _Rotations(cos * q, sin * q, cos * k, sin * k)


@cached_geometry
def _one_sided(h: int, w: int, prefix: int, num_heads: int, dtype: str, device: torch.device) -> Tensor:
    """Return a bias for every head and offset class, [H, R]: 0 where the head sees the key and for prefix tokens, else -inf."""
    hidden = _along(Grid(h, w).offsets(device=device).float(), num_heads) < 0  # [H, R]
    bias = torch.zeros((), dtype=getattr(torch, dtype), device=device).masked_fill(hidden, float("-inf"))
    return pad_prefix(bias, Grid(h, w, prefix))


def _along(at: Tensor, num_heads: int) -> Tensor:
    """Return positions or offsets (y, x) [.., 2] along each head's direction, [H, ..]: y, -y, x, -x, y, ... for heads 0, 1, ...

    An offset, query minus key, is then at least 0 if the head sees the key.
    """
    y, x = at.unbind(-1)
    return torch.stack((y, -y, x, -x)).index_select(0, torch.arange(num_heads, device=at.device) % 4)
