"""Attention of our own layers, seen by a backend that notes what it is given and passes it on to the one in use."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.inspect.attention_layer import Layer, Where, from_logits, replaced
from vitrel.layers import Attention
from vitrel.ops import BACKENDS, attention, window_attention
from vitrel.ops.dispatch import Call
from vitrel.ops.reference import masked_logits
from vitrel.ops.window import axis_shift, windows
from vitrel.position import Terms
from vitrel.position.terms import no_autocast, upcast


def watch_own(model: nn.Module, see: Callable[[Layer], None], position: bool, stack: ExitStack) -> int:
    """Until `stack` closes, every `Attention` inside `model` shows each of its layers to `see`; returns their number.

    position: with `content` and `position`. Every layer has a backend of its own, under a name that "auto" never takes.
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]
    for name, module in found:
        key = f"seen {name} {id(module)}"
        BACKENDS[key] = _Watching(name, module.backend, see, position)
        stack.callback(BACKENDS.pop, key)
        stack.enter_context(replaced(module, backend=key))
    return len(found)


class _Watching:
    """A backend: `attention` and `window_attention` of `vitrel.ops`, by `backend`, each seen before."""

    def __init__(self, name: str, backend: str, see: Callable[[Layer], None], position: bool):
        self.name, self.backend, self.see, self.position = name, backend, see, position

    def refuses(self, call: Call) -> str:
        return ""  # the backend in use will say so itself

    def pays(self, call: Call) -> bool:
        return False

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None, dropout_p: float
    ) -> Tensor:
        tokens = torch.arange(grid.tokens, device=q.device)[None]
        seen = None if mask is None else mask.expand(*q.shape[:-1], -1)[:, None]  # [B, 1, H, N, N]
        self._show((self.name, grid, None, (0, 0), tokens), q[:, None], k[:, None], terms, grid, seen)
        return attention(q, k, v, terms, grid, mask, dropout_p, self.backend)

    def window_attention(
        self,
        qkv: Tensor,
        terms: Terms,
        grid: Grid,
        window: tuple[int, int],
        shift: tuple[int, int],
        num_heads: int,
        dropout_p: float,
    ) -> Tensor:
        layout, n = windows(grid.h, grid.w, window, shift, qkv.device), window[0] * window[1]
        tokens = torch.full_like(layout.source, -1)
        tokens[layout.inverse] = torch.arange(grid.tokens, device=qkv.device)
        x = qkv.flatten(1, 2)[:, layout.source].unflatten(2, (3, num_heads, -1)).unflatten(1, (-1, n))
        q, k, _ = x.permute(3, 0, 1, 4, 2, 5).unbind(0)  # [B, W, H, N, D] each
        shifted = tuple(axis_shift(*axis) for axis in zip(grid[:2], window, shift, strict=True))
        where = self.name, grid, window, shifted, tokens.unflatten(0, (-1, n))
        visible = layout.visible.unflatten(0, (-1, n))[None, :, None]  # [1, W, 1, N, N]
        self._show(where, q, k, terms, Grid(*window), visible)
        return window_attention(qkv, terms, grid, window, shift, num_heads, dropout_p, self.backend)

    def _show(self, where: Where, q: Tensor, k: Tensor, terms: Terms, grid: Grid, mask: Tensor | None) -> None:
        q, k = upcast(q), upcast(k)
        bare = Terms(scale=terms.scale)
        with no_autocast(q.device):
            logits = masked_logits(q, k, terms, grid, mask)
            content = masked_logits(q, k, bare, grid, mask) if self.position else None
        hidden = logits == float("-inf")
        self.see(from_logits(where, logits, content, ~hidden if bool(hidden.any()) else None))
