"""Rotary frequencies on a grid larger than the training one: what `scaling=` of rope_axial and rope_mixed chooses.

s = grid / training grid along each axis, at least 1; a smaller grid changes nothing. none: as trained. linear: frequency / s
(position interpolation, arXiv 2306.15595). ntk: frequency s^(-t/(T-1)) for band t of T, which keeps the fastest band and
divides the slowest by s (NTK-aware: base times s^(d/(d-2)), d = 2T). yarn (arXiv 2309.00071, sec. 3.2 to 3.4): bands that turn
more than 32 times over the training grid are kept, those of less than one turn are divided by s, a ramp between; logits gain
(0.1 ln s + 1)^2, s the geometric mean of both axes. These turns were chosen for language: at 1 radian a patch, 14 patches make
2.2 turns, so that there yarn is nearly linear. `yarn_turns` moves the ramp. `scaling_strength` p takes s^p in the place
of s: with 0.5 a grid of twice the side is read as one of 1.4 times.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrel.constants import constant
from vitrel.grid import Grid

SCALINGS = ("none", "linear", "ntk", "yarn")
OPTIONS = {"scaling": "rule", "scaling_strength": "strength", "yarn_turns": "turns"}  # of encodings: fields of Scaling


class Scaling(NamedTuple):
    """One of SCALINGS for `key`, trained on `trained`; turns: below the first yarn divides, above the second it keeps.

    strength: the power of s.
    """

    key: str
    rule: str
    trained: Grid
    turns: tuple[float, float]
    strength: float = 1.0

    def checked(self) -> "Scaling":
        """Itself, or ValueError naming what is wrong."""
        if self.rule not in SCALINGS:
            raise ValueError(f"{self.key} scaling {self.rule!r} is unknown; choose one of {', '.join(SCALINGS)}")
        if len(self.turns) != 2 or not self.turns[0] < self.turns[1]:
            raise ValueError(f"{self.key} needs yarn_turns=(slow, fast) with slow < fast, not {self.turns}")
        if not 0 < self.strength < math.inf:
            raise ValueError(f"{self.key} needs a scaling_strength above 0, not {self.strength}")
        return self

    def switched(self, options: Mapping[str, Any]) -> "Scaling":
        """The same with those of OPTIONS that are given. ValueError as `checked`."""
        return self._replace(**{own: options[name] for name, own in OPTIONS.items() if name in options}).checked()

    @property
    def key_of_constants(self) -> tuple[str, tuple[int, int], float, float, float]:
        """What constants that depend on it are kept by."""
        return self.rule, self.trained[:2], float(self.turns[0]), float(self.turns[1]), float(self.strength)

    def frequencies(self, freqs: Tensor, bands: int, grid: Grid) -> Tensor:
        """freqs [2, .., P], radians per patch along y and x, for use on `grid`: bands 0, 1, .. of so many, repeated."""
        if self.rule == "none":
            return freqs
        growth = _growth(*grid[:2], self.trained[:2], float(self.strength), device=freqs.device).to(freqs.dtype)
        growth = growth.view(2, *(1,) * (freqs.dim() - 1))
        if self.rule == "linear":
            return freqs / growth
        if self.rule == "ntk":
            band = torch.arange(freqs.shape[-1], device=freqs.device) % bands
            return freqs * growth ** (-band.to(freqs.dtype) / max(bands - 1, 1))
        turns = torch.stack((freqs[0] * self.trained.h, freqs[1] * self.trained.w)).abs() / (2 * math.pi)
        divided = 1 - ((turns - self.turns[0]) / (self.turns[1] - self.turns[0])).clamp(0, 1)
        return freqs * (1 - divided * (1 - 1 / growth))

    def temperature(self, grid: Grid, device: torch.device) -> Tensor | None:
        """What it multiplies content logits by on `grid`, 0-d, or None."""
        return _temperature(*grid[:2], self.trained[:2], float(self.strength), device=device) if self.rule == "yarn" else None

    def resized(self, grid: Grid) -> dict[str, int]:
        """PositionEncoding.resized: no parameter is resampled, the frequencies are read by a rule."""
        grows = grid.h > self.trained.h or grid.w > self.trained.w
        strength = "" if self.strength == 1 else f" {self.strength:g}"
        return {f"{self.key} {self.rule}{strength}": 0} if grows and self.rule != "none" else {}


@constant
def _growth(h: int, w: int, trained: tuple[int, int], strength: float, device: torch.device) -> Tensor:
    one = torch.ones((), device=device)  # tensors: a float would cost a compiled graph per size
    return torch.stack((one * h / trained[0], one * w / trained[1])).clamp(min=1) ** strength  # [2]


@constant
def _temperature(h: int, w: int, trained: tuple[int, int], strength: float, device: torch.device) -> Tensor:
    return (0.1 * _growth(h, w, trained, strength, device=device).log().mean() + 1).square()
