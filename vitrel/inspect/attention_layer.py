"""One layer of attention as it was computed: `Layer`, and how it is made from logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrel.grid import Grid


class Layer(NamedTuple):
    """What one layer of attention did with a batch of images. W windows of N slots each; one where attention is global.

    `content` is the same layer without position: the softmax of the same q and k under the same mask, without tables, rotation
    and query bias. A field of view (xpos, lookhere) is a table, so `content` sees what it hides. A scale that depends on the
    grid (log_n, yarn: `Terms.temperature`) is 1 there; a constant one (deberta) stays, as does the learned scale of
    cosine attention. What position adds to tokens is in q and k, and stays too. `position` is what it adds to the logits.
    """

    name: str  # path of the module
    grid: Grid  # tokens of the image at this layer, prefix tokens included
    window: tuple[int, int] | None  # None: global
    shift: tuple[int, int]
    tokens: Tensor  # [W, N] index of the token (row-major, prefix first) in every slot of every window, -1 for padding
    weights: Tensor  # [B, W, H, N, N] float32, those the model used; rows of padding are 0
    content: Tensor | None  # [B, W, H, N, N] float32; None where only weights were asked for
    position: Tensor | None  # [B, W, H, N, N] float32, 0 where not visible; None likewise
    visible: Tensor | None = None  # [B, W, H, N, N] bool: both tokens real, hidden by neither mask nor encoding; None: all
    stride: tuple[float, float] = (1.0, 1.0)  # pixels between the centres of neighbouring tokens, (h, w)
    image: tuple[int, int] | None = None  # pixels (h, w); None: the grid times the stride

    @property
    def patches(self) -> Tensor:
        """Which slots hold a patch of the image, neither padding nor a prefix token, [W, N] bool."""
        return self.tokens >= self.grid.prefix

    def cpu(self) -> "Layer":
        """The same layer with every tensor on the CPU."""
        return self._make(field.cpu() if isinstance(field, Tensor) else field for field in self)


Where = tuple[str, Grid, tuple[int, int] | None, tuple[int, int], Tensor]  # the fields of Layer from name to tokens


def from_logits(where: Where, logits: Tensor, content: Tensor | None, visible: Tensor | None = None) -> Layer:
    """The layer at `where` from its logits [B, W, H, N, N] as the model had them, masked.

    content: logits without position, masked alike, or None to leave content and position out. visible: broadcastable to the
    logits, padding apart; None for all.
    """
    real = where[-1] >= 0  # [W, N]
    if not bool(real.all()):
        pairs = (real[:, :, None] & real[:, None])[None, :, None]  # [1, W, 1, N, N]
        visible = pairs if visible is None else pairs & visible
    visible = None if visible is None else visible.expand(logits.shape)
    weights = _softmax(logits, real)
    if content is None:
        return Layer(*where, weights, None, None, visible)
    position = (logits - content).float()
    position = position if visible is None else torch.where(visible, position, 0.0)
    return Layer(*where, weights, _softmax(content, real), position, visible)


def _softmax(logits: Tensor, real: Tensor) -> Tensor:
    """Rows of padding are 0, and those of a query that sees no key, as in `vitrel.ops.attention`."""
    logits = logits.float()
    blind = (logits == float("-inf")).all(-1, keepdim=True) | ~real[None, :, None, :, None]
    return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def model_name(model: nn.Module) -> str:
    """The name timm has for a model, or its class."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return cfg.get("architecture") or type(model).__name__


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While it lasts, `model` is in evaluation mode; afterwards every part is in the mode it was in, also after an error."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def replaced(module: nn.Module, **attributes: Any) -> Iterator[None]:
    """While it lasts, `module` has these attributes of its own; afterwards those it had, also after an error."""
    before = {name: module.__dict__[name] for name in attributes if name in module.__dict__}
    module.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)
