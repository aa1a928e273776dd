"""Attention temperature that grows with the number of tokens (arXiv 2306.08645; with power 1: arXiv 2202.12172).

The content, query and key terms of the logits are multiplied by (log N / log N_train)^p, p = 1/2 by default. With more keys the
softmax becomes flatter, and the factor counters that. It is exactly 1 at the training grid, and never multiplies the biases of
tables. It is an option of every encoding: `create_position(..., temperature="log_n")`, or a number for the power p. In a
window, whose N is fixed, it has no effect.
"""

import torch
from torch import Tensor, nn

from vitrel.constants import constant
from vitrel.grid import Grid
from vitrel.position.terms import PositionEncoding, Terms, check_choice, combine

POWERS = {"none": 0.0, "log_n": 0.5}


def set_temperature(encoding: PositionEncoding, rule: str | float, grid: Grid) -> None:
    """Set the temperature rule of `encoding`, trained on `grid`: "none", "log_n" or a power; replaces an earlier one.

    Works by a forward hook, so parameters keep their names and a trained encoding can be changed. ValueError for any other
    value.
    """
    checked_power(rule)
    for key, hook in [*encoding._forward_hooks.items()]:
        if isinstance(hook, LogN):
            del encoding._forward_hooks[key], encoding._forward_hooks_with_kwargs[key]
    vars(encoding).pop("temperature", None)  # uncovers the class attribute, "none"
    if rule != "none":
        encoding.temperature = rule
        encoding.register_forward_hook(LogN(grid, rule), with_kwargs=True)


def checked_power(rule: str | float) -> float:
    """Return the power p: 0 for "none", 1/2 for "log_n", a finite number above 0 itself; ValueError for anything else."""
    if isinstance(rule, int | float) and not isinstance(rule, bool):
        if not 0 < rule < float("inf"):
            raise ValueError(f"position option temperature={rule!r} must be a finite number greater than 0, or 'none'")
        return float(rule)
    return POWERS[check_choice("position", "temperature", rule, tuple(POWERS))]


class LogN:
    """Forward hook of an encoding that multiplies Terms.temperature by (log N / log N_train)^p (see `temperature`)."""

    def __init__(self, grid: Grid, rule: str | float = "log_n"):
        self.trained, self.rule = grid, rule

    def __call__(self, encoding: nn.Module, args: tuple, kwargs: dict, terms: Terms) -> Terms:
        device = next((t.device for t in (*encoding.parameters(), *encoding.buffers())), None)
        grid = args[0] if args else kwargs["grid"]
        return combine(terms, Terms(temperature=temperature(self.trained, grid, self.rule, device)))


def temperature(trained: Grid, grid: Grid, rule: str | float = "log_n", device: torch.device | None = None) -> torch.Tensor:
    """Return the attention temperature (log N / log N_train)^p on `grid`, 0-d float32.

    N = grid.tokens, counted as at least 2 since log 1 = 0. trained: the training grid. rule: "none" (p = 0), "log_n"
    (1/2) or p.
    """
    return _temperature(*grid, *trained, checked_power(rule), device=device)


@constant
def _temperature(h: int, w: int, prefix: int, th: int, tw: int, tp: int, power: float, device: torch.device) -> Tensor:
    one = torch.ones((), device=device)  # a float would cost a graph per size
    current, training = ((one * grid.tokens).clamp(min=2).log() for grid in (Grid(h, w, prefix), Grid(th, tw, tp)))
    return (current / training) ** power
