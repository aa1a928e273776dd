"""rope_axial, rope_mixed: rotary position in two dimensions (RoPE, arXiv 2104.09864; 2-D: RoPE-ViT, arXiv 2403.13298).

Channels p and p + D/2 of q and k are one pair, rotated by an angle that is linear in the token's integer position, so the logit
depends on the offset alone. axial: half of the pairs turn with the row, half with the column, angle = y theta_t or x theta_t,
theta_t = base^(-4t/D), t = 0..D/4-1, base 100. mixed: angle = f_y y + f_x x with both frequencies learned per head and layer,
initialised with base 10 and one random direction per head.
Peers store pairs interleaved and the column first; loaders permute. Prefix tokens are not rotated. Angles are at least float32.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.position.terms import PositionEncoding, Terms


class RopeAxial(PositionEncoding):
    """No parameters; one rotation for all heads."""

    rotates = True

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        base: float = 100.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.base = base
        # Integers: model.bfloat16() must not round what the frequencies are computed from.
        bands = _bands("rope_axial", head_dim)
        self.register_buffer("band", torch.empty(bands, dtype=torch.int64, device=device), persistent=False)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        self.band.copy_(torch.arange(len(self.band)))

    def forward(self, grid: Grid) -> Terms:
        theta = self.base ** (-self.band.float() / len(self.band))  # [D/4]
        angle = grid.coordinates(self.band.device)[..., None] * theta  # [h*w, 2, D/4]
        return Terms(rotary=_rotary(angle.flatten(1)[None], grid))


class RopeMixed(PositionEncoding):
    """`freqs` [2, H, D/2], radians per patch: freqs[0] along the rows (y), freqs[1] along the columns (x)."""

    rotates = True

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        base: float = 10.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.base = base
        _bands("rope_mixed", head_dim)
        self.freqs = nn.Parameter(torch.empty(2, num_heads, head_dim // 2, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Magnitudes base^(-4t/D), twice: along a random direction per head, and at right angles to it."""
        _, heads, pairs = self.freqs.shape
        n = pairs // 2
        magnitude = self.base ** (-torch.arange(n, device=self.freqs.device).float() / n)
        turn = torch.rand(heads, 1, device=self.freqs.device) * 2 * math.pi
        direction = torch.cat((turn.expand(heads, n), turn.expand(heads, n) + math.pi / 2), 1)  # [H, D/2]
        self.freqs.copy_(torch.stack((direction.sin(), direction.cos())) * magnitude.repeat(2))

    def forward(self, grid: Grid) -> Terms:
        freqs = self.freqs if self.freqs.dtype == torch.float64 else self.freqs.float()
        y, x = grid.coordinates(freqs.device).to(freqs.dtype).unbind(-1)  # [h*w] each
        # Written out, not as a matrix product: autocast would round the angles.
        angle = y[:, None] * freqs[0, :, None] + x[:, None] * freqs[1, :, None]  # [H, h*w, D/2]
        return Terms(rotary=_rotary(angle, grid))


def _rotary(angle: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    angle = F.pad(angle, (0, 0, grid.prefix, 0))  # prefix rows: angle 0
    return angle.cos(), angle.sin()


def _bands(key: str, head_dim: int) -> int:
    if head_dim % 4:
        raise ValueError(
            f"{key} needs a head width divisible by 4 (pairs of channels over two axes), not {head_dim}; "
            "choose num_heads so that embed_dim / num_heads is a multiple of 4"
        )
    return head_dim // 4
