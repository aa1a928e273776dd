"""Fade: a factor of the absolute embedding that falls from 1 to 0 during fine-tuning."""

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn


@register_notrace_module  # a leaf of fx graphs, so that it counts when the graph runs
class Fade(nn.Module):
    """Multiply x by max(0, 1 - steps / fade_steps), where `steps` counts the forward passes in training mode so far.

    The first pass has scale 1. Forward passes without gradients are not counted; with gradient accumulation every micro-batch
    is. Evaluation uses the scale that training has reached.

    Args:
        fade_steps: number of forward passes until the scale is 0, a whole number of 1 or more.
        device: of the buffer.

    Attributes:
        steps: integer buffer in the state dict, so a resumed run continues where it stopped.

    Raises:
        ValueError: fade_steps is not a whole number of 1 or more.
    """

    steps: Tensor

    def __init__(self, fade_steps: int, device: torch.device | str | None = None):
        super().__init__()
        if isinstance(fade_steps, bool) or not isinstance(fade_steps, int) or fade_steps < 1:
            raise ValueError(
                f"an absolute embedding fades in a number of training steps of 1 or more, not {fade_steps!r}; about half of "
                "the fine-tuning steps is a reasonable value"
            )
        self.fade_steps = fade_steps
        self.register_buffer("steps", torch.zeros((), dtype=torch.long, device=device))

    def reset_parameters(self) -> None:
        """Set `steps` to 0, so that the scale is 1."""
        self.steps.zero_()

    def scale(self) -> Tensor:
        """Return the current scale, max(0, 1 - steps / fade_steps), 0-d float."""
        return (1 - self.steps / self.fade_steps).clamp(min=0)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of any shape times the current scale; then, in training mode with gradients enabled, add 1 to `steps`."""
        x = x * self.scale()
        if self.training and torch.is_grad_enabled():
            self.steps += 1
        return x
