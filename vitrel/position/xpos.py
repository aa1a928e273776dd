"""xpos: extrapolatable rotary position (xPos, arXiv 2212.10554) with one-sided heads, in two dimensions:
logit[i, j] = s sum_t zeta_t^(|d| / scale_base) (rotated q_i)_t . (rotated k_j)_t, zeta_t = (t/T + gamma) / (1 + gamma).

Rotation as in rope_axial, T = D/4 bands an axis. The decay comes from scaling queries by zeta^(p/scale_base) and keys by its
inverse, which only works where p_i >= p_j: in the plain, bidirectional form the scale of the other side grows without bound,
so it is refused. Head n looks up, down, left or right (n mod 4) and sees the keys on that side, its own row or column
included; d is the offset along that axis; a layer of one head sees one side only. Prefix tokens are seen by all and not
rotated. A pair with one keeps the scale of its token, counted from the middle of the grid; on a grid larger than the training
one the prefix side is scaled down, so that this never exceeds what it was in training. A larger grid is evaluated.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from vitrel.constants import constant
from vitrel.grid import Grid
from vitrel.position.rope import axial_frequencies, checked_bands, rotary_terms
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, pad_prefix


class XPos(PositionEncoding):
    """No parameters; queries and keys turn alike and are scaled inversely, and a table of 0 and -inf hides one side."""

    rotates = True
    refers_to_grid = True

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        base: float = 100.0,
        scale_base: float | None = None,
        gamma: float = 0.4,
        one_sided: bool = True,
        **factory: Unpack[Factory],
    ):
        """scale_base: patches over which band t decays by zeta_t, half the longer training side unless given."""
        super().__init__()
        if not one_sided:
            why = "its scale zeta^(d/scale_base) grows without bound for offsets d < 0"
            raise ValueError(f"xpos cannot be bidirectional: {why}; keep one_sided=True, or take rope_axial+log_decay")
        self.grid, self.base, self.gamma = grid, base, gamma
        self.scale_base = max(grid.h, grid.w) / 2 if scale_base is None else scale_base
        self.num_heads, self.bands = num_heads, checked_bands("xpos", head_dim)
        self.mark_device(factory.get("device"))

    def forward(self, grid: Grid) -> Terms:
        heads, device = self.num_heads, self.device_marker.device
        how = (heads, self.bands, float(self.base), float(self.gamma), float(self.scale_base))
        turns = _rotations(*grid, self.grid[:2], *how, device=device)
        bias = _one_sided(*grid, heads, device=device)
        return Terms(rotary=turns[:2], key_rotary=turns[2:], tables=(Table("hw", bias=bias),))


class _Rotations(NamedTuple):
    """Cosines and sines, times the scale of queries and of keys, [H, N, D/2] each."""

    query_cos: Tensor
    query_sin: Tensor
    key_cos: Tensor
    key_sin: Tensor


@constant
def _rotations(
    h: int, w: int, prefix: int, trained: tuple[int, int], num_heads: int, bands: int, base: float, gamma: float,
    scale_base: float, device: torch.device,
) -> _Rotations:  # fmt: skip
    grid, band = Grid(h, w, prefix), torch.arange(bands, device=device)
    at = grid.coordinates(device).float()  # [h*w, 2]
    angle = at[..., None] * axial_frequencies(band, base)  # [h*w, 2, D/4]
    cos, sin = rotary_terms(angle.flatten(1)[None], grid)  # [1, N, D/2]
    # Centred, so that neither factor is larger than it has to be; prefix rows make up for a grid larger than in training.
    along, one = _along(at - at.mean(0), num_heads), at.new_ones(())  # [H, h*w]
    grown = torch.stack((one * h - trained[0], one * w - trained[1])).clamp(min=0) / 2
    excess = grown.index_select(0, torch.arange(num_heads, device=device) % 4 // 2)[:, None].expand(-1, prefix)  # [H, P]
    rate = ((band.float() / bands + gamma) / (1 + gamma)).log() / scale_base  # [D/4]
    q, k = ((torch.cat((excess, p), 1)[..., None] * rate.repeat(2)).exp() for p in (along, -along))  # [H, N, D/2]
    return _Rotations(cos * q, sin * q, cos * k, sin * k)


@constant
def _one_sided(h: int, w: int, prefix: int, num_heads: int, device: torch.device) -> Tensor:
    hidden = _along(Grid(h, w).offsets(device=device).float(), num_heads) < 0  # [H, R]
    return pad_prefix(torch.zeros((), device=device).masked_fill(hidden, float("-inf")), Grid(h, w, prefix))


def _along(at: Tensor, num_heads: int) -> Tensor:
    """Positions or offsets (y, x) [.., 2] along each head's direction, growing away from the keys it sees, [H, ..]."""
    y, x = at.unbind(-1)
    return torch.stack((y, -y, x, -x)).index_select(0, torch.arange(num_heads, device=at.device) % 4)
