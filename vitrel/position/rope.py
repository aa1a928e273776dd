"""rope_axial, rope_mixed: rotary position in two dimensions (RoPE, arXiv 2104.09864; 2-D: RoPE-ViT, arXiv 2403.13298),
angle = y theta_t or x theta_t (axial), f_y y + f_x x (mixed).

Channels p and p + D/2 of q and k form a pair, rotated by an angle that is linear in the token's integer position (y, x), so the
logit depends on the offset alone. rope_axial: half of the pairs rotate with the row, half with the column, theta_t =
base^(-4t/D), t = 0..D/4-1, base 100. rope_mixed: the frequencies f_y and f_x of every pair are learned per head and layer,
initialized with base 10 and one random direction per head. D is a multiple of 4. On a training grid of one row or column (a
sequence) any even D serves; where 4 does not divide D, rope_axial rotates all pairs along that axis, theta_t = base^(-2t/D).
Published code stores pairs interleaved and the column first; the loaders of this package permute the weights. Prefix tokens are
not rotated. Angles are computed in at least float32, in a float64 model in float64.

A larger grid is evaluated at angles that were not trained, unless a policy lowers the frequencies
(vitrel.position.rope_policies). rope_axial can also count positions on a fixed `reference` grid, y h_ref / h instead of y, as
EVA-02's code does (arXiv 2303.11331).
"""

import abc
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid
from vitrel.position.bands import band_frequencies, of_axes, split_axes
from vitrel.position.rope_policies import POLICIES, RotaryPolicy
from vitrel.position.terms import Factory, PositionEncoding, Terms, check_pair, upcast


class RotaryEncoding(PositionEncoding, abc.ABC):
    """Abstract base class of rope_axial and rope_mixed: rotations, whose frequencies policies but "keep" lower on larger grids.

    Args:
        grid: the training grid.
        policy_strength: p: policies use s^p for s = side / training side; below 1 they lower frequencies less.
        yarn_turns: numbers of turns over the training grid below which yarn divides a band by s, and above which it keeps it.
        perturbation: shift_coords, jitter_coords and rescale_coords of PositionEncoding.

    Attributes:
        key: of the class: name of the encoding.

    Raises:
        ValueError: policy_strength is not finite and above 0, or yarn_turns are not above 0 and ascending.
    """

    key: ClassVar[str]
    rotates = True
    policies: tuple[str, ...] = POLICIES
    grid: Grid
    positive = ("base",)
    switchable = ("policy", "policy_strength", "yarn_turns")

    def __init__(
        self, grid: Grid, policy_strength: float, yarn_turns: tuple[float, float], *perturbation: float | None
    ) -> None:
        super().__init__(*perturbation)
        self.grid, self.policy_strength, self.yarn_turns = grid, policy_strength, yarn_turns
        self.rotary_policy.check(self.key)

    @property
    def rotary_policy(self) -> RotaryPolicy:
        """The policy in use, with the encoding's training grid, yarn_turns and policy_strength."""
        return RotaryPolicy(self.policy, self.grid, self.yarn_turns, self.policy_strength)

    @property
    def refers_to_grid(self) -> bool:
        return self.policy != "keep" or super().refers_to_grid

    def switch(self, options: Mapping[str, Any]) -> set[str]:
        """Change `policy`, `policy_strength` and `yarn_turns`, and return the names of those applied.

        Other options are ignored; with the option `reference`, which excludes policies, all are.

        Raises:
            ValueError: policy_strength is not finite and above 0, or yarn_turns not ascending above 0; nothing is changed then.
        """
        if not self.policies:
            return set()
        strength, turns = (options.get(name, getattr(self, name)) for name in self.switchable[1:])
        self.rotary_policy._replace(strength=strength, turns=turns).check(self.key)
        applied = super().switch(options)
        self.policy_strength, self.yarn_turns = strength, turns
        return applied | (options.keys() & {*self.switchable[1:]})

    def resampled(self, grid: Grid) -> dict[str, int]:
        """Return {"key policy": 0} if a policy changes the frequencies on `grid`, else {}: no parameter is interpolated.

        A policy_strength other than 1 follows the policy's name, as in "rope_axial ntk 0.5".
        """
        strength = "" if self.policy_strength == 1 else f" {self.policy_strength:g}"
        return {f"{self.key} {self.policy}{strength}": 0} if self.rotary_policy.acts_on(grid) else {}

    def unseen(self, grid: Grid) -> float:
        return 0.0 if self.policy == "linear" else super().unseen(grid)


