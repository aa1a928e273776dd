"""Fade: an absolute embedding whose scale falls from 1 to exactly 0 while a model is fine-tuned."""

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn


@register_notrace_module  # a leaf of fx graphs, which counts when the graph runs
class Fade(nn.Module):
    """x -> x * max(0, 1 - steps / fade_steps), steps being the forward passes in training mode so far.

    `steps` is an integer buffer of the state dict, so a resumed run goes on where it stopped. A forward pass without gradients
    does not count; with gradient accumulation every micro-batch does. Evaluation uses the scale that training has reached.
    """

    steps: Tensor

    def __init__(self, fade_steps: int, device: torch.device | str | None = None):
        super().__init__()
        if isinstance(fade_steps, bool) or not isinstance(fade_steps, int) or fade_steps < 1:
            raise ValueError(
                f"absolute='fade' needs fade_steps, the training steps from 1 to 0, a whole number from 1, not {fade_steps!r}: "
                "about half of the fine-tuning's steps is a start"
            )
        self.fade_steps = fade_steps
        self.register_buffer("steps", torch.zeros((), dtype=torch.long, device=device))

    def reset_parameters(self) -> None:
        """Start anew, at scale 1."""
        self.steps.zero_()

    def scale(self) -> Tensor:
        """The current scale, 0-d float."""
        return (1 - self.steps / self.fade_steps).clamp(min=0)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale()
        if self.training and torch.is_grad_enabled():
            self.steps += 1
        return x

    def extra_repr(self) -> str:
        return f"fade_steps={self.fade_steps}"
