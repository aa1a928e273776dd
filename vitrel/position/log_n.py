"""log_n: an attention temperature that grows with the number of tokens (arXiv 2306.08645; log n: arXiv 2202.12172),
logits of content times (log N / log N_train)^p, p = 1/2.

With more keys the softmax flattens; a factor that grows with log N counters it. It is an option of every encoding, not an
encoding: `create_position(..., logit_scale="log_n")`, or a number, the power p (1: arXiv 2202.12172). At the training grid it
is exactly 1; the biases of tables are not scaled. Inside a window N never changes, so there it does nothing.
"""

import torch
from torch import Tensor, nn

from vitrel.constants import constant
from vitrel.grid import Grid
from vitrel.position.terms import PositionEncoding, Terms, check_choice, combine

POWERS = {"none": 0.0, "log_n": 0.5}


def set_logit_scale(encoding: PositionEncoding, logit_scale: str | float, grid: Grid) -> None:
    """Scales the terms of `encoding`, trained on `grid`, from now on as `logit_scale` says; ValueError for an unknown one.

    A forward hook, so that no parameter is renamed and the option can be switched for trained weights; "none" takes it away.
    """
    checked_power(logit_scale)
    for key, hook in [*encoding._forward_hooks.items()]:
        if isinstance(hook, LogN):
            del encoding._forward_hooks[key], encoding._forward_hooks_with_kwargs[key]
    vars(encoding).pop("logit_scale", None)  # the class's own is "none"
    if logit_scale != "none":
        encoding.logit_scale = logit_scale
        encoding.register_forward_hook(LogN(grid, logit_scale), with_kwargs=True)


def checked_power(logit_scale: str | float) -> float:
    """The power p that `logit_scale` stands for; ValueError for anything else than "none", "log_n" and a number above 0."""
    if isinstance(logit_scale, int | float) and not isinstance(logit_scale, bool):
        if not 0 < logit_scale < float("inf"):
            raise ValueError(f"position option logit_scale={logit_scale!r} must be greater than 0, or 'none'")
        return float(logit_scale)
    return POWERS[check_choice("position", "logit_scale", logit_scale, tuple(POWERS))]


class LogN:
    """Forward hook of an encoding: multiplies Terms.temperature by (log N / log N_train)^p, N = grid.tokens."""

    def __init__(self, grid: Grid, logit_scale: str | float = "log_n"):
        self.trained, self.logit_scale = grid, logit_scale

    def __call__(self, encoding: nn.Module, args: tuple, kwargs: dict, terms: Terms) -> Terms:
        device = next((t.device for t in (*encoding.parameters(), *encoding.buffers())), None)
        found = temperature(self.trained, args[0] if args else kwargs["grid"], self.logit_scale, device)
        return combine(terms, Terms(temperature=found))


def temperature(
    trained: Grid, grid: Grid, logit_scale: str | float = "log_n", device: torch.device | None = None
) -> torch.Tensor:
    """(log N / log N_train)^p, 0-d float32; N of at least 2, since a single token has no temperature."""
    return _temperature(*grid, *trained, checked_power(logit_scale), device=device)


@constant
def _temperature(h: int, w: int, prefix: int, th: int, tw: int, tp: int, power: float, device: torch.device) -> Tensor:
    one = torch.ones((), device=device)  # a float would cost a graph per size
    now, then = ((one * grid.tokens).clamp(min=2).log() for grid in (Grid(h, w, prefix), Grid(th, tw, tp)))
    return (now / then) ** power
