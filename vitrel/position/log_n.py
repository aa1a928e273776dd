"""Attention temperature that grows with the number of tokens (arXiv 2306.08645; with power 1: arXiv 2202.12172).

The content, query and key terms of the logits are multiplied by (log N / log N_train)^p, p = 1/2 by default. With more keys the
softmax becomes flatter, and the factor counters that. It is exactly 1 at the training grid, and never multiplies the biases of
tables. It is an option of every encoding: `create_position(..., temperature="log_n")`, or a number for the power p. In a
window, whose N is fixed, it has no effect.
"""

import torch
from torch import Tensor

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid

POWERS = {"none": 0.0, "log_n": 0.5}


def checked_power(power: str | float) -> float:
    """Return the power p that the option `temperature` gives: 0 for "none", 1/2 for "log_n", or the number itself.

    Raises:
        ValueError: it is another string, or a number that is not finite and above 0.
    """
    if isinstance(power, int | float) and not isinstance(power, bool):
        if not 0 < power < float("inf"):
            raise ValueError(f"position option temperature={power!r} must be a finite number greater than 0, or 'none'")
        return float(power)
    if power not in POWERS:
        raise ValueError(f"position option temperature={power!r} is unknown; choose one of {', '.join(POWERS)}")
    return POWERS[power]


@cached_geometry
def log_n_temperature(h: int, w: int, prefix: int, trained: tuple[int, ...], power: float, device: torch.device) -> Tensor:
    """Return (log N / log N_train)^power on a grid, 0-d float32; `trained` is (h, w, prefix) of the training grid.

    N and N_train count as at least 2 tokens, since log 1 = 0.
    """
    one = torch.ones((), device=device)  # a float would cost a graph per size
    current, training = ((one * grid.tokens).clamp(min=2).log() for grid in (Grid(h, w, prefix), Grid(*trained)))
    return (current / training) ** power
