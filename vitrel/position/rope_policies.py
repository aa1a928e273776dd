"""Policies of rope_axial and rope_mixed, which lower rotary frequencies on a grid larger than the training grid.

s = side / training side along each axis, at least 1, so a smaller grid changes nothing.

- keep: frequencies as trained.
- linear: frequency / s (position interpolation, arXiv 2306.15595).
- ntk: frequency times s^(-t/(T-1)) for band t of T; keeps the fastest band and divides the slowest by s (NTK-aware: base times
  s^(d/(d-2)), d = 2T).
- yarn (arXiv 2309.00071, sec. 3.2 to 3.4): keeps bands that make more than 32 turns over the training grid, divides those with
  less than one turn by s, with a linear ramp between; multiplies content logits by (0.1 ln s + 1)^2, s being the geometric mean
  of both axes.

yarn's turns were chosen for language: at 1 radian per patch, 14 patches make 2.2 turns, so on such a grid yarn is nearly
linear. `yarn_turns` moves the ramp. `policy_strength` p replaces s by s^p: with 0.5 a grid of twice the side is read as one of
1.4 times the side.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid

POLICIES = ("keep", "linear", "ntk", "yarn")


class RotaryPolicy(NamedTuple):
    """A policy that changes rotary frequencies on grids larger than the training grid, with its settings.

    Args:
        name: one of POLICIES.
        trained: the training grid.
        turns: yarn divides by s the bands that make fewer turns over the training grid than the first, keeps those that make
            more than the second, and changes gradually between them.
        strength: p: policies use s^p, s = side / training side, or 1 where the side is not longer.
    """

    name: str
    trained: Grid
    turns: tuple[float, float]
    strength: float = 1.0

    def check(self, key: str) -> None:
        """Raise ValueError unless strength is finite and above 0, and turns two ascending numbers above 0.

        `key` is the encoding's name, for errors.
        """
        if len(self.turns) != 2 or not 0 < self.turns[0] < self.turns[1]:
            raise ValueError(f"{key} needs yarn_turns=(slow, fast) with 0 < slow < fast, not {self.turns}")
        if not 0 < self.strength < math.inf:
            raise ValueError(f"{key} needs a policy_strength above 0, not {self.strength}")

    @property
    def geometry_key(self) -> tuple[str, tuple[int, int], float, float, float]:
        """Return name, training grid, turns and strength as hashable arguments for functions with @cached_geometry."""
        return self.name, self.trained[:2], float(self.turns[0]), float(self.turns[1]), float(self.strength)

    def frequencies(self, freqs: Tensor, bands: int, grid: Grid) -> Tensor:
        """Return the frequencies that the policy uses on `grid`, of the shape of `freqs`.

        Args:
            freqs: trained frequencies [2, .., P] in radians per patch along y and x; pair p belongs to band p % bands.
            bands: number of bands.
            grid: the current grid.
        """
        if self.name == "keep":
            return freqs
        growth = _growth(*grid[:2], self.trained[:2], float(self.strength), device=freqs.device).to(freqs.dtype)
        growth = growth.view(2, *(1,) * (freqs.dim() - 1))
        if self.name == "linear":
            return freqs / growth
        if self.name == "ntk":
            band = torch.arange(freqs.shape[-1], device=freqs.device) % bands
            return freqs * growth ** (-band.to(freqs.dtype) / max(bands - 1, 1))
        turns = torch.stack((freqs[0] * self.trained.h, freqs[1] * self.trained.w)).abs() / (2 * math.pi)
        divided = 1 - ((turns - self.turns[0]) / (self.turns[1] - self.turns[0])).clamp(0, 1)
        return freqs * (1 - divided * (1 - 1 / growth))

    def temperature(self, grid: Grid, device: torch.device) -> Tensor | None:
        """Return yarn's factor on `grid` for all logits but biases, 0-d (Terms.temperature); None for other policies."""
        return _temperature(*grid[:2], self.trained[:2], float(self.strength), device=device) if self.name == "yarn" else None

    def acts_on(self, grid: Grid) -> bool:
        """Return whether the policy changes frequencies on `grid`: it is not "keep", and a side is longer than in training."""
        return self.name != "keep" and (grid.h > self.trained.h or grid.w > self.trained.w)


@cached_geometry
def _growth(h: int, w: int, trained: tuple[int, int], strength: float, device: torch.device) -> Tensor:
    """Return s^strength along y and along x, [2]; s is side / trained side, or 1 where the side is not longer."""
    one = torch.ones((), device=device)  # tensors: a float would cost a compiled graph per size
    return torch.stack((one * h / trained[0], one * w / trained[1])).clamp(min=1) ** strength  # [2]


@cached_geometry
def _temperature(h: int, w: int, trained: tuple[int, int], strength: float, device: torch.device) -> Tensor:
    """Return yarn's factor of content logits, (0.1 mean(log g) + 1)^2 over the two numbers g of `_growth`, 0-d."""
    return (0.1 * _growth(h, w, trained, strength, device=device).log().mean() + 1).square()