class RopeAxial(RotaryEncoding):
    """Rotation by fixed frequencies, first half of the channel pairs (p, p + D/2) by the row, second half by the column.

    Prefix tokens are not rotated.

    Args:
        base: of the fixed frequencies base^(-4t/D), t = 0..D/4-1, in radians per patch; D = head_dim.
        policy_strength: p: policies use s^p for s = side / training side; below 1 they lower frequencies less.
        yarn_turns: numbers of turns over the training grid below which yarn divides a band by s, and above which it keeps it.
        reference: side or (h, w) in patches of a fixed grid to which positions are scaled, y h_ref / h instead of y; it
            excludes policies. None: positions are counted on the grid itself.
        shift_coords: in training, each axis moves by a random number of patches up to this, either way; None: no shift.
        jitter_coords: s; in training, each axis is multiplied by its own random factor in 1/s..s; None: no stretch.
        rescale_coords: s; in training, both axes are multiplied by one random factor in 1/s..s; None: no scale.

    Raises:
        ValueError: head_dim is not divisible by 4 (by 2 on a training grid of one row or column), or an option has an
            impossible value.
    """

    key = "rope_axial"

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        base: float = 100.0,
        policy_strength: float = 1.0,
        yarn_turns: tuple[float, float] = (1.0, 32.0),
        reference: int | tuple[int, int] | None = None,
        shift_coords: float | None = None,
        jitter_coords: float | None = None,
        rescale_coords: float | None = None,
        **factory: Unpack[Factory],
    ):
        super().__init__(grid, policy_strength, yarn_turns, shift_coords, jitter_coords, rescale_coords)
        self.base = base
        self.reference = None if reference is None else check_pair("rope_axial", "reference", reference)
        if self.reference is not None:
            self.policies = ()
        self.axes, self.bands = split_axes("rope_axial", "head width", head_dim, grid)
        self.mark_device(factory.get("device"), factory.get("dtype"))

    def terms(self, grid: Grid) -> Terms:
        options = (self.bands, float(self.base), *self.rotary_policy.geometry_key, self.reference or (0, 0), self.precision)
        device = self.device_marker.device
        if self.perturbs:
            theta = _frequencies(*grid[:2], *options, device=device)
            rotary = rotary_terms(self._perturbed(grid.coordinates(device))[..., None] * theta, self.axes, grid)
        else:
            rotary = _axial_rotation(*grid, *options, self.axes, device=device)
        return Terms(rotary=tuple(rotary), temperature=self.rotary_policy.temperature(grid, device))

    def resampled(self, grid: Grid) -> dict[str, int]:
        if self.reference is not None and grid[:2] != self.grid[:2]:
            return {"rope_axial reference": 0}
        return super().resampled(grid)

    def unseen(self, grid: Grid) -> float:
        return 0.0 if self.reference is not None else super().unseen(grid)


class Rotary(NamedTuple):
    """Cosines and sines of the angles of all tokens, [H, N, D/2] each, or [1, N, D/2] for all heads alike."""

    cos: Tensor  # [H|1, N, D/2]; 1 on prefix rows
    sin: Tensor  # [H|1, N, D/2]; 0 on prefix rows


@cached_geometry
def _frequencies(
    h: int, w: int, bands: int, base: float, policy: str, trained: tuple[int, int], slow: float, fast: float,
    strength: float, reference: tuple[int, int], dtype: str, device: torch.device,
) -> Tensor:  # fmt: skip
    """Return the radians per patch along y and x on an h x w grid, [2, bands]: those of the policy times reference / side.

    There is no such factor for reference (0, 0). `policy` to `strength` are those of RotaryPolicy, (slow, fast) its turns.
    """
    lowered = RotaryPolicy(policy, Grid(*trained), (slow, fast), strength)
    theta = lowered.frequencies(band_frequencies(bands, base, dtype, device).expand(2, -1), bands, Grid(h, w))
    if reference == (0, 0):
        return theta
    one = torch.ones_like(theta[0, 0])  # a tensor: a float would cost a compiled graph per size
    return theta * torch.stack([one * n / side for n, side in zip(reference, (h, w), strict=True)])[:, None]


@cached_geometry
def _axial_rotation(
    h: int, w: int, prefix: int, bands: int, base: float, policy: str, trained: tuple[int, int], slow: float, fast: float,
    strength: float, reference: tuple[int, int], dtype: str, axes: str, device: torch.device,
) -> Rotary:  # fmt: skip
    """Return the rotation of every token of rope_axial without perturbation: `rotary_terms` of angles by `_frequencies`."""
    theta = _frequencies(h, w, bands, base, policy, trained, slow, fast, strength, reference, dtype, device=device)
    return rotary_terms(Grid(h, w).coordinates(device)[..., None] * theta, axes, Grid(h, w, prefix))


