"""Taking an absolute embedding away while fine-tuning: its scale falls from 1 to exactly 0, and then it can be removed."""

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from vitrel.position import PositionEncoding, Terms


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

    def scale(self) -> Tensor:
        """The current scale, 0-d float."""
        return (1 - self.steps / self.fade_steps).clamp(min=0)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale()
        if self.training and torch.is_grad_enabled():
            self.steps += 1
        return x

    def fade_terms(self, encoding: PositionEncoding, grids: tuple, terms: Terms) -> Terms:
        """Forward hook for an encoding that adds to tokens."""
        return terms._replace(tokens=self(terms.tokens))

    def extra_repr(self) -> str:
        return f"fade_steps={self.fade_steps}"


def absolute_scale(model: nn.Module) -> float:
    """What the absolute embedding of a relativized model is multiplied with now: 1 where it is kept, 0 where there is none."""
    if _pos_embed(model) is None:
        return 0.0
    fade = getattr(model, "absolute_fade", None)
    return 1.0 if fade is None else fade.scale().item()


def drop_absolute(model: nn.Module, force: bool = False) -> nn.Module:
    """Remove the absolute embedding of a relativized model, in place, once it has faded: logits do not change.

    force: remove it whatever its scale. Raises ValueError for one that still acts, and where there is none.
    """
    if _pos_embed(model) is None:
        raise ValueError("the model has no absolute embedding (any more): there is nothing to drop")
    if (scale := absolute_scale(model)) and not force:
        raise ValueError(
            f"the absolute embedding still acts, at scale {scale:.3g}: train on, or pass force=True to lose it now"
        )
    model.pos_embed = model.absolute_fade = None  # type: ignore[assignment]
    return model


def _pos_embed(model: nn.Module) -> nn.Module | Tensor | None:
    if not hasattr(model, "pos_embed"):
        raise ValueError(f"{type(model).__name__} has no pos_embed: pass the model that relativize returned, unwrapped")
    return model.pos_embed
