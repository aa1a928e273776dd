"""Attention temperature that grows with the number of tokens (arXiv 2306.08645; with power 1: arXiv 2202.12172).

The content, query and key terms of the logits are multiplied by (log N / log N_train)^p, p = 1/2 by default. With more keys the
softmax becomes flatter, and the factor counters that. It is exactly 1 at the training grid, and never multiplies the biases of
tables. It is an option of every encoding: `create_position(..., logit_scale="log_n")`, or a number for the power p. In a
window, whose N is fixed, it has no effect.
"""

import torch
from torch import Tensor, nn

from vitrel.constants import constant
from vitrel.grid import Grid
from vitrel.position.terms import PositionEncoding, Terms, check_choice, combine

POWERS = {"none": 0.0, "log_n": 0.5}


def set_logit_scale(encoding: PositionEncoding, logit_scale: str | float, grid: Grid) -> None:
    """Set the temperature rule of `encoding`, trained on `grid`: "none", "log_n" or a power; replaces an earlier one.

    Works by a forward hook, so parameters keep their names and a trained encoding can be changed. ValueError for any other
    value.
    """
    checked_power(logit_scale)
    for key, hook in [*encoding._forward_hooks.items()]:
        if isinstance(hook, LogN):
            del encoding._forward_hooks[key], encoding._forward_hooks_with_kwargs[key]
    vars(encoding).pop("logit_scale", None)  # uncovers the class attribute, "none"
    if logit_scale != "none":
        encoding.logit_scale = logit_scale
        encoding.register_forward_hook(LogN(grid, logit_scale), with_kwargs=True)


def checked_power(logit_scale: str | float) -> float:
    """Return the power p for "none" (0), "log_n" (1/2) or a number above 0; ValueError for anything else."""
    if isinstance(logit_scale, int | float) and not isinstance(logit_scale, bool):
        if not 0 < logit_scale < float("inf"):
            raise ValueError(f"position option logit_scale={logit_scale!r} must be greater than 0, or 'none'")
        return float(logit_scale)
    return POWERS[check_choice("position", "logit_scale", logit_scale, tuple(POWERS))]


class LogN:
    """Forward hook of an encoding that multiplies Terms.temperature by (log N / log N_train)^p (see `temperature`)."""

    def __init__(self, grid: Grid, logit_scale: str | float = "log_n"):
        self.trained, self.logit_scale = grid, logit_scale

    def __call__(self, encoding: nn.Module, args: tuple, kwargs: dict, terms: Terms) -> Terms:
        device = next((t.device for t in (*encoding.parameters(), *encoding.buffers())), None)
        grid = args[0] if args else kwargs["grid"]
        return combine(terms, Terms(temperature=temperature(self.trained, grid, self.logit_scale, device)))


def temperature(
    trained: Grid, grid: Grid, logit_scale: str | float = "log_n", device: torch.device | None = None
) -> torch.Tensor:
    """Return the attention temperature (log N / log N_train)^p on `grid`, 0-d float32.

    N = grid.tokens, counted as at least 2 since log 1 = 0. trained: the training grid. logit_scale: "none" (p = 0), "log_n"
    (1/2) or p.
    """
    return _temperature(*grid, *trained, checked_power(logit_scale), device=device)


@constant
def _temperature(h: int, w: int, prefix: int, th: int, tw: int, tp: int, power: float, device: torch.device) -> Tensor:
    one = torch.ones((), device=device)  # a float would cost a graph per size
    current, training = ((one * grid.tokens).clamp(min=2).log() for grid in (Grid(h, w, prefix), Grid(th, tw, tp)))
    return (current / training) ** power