@cached_geometry
def _positions(h: int, w: int, prefix: int, device: torch.device) -> Tensor:
    """Return row and column (y, x) of every token, [N, 2] float32; 0 for prefix tokens."""
    return F.pad(Grid(h, w).coordinates(device).float(), (0, 0, prefix, 0))


class RopeMixed(RotaryEncoding):
    """Rotation of channel pairs (p, p + D/2), not of prefix tokens, by angles f_y y + f_x x, f learned per head and pair.

    Args:
        base: of the magnitudes base^(-4t/D) at which the learned frequencies start (`reset_parameters`).
        policy_strength: p: policies use s^p for s = side / training side; below 1 they lower frequencies less.
        yarn_turns: numbers of turns over the training grid below which yarn divides a band by s, and above which it keeps it.
        shift_coords: in training, each axis moves by a random number of patches up to this, either way; None: no shift.
        jitter_coords: s; in training, each axis is multiplied by its own random factor in 1/s..s; None: no stretch.
        rescale_coords: s; in training, both axes are multiplied by one random factor in 1/s..s; None: no scale.

    Attributes:
        freqs: learned frequencies [2, H, D/2] in radians per patch; freqs[0] along y, freqs[1] along x.

    Raises:
        ValueError: head_dim is not divisible by 4 (by 2 on a training grid of one row or column), or a number of a
            policy is impossible.
    """

    key = "rope_mixed"
    lr_scale = 2.0  # radians per patch: an error of a tenth is half a turn over 30 patches

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        base: float = 10.0,
        policy_strength: float = 1.0,
        yarn_turns: tuple[float, float] = (1.0, 32.0),
        shift_coords: float | None = None,
        jitter_coords: float | None = None,
        rescale_coords: float | None = None,
        **factory: Unpack[Factory],
    ):
        super().__init__(grid, policy_strength, yarn_turns, shift_coords, jitter_coords, rescale_coords)
        self.base = base
        split_axes("rope_mixed", "head width", head_dim, grid)
        self.freqs = nn.Parameter(torch.empty(2, num_heads, head_dim // 2, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the frequencies (f_y, f_x) of channel pairs t and t + D/4 with magnitude base^(-4t/D), t = 0..D/4-1.

        Pairs t lie along a direction drawn at random for the head, pairs t + D/4 at right angles to it.
        """
        _, heads, pairs = self.freqs.shape
        n = math.ceil(pairs / 2)
        magnitude = band_frequencies(n, self.base, "float32", self.freqs.device)
        angle = torch.rand(heads, 1, device=self.freqs.device) * 2 * math.pi
        direction = torch.cat((angle.expand(heads, n), angle.expand(heads, n) + math.pi / 2), 1)[:, :pairs]  # [H, D/2]
        self.freqs.copy_(torch.stack((direction.sin(), direction.cos())) * magnitude.repeat(2)[:pairs])

    def terms(self, grid: Grid) -> Terms:
        freqs = upcast(self.freqs)
        freqs = self.rotary_policy.frequencies(freqs, math.ceil(freqs.shape[-1] / 2), grid)
        at = _positions(*grid, device=freqs.device).to(freqs.dtype)  # [N, 2]
        if self.perturbs:
            at = torch.cat((at[: grid.prefix], self._perturbed(at[grid.prefix :])))
        y, x = at.unbind(-1)  # [N] each
        # Not a matrix product, in which autocast would round the angles.
        angle = y[:, None] * freqs[0, :, None] + x[:, None] * freqs[1, :, None]  # [H, N, D/2]
        return Terms(rotary=(angle.cos(), angle.sin()), temperature=self.rotary_policy.temperature(grid, freqs.device))


def rotary_terms(angle: Tensor, axes: str, grid: Grid) -> Rotary:
    """Return cosines and sines of the tokens of `grid`, [1, N, D/2] each; the angle of prefix tokens is 0.

    Args:
        angle: [h*w, 2, T] in radians, of the patches along y and x in T bands.
        axes: "hw", "h" or "w", the axes that have channels (`split_axes`).
        grid: of the tokens.
    """
    angle = F.pad(of_axes(axes, angle, 1).flatten(1)[None], (0, 0, grid.prefix, 0))  # prefix rows: angle 0
    return Rotary(angle.cos(), angle.sin())
