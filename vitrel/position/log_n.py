"""log_n: an attention temperature that grows with the number of tokens (arXiv 2306.08645; log n: arXiv 2202.12172),
logits of content times sqrt(log N / log N_train).

With more keys the softmax flattens; a factor that grows with log N counters it. It is an option of every encoding, not an
encoding: `create_position(..., logit_scale="log_n")`. At the training grid it is exactly 1; the biases of tables are not
scaled. Inside a window N never changes, so there it does nothing.
"""

import torch
from torch import Tensor, nn

from vitrel.constants import constant
from vitrel.grid import Grid
from vitrel.position.terms import PositionEncoding, Terms, check_choice, combine


def apply_logit_scale(encoding: PositionEncoding, logit_scale: str, grid: Grid) -> PositionEncoding:
    """`encoding`, whose terms are scaled from now on as `logit_scale` says, trained on `grid`; ValueError for an unknown one.

    A forward hook, so that no parameter is renamed and the option can be switched on for trained weights.
    """
    if check_choice("position", "logit_scale", logit_scale, ("none", "log_n")) == "log_n":
        encoding.logit_scale = logit_scale
        encoding.register_forward_hook(LogN(grid), with_kwargs=True)
    return encoding


class LogN:
    """Forward hook of an encoding: multiplies Terms.temperature by sqrt(log N / log N_train), N = grid.tokens."""

    def __init__(self, grid: Grid):
        self.trained = grid

    def __call__(self, encoding: nn.Module, args: tuple, kwargs: dict, terms: Terms) -> Terms:
        device = next((t.device for t in (*encoding.parameters(), *encoding.buffers())), None)
        found = temperature(self.trained, args[0] if args else kwargs["grid"], device)
        return combine(terms, Terms(temperature=found))


def temperature(trained: Grid, grid: Grid, device: torch.device | None = None) -> torch.Tensor:
    """sqrt(log N / log N_train), 0-d float32; N of at least 2, since a single token has no temperature."""
    return _temperature(*grid, *trained, device=device)


@constant
def _temperature(h: int, w: int, prefix: int, th: int, tw: int, tp: int, device: torch.device) -> Tensor:
    one = torch.ones((), device=device)  # a float would cost a graph per size
    now, then = ((one * grid.tokens).clamp(min=2).log() for grid in (Grid(h, w, prefix), Grid(th, tw, tp)))
    return (now / then).sqrt()
