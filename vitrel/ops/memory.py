"""Segment recurrence (Transformer-XL, arXiv 1901.02860, sec. 3.2; XLNet): keys and values of earlier segments before the own.

In vision a segment is a tile or a frame, and those before it lie above it: the grid of the keys has their rows first, so that
offsets continue across the border.
"""

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.dispatch import attention
from vitrel.position.terms import Terms

Past = tuple[Tensor, Tensor]  # keys and values [B, H, rows * w, D] of one layer, without prefix tokens


class Segment:
    """What one layer of attention meets in place of its grid: the grid of all keys, and the earlier keys and values.

    Prefix tokens belong to their segment: they see all its keys, and later segments do not see them. Terms are on `keys`.
    """

    def __init__(self, keys: Grid, past: Past | None = None):
        self.keys, self.past = keys, past
        self.own: Past | None = None  # set by `attention`

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, mask: Tensor | None, dropout_p: float, backend: str
    ) -> Tensor:
        """[B, H, M, D] each of the segment's own tokens -> [B, H, M, D]; mask as in vitrel.ops.attention, on all keys."""
        p = self.keys.prefix
        self.own = k[:, :, p:], v[:, :, p:]
        if self.past is None:
            return attention(q, k, v, terms, self.keys, mask, dropout_p, backend)
        k, v = (torch.cat((x[:, :, :p], earlier, x[:, :, p:]), 2) for x, earlier in zip((k, v), self.past, strict=True))
        if not p:
            return attention(q, k, v, terms, self.keys, mask, dropout_p, backend)
        # Queries are the last tokens of the key grid and prefix tokens its first: the rows between are filled, then dropped.
        between = torch.zeros_like(self.past[0])
        out = attention(torch.cat((q[:, :, :p], between, q[:, :, p:]), 2), k, v, terms, self.keys, mask, dropout_p, backend)
        return torch.cat((out[:, :, :p], out[:, :, p + between.shape[2] :]), 2)

    def last(self, n: int) -> Past:
        """The last n keys and values, once the layer has run: earlier ones and its own, without prefix tokens."""
        both = self.own if self.past is None else tuple(torch.cat(x, 2) for x in zip(self.past, self.own, strict=True))
        return tuple(x[:, :, x.shape[2] - n :] for x in both)
